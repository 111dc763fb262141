"""A head on the target's hidden states: drafts from where the target's last pass has ended.

It never catches up by itself: whatever the target has computed of rows it drafts for, the head
extends over at once, so both know the same tokens of these, and they may draft in any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.ops import Ops
from outrider.scheduler.types import Proposal, RowPlan, StepPlan, Verdict
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.drafting import (
    Drafting,
    RowSamplers,
    start_drafting,
    take_step,
)
from outrider.workers.rows import RowTable
from outrider.workers.runner import Chunk, Passed
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import Span
from outrider.workers.sampling.verify import VerificationMode


class _Slots(NamedTuple):
    """What a pass of the target allows the head to compute."""

    chunks: list[Chunk]
    places: list[int]  # which of the pass's tokens they stand for
    last_of: dict[int, int]  # row: which of the slots is its last, of rows that may draft now


class HeadProposer:
    """Proposes a head's guesses of the target's samples.

    `_lengths[row]` is how long the row's text is that its state stands for; a row whose text is
    another has no state yet, or one of a request before it.
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

    @property
    def max_depth(self) -> int | None:
        return self.runner.head.spec.max_depth

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
            going_on = [i for i, each in enumerate(active) if each.goes_on(plan.least_survival)]
            if not going_on:
                break
            if len(going_on) < len(active):
                active, state = [active[i] for i in going_on], state[torch.tensor(going_on)]
            state = self.runner.step(state, [_own_slot(each) for each in active], level)
        return {each.row: each.proposal for each in drafting}

    def observe(self, verdict: Verdict) -> None:
        """The target's pass is over: extend over all of it that was committed."""
        self._rows.commit(verdict)
        target = self.runner.target
        passed, target.passed = target.passed, None  # it is large, and of no further use
        if passed is not None:
            self.extend(passed, verdict)

    def note(self, verdict: Verdict) -> None:
        """Passes on the device have extended over all that was committed, as texts say by now."""
        for row in verdict.rows:
            if row.tokens and self._rows.is_current(row.row, row.generation):
                self._lengths[row.row] = len(self._rows[row.row].tokens)

    def extend(self, passed: Passed, verdict: Verdict) -> None:
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

    def _slots(self, passed: Passed, verdict: Verdict) -> _Slots:
        """Of each row's tokens in the pass, those of its text that have a successor there. Of heads
        that keep nothing the last alone matters, and rows that never draft cost nothing."""
        found = _Slots([], [], {})
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
                found.chunks.append(Chunk(chunk.row, begin, text[begin + 1 : end + 1]))
                found.places.extend(range(place + begin, place + end))
                num_slots += end - begin
                if samples:
                    found.last_of[chunk.row] = num_slots - 1
                    self._lengths[chunk.row] = len(text)
        return found

    def _begin(self, planned: RowPlan) -> Drafting | None:
        """A row that drafts in this round. Its head has slots where the target is to have some."""
        row = planned.row
        if planned.proposer != self.name or not planned.depth:
            return None
        tokens = self._rows[row].tokens
        if self._lengths.get(row) != len(tokens) or not self._samplers[row].can_choose:
            return None
        target = self.runner.target
        target.extend_table(row, planned.target_start, planned.target_blocks)
        most = self.max_depth
        depth = planned.depth if most is None else min(planned.depth, most)
        span = Span(self._samplers[row], tokens, drafts=[])
        return start_drafting(row, depth, planned.generation, span)

    def _draft_one(self, active: list[Drafting], logits: Tensor) -> None:
        spans = [each.span for each in active]
        step = draft_sample(logits, spans, self._ops, self._verification, self.runner.vocab)
        take_step(active, step)


def _own_slot(each: Drafting) -> Chunk:
    """That of the token before the last draft, which the draft is the successor of."""
    at = each.span.base_len + len(each.span.drafts) - 2
    return Chunk(each.row, at, each.span.drafts[-1:])
