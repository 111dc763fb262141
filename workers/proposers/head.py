"""A head on the target's hidden states: drafts from the end of the target's last pass.

It never needs catch-up: after every target pass the head extends over the tokens of its rows, so
they can draft in any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.ops import Ops
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.types import Proposal, RowPlan, StepPlan, Verdict
from outrider.workers.costs import measure_step
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.base import Proposer
from outrider.workers.proposers.drafting import (
    DraftingRow,
    RowSamplers,
    start_drafting,
    take_step,
)
from outrider.workers.rows import RowTable
from outrider.workers.runner import PassFeatures, RowChunk, Runner
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import LogitSpan
from outrider.workers.sampling.verify import VerificationMode


class _Slots(NamedTuple):
    """The slots that the head computes after a target pass."""

    chunks: list[RowChunk]
    places: list[int]  # indices of their tokens in the pass
    last_of: dict[int, int]  # row: index of its last slot, for rows that may draft now


class HeadProposer(Proposer):
    """Proposes a head's guesses of the target's samples.

    `_lengths[row]` is the length of the text that the row's state belongs to. If the text has
    another length, the row has no state yet, or that of an earlier request.
    """

    def __init__(
        self,
        name: str,
        rows: RowTable,
        runner: HeadRunner,
        ops: Ops,
        verification: VerificationMode,
    ) -> None:
        self.name = name
        self._rows = rows
        self.runner = runner
        self._ops = ops
        self._verification = verification
        self._lengths: dict[int, int] = {}
        self._samplers = RowSamplers(rows, runner)

    def follow(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        for init in plan.admitted:
            self._lengths.pop(init.row, None)
            self._samplers.forget(init.row)

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        drafting = [each for row in plan.rows if (each := self._begin(row)) is not None]
        if not drafting:
            return {}
        state = self.runner.states[torch.tensor([each.row for each in drafting])]
        active, level = drafting, 0
        while True:
            self._draft_one(active, self.runner.logits(state, level))
            level += 1
            remaining = [i for i, each in enumerate(active) if each.continues(plan.least_survival)]
            if not remaining:
                break
            if len(remaining) < len(active):
                active, state = [active[i] for i in remaining], state[torch.tensor(remaining)]
            state = self.runner.step(state, [_own_slot(each) for each in active], level)
        return {each.row: each.proposal for each in drafting}

    def observe(self, verdict: Verdict) -> None:
        """Extend over the committed tokens of the target's pass."""
        self._rows.commit(verdict)
        target = self.runner.target
        passed, target.last_pass = target.last_pass, None  # frees its large features
        if passed is not None:
            self.extend(passed, verdict)

    def note(self, plan: StepPlan, verdict: Verdict) -> None:
        """Passes on the device have extended over the committed tokens."""
        for row in verdict.rows:
            if row.tokens and self._rows.is_current(row.row, row.generation):
                self._lengths[row.row] = len(self._rows[row.row].tokens)

    def measure_costs(self, target: Runner) -> StepCosts:
        return measure_step(target, None, self._ops, self.runner)

    def extend(self, passed: PassFeatures, verdict: Verdict) -> None:
        slots = self._slots(passed, verdict)
        if not slots.chunks:
            return
        features = passed.features
        if len(slots.places) < features.shape[0]:
            features = features[torch.tensor(slots.places, device=features.device)]
        states = self.runner.extend(slots.chunks, features)
        if slots.last_of:
            rows, last = torch.tensor([[*slots.last_of], [*slots.last_of.values()]])
            self.runner.states[rows] = states[last]

    def _slots(self, passed: PassFeatures, verdict: Verdict) -> _Slots:
        """The tokens of the pass that are committed and have a committed successor. A head without
        KV needs only the last one per row. Rows of other proposers are skipped."""
        slots = _Slots([], [], {})
        sampled = {row.row: row.generation for row in verdict.rows if row.tokens}
        first = num_slots = 0
        for chunk in passed.chunks:
            first += len(chunk.tokens)
            row = self._rows[chunk.row]
            if row.init.proposer != self.name:
                continue
            text, place = row.tokens, first - len(chunk.tokens) - chunk.start
            begin, end = chunk.start, min(chunk.start + len(chunk.tokens), len(text) - 1)
            samples = chunk.row in sampled
            if not self.runner.head.spec.keeps_kv:
                begin = max(begin, end - 1) if samples else end
            if end > begin:
                slots.chunks.append(RowChunk(chunk.row, begin, text[begin + 1 : end + 1]))
                slots.places.extend(range(place + begin, place + end))
                num_slots += end - begin
                if samples:
                    slots.last_of[chunk.row] = num_slots - 1
                    self._lengths[chunk.row] = len(text)
        return slots

    def _begin(self, planned: RowPlan) -> DraftingRow | None:
        """Start drafting for a row; the head writes into the target's new blocks."""
        row = planned.row
        if planned.proposer != self.name or not planned.depth:
            return None
        tokens = self._rows[row].tokens
        if self._lengths.get(row) != len(tokens) or not self._samplers[row].can_choose:
            return None
        target = self.runner.target
        target.extend_table(row, planned.target_start, planned.target_blocks)
        max_depth = self.runner.head.spec.max_depth
        depth = planned.depth if max_depth is None else min(planned.depth, max_depth)
        span = LogitSpan(self._samplers[row], tokens, drafts=[])
        return start_drafting(row, depth, planned.generation, span)

    def _draft_one(self, active: list[DraftingRow], logits: Tensor) -> None:
        spans = [each.span for each in active]
        step = draft_sample(logits, spans, self._ops, self._verification, self.runner.vocab)
        take_step(active, step)


def _own_slot(each: DraftingRow) -> RowChunk:
    """The slot of the token before the last draft token, which completes it."""
    at = each.span.base_len + len(each.span.drafts) - 2
    return RowChunk(each.row, at, each.span.drafts[-1:])
