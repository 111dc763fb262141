"""The draft model: drafts token by token, and catches up with the committed text.

A row that drafts lacks KV of at most two tokens, and computes them first. For other rows catch-up
is deferred until the plan's outcome is known, so that it delays no first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from outrider.catalog.proposers import DRAFT, kv_rule_of
from outrider.kernels.ops import Ops
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.types import (
    NONE_AHEAD,
    Agreement,
    AheadCounts,
    Proposal,
    RowInit,
    StepPlan,
    Verdict,
)
from outrider.workers.costs import measure_step
from outrider.workers.proposers.base import Proposer
from outrider.workers.proposers.draft_ahead import DraftAhead
from outrider.workers.proposers.drafting import (
    DraftingRow,
    RowSamplers,
    draft_in_one_call,
    ids_to_score,
    last_tokens,
    start_drafting,
    take_step,
)
from outrider.workers.proposers.replayed_acceptance import (
    CatchUpChunk,
    ReplayedAcceptance,
    output_span,
)
from outrider.workers.rows import RowTable
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import LogitSpan
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.scratch_rows import ScratchRows


class DraftProposer(Proposer):
    """Proposes the draft model's own guesses of the target's samples.

    `computed[row]` counts tokens of the row with valid draft KV, including those deferred to
    `catch_up`. It follows the verdicts by the rule of its registration, which the scheduler uses
    too, so both always agree on who is how far.
    """

    def __init__(
        self,
        rows: RowTable,
        runner: Runner,
        ops: Ops,
        verification: VerificationMode,
        scratch: ScratchRows | None = None,
    ) -> None:
        """With `scratch` it can draft ahead of outcomes."""
        self._rows = rows
        self.runner = runner
        self._ops = ops
        self._verification = verification
        self.computed: dict[int, int] = {}
        self._samplers = RowSamplers(rows, runner)
        self._kv_rule = kv_rule_of(DRAFT)
        # By row, until the verdict: positions valid before, known tokens fed, drafts.
        self._rounds: dict[int, tuple[int, int, int]] = {}
        self._deferred: list[CatchUpChunk] = []  # deferred by the last plan
        self._replayed = ReplayedAcceptance(runner, ops)
        self._ahead = None if scratch is None else DraftAhead(runner, ops, scratch)

    def follow(self, plan: StepPlan) -> None:
        # First, since the plan may reassign blocks, or share those that catch-up writes.
        self.catch_up()
        self._rows.begin(plan)
        for row in plan.draft_released:
            self.computed[row] = 0
        for init in plan.admitted:
            self.computed[init.row] = init.draft_cached
            self._samplers.forget(init.row)

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        """Drafts; defers the catch-up of other rows to `catch_up`."""
        fed, drafting = self._begin_round(plan)
        least = plan.least_survival
        if self._ahead is not None:
            for each in drafting:
                self._ahead.begin_from_branch(each, fed[each.row].start)
        if fed and not self._draft_in_one_call(fed, drafting, least):
            self._draft_step_by_step(fed, drafting, least)
        # Added: a plan with catch-up only may come before the verdict of a round.
        for each in drafting:
            known = fed[each.row]
            self._rounds[each.row] = (known.start, len(known.tokens), len(each.span.drafts))
        if self._ahead is not None:
            self._ahead.begin(drafting)
        return {each.row: each.proposal for each in drafting}

    def draft_ahead(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None:
        """Draft for `plan` while the target verifies the last round, until its outcome is there."""
        if self._ahead is not None:
            self._ahead.draft(plan, has_outcome)

    def observe(self, verdict: Verdict) -> None:
        self._rows.commit(verdict)
        for row in verdict.rows:
            last = self._rounds.pop(row.row, None)
            if last is not None and self._rows.is_current(row.row, row.generation):
                self.computed[row.row] = self._kv_rule(*last, row.num_accepted, row.base_len)

    def note(self, plan: StepPlan, verdict: Verdict) -> None:
        computed = self.computed
        for planned, row in zip(plan.rows, verdict.rows, strict=True):
            if planned.depth and planned.draft_tokens:
                known = computed[row.row]
                counts = (known, row.base_len - known, row.num_drafted, row.num_accepted)
                computed[row.row] = self._kv_rule(*counts, row.base_len)

    def take_ahead_counts(self) -> AheadCounts:
        """Of `draft_ahead`, since the last call."""
        return NONE_AHEAD if self._ahead is None else self._ahead.take_counts()

    def measure_costs(self, target: Runner) -> StepCosts:
        return measure_step(target, self.runner, self._ops)

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Start over with these rows; all KV is invalid."""
        self._rows.adopt(epoch, rows)
        self.computed.clear()
        self.computed |= {init.row: init.draft_cached for init in rows}
        self._samplers.clear()
        self._rounds, self._deferred = {}, []
        if self._ahead is not None:
            self._ahead.begin(())

    def catch_up(self) -> None:
        """Compute what the last plan deferred, in one ragged pass. Includes rows that have ended
        since: the scheduler counts their blocks as computed and may cache them."""
        deferred, self._deferred = self._deferred, []
        if deferred:
            hidden = self.runner.forward([each.chunk for each in deferred])
            self._replayed.compare(hidden, deferred)

    def take_agreements(self) -> tuple[Agreement, ...]:
        return self._replayed.take()

    def _begin_round(self, plan: StepPlan) -> tuple[dict[int, RowChunk], list[DraftingRow]]:
        """The chunks that rows with a depth lack, by row, and those that draft. Defers the chunks
        of other rows."""
        fed: dict[int, RowChunk] = {}
        drafting: list[DraftingRow] = []
        for planned in plan.rows:
            if not planned.draft_tokens:
                continue
            row = planned.row
            self.runner.extend_table(row, planned.draft_start, planned.draft_blocks)
            tokens = self._rows[row].tokens
            start = self.computed[row]
            end = min(start + planned.draft_tokens, len(tokens))
            if end == start:
                continue
            chunk = RowChunk(row, start, tokens[start:end])
            self.computed[row] = end
            if not planned.depth:
                self._defer(chunk, planned.generation)
                continue
            fed[row] = chunk
            if planned.proposer == DRAFT and end == len(tokens):
                sampler = self._samplers[row]
                if sampler.can_choose:
                    span = LogitSpan(sampler, tokens, drafts=[])
                    drafting.append(start_drafting(row, planned.depth, planned.generation, span))
        return fed, drafting

    def _draft_in_one_call(
        self, fed: dict[int, RowChunk], drafting: list[DraftingRow], least: float
    ) -> bool:
        """Draft the whole round in one call, if there is a single row; returns whether it did."""
        if len(fed) != 1 or not drafting:
            return False
        [each] = drafting
        if each.span.drafts or (not each.span.sampler.is_greedy and self._verification != "shared"):
            return False
        guesses = draft_in_one_call(self.runner, fed[each.row], each.depth, each.span, least)
        if guesses is None:
            return False
        each.span.drafts = guesses.tokens
        each.confidences.extend(guesses.confidences)
        return True

    def _draft_step_by_step(
        self, fed: dict[int, RowChunk], drafting: list[DraftingRow], least: float
    ) -> None:
        """One ragged pass over what rows lack, and one for each draft token but the last. Rows that
        were drafted ahead go on behind their drafts."""
        begun = [each for each in drafting if each.span.drafts]
        going_on = [each for each in begun if each.continues(least)]
        # In the order of their chunks.
        active = [each for each in drafting if not each.span.drafts] + going_on
        known = {each.row for each in begun}
        chunks = [chunk for row, chunk in fed.items() if row not in known]
        chunks += last_tokens(going_on)
        if not active:
            if chunks:
                self.runner.forward(chunks)
            return
        ends = dict(
            zip(
                [chunk.row for chunk in chunks],
                accumulate(len(chunk.tokens) for chunk in chunks),
                strict=True,
            )
        )
        indices = [ends[each.row] - 1 for each in active]
        while active:
            spans = [each.span for each in active]
            num_ids = ids_to_score(spans, self.runner.vocab_size, self._verification)
            logits = self.runner.scores(chunks, indices, num_ids)
            step = draft_sample(logits, spans, self._ops, self._verification, self.runner.vocab)
            take_step(active, step)
            active = [each for each in active if each.continues(least)]
            chunks, indices = last_tokens(active), list(range(len(active)))

    def _defer(self, chunk: RowChunk, generation: int) -> None:
        row, end = self._rows[chunk.row], chunk.start + len(chunk.tokens)
        span = None
        if end > row.init.prompt_len:  # prompt tokens were not sampled
            sampler = self._samplers[chunk.row]
            span = output_span(sampler, row.tokens, chunk.start, end, self._verification)
        self._deferred.append(CatchUpChunk(chunk, generation, span))
