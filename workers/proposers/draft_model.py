"""The draft model: drafts token by token, and catches up with the committed text.

A row that drafts has at most two tokens to catch up on, and computes them first. All others have
time: what a plan has them catch up on is computed once the plan's outcome has been told, so that
no first token waits behind its draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.kernels.ops import Ops
from outrider.scheduler.proposers import own_guesses_kept
from outrider.scheduler.types import (
    Agreement,
    Proposal,
    RowInit,
    StepPlan,
    Verdict,
)
from outrider.workers.proposers.agreement import Behind, Foresight, output_span
from outrider.workers.proposers.base import DRAFT
from outrider.workers.proposers.drafting import (
    Drafting,
    RowSamplers,
    guess_at_once,
    ids_to_guess,
    start_drafting,
    take_step,
)
from outrider.workers.rows import RowTable
from outrider.workers.runner import Chunk, Runner
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import Span
from outrider.workers.sampling.verify import VerificationMode


class DraftProposer:
    """Proposes the draft model's own guesses of the target's samples.

    `computed[row]` counts tokens of the row with valid draft KV, those included that are put off
    until `catch_up`. It follows the verdicts by the rule the scheduler uses (`own_guesses_kept`),
    so both always agree on who is how far.
    """

    def __init__(
        self, rows: RowTable, runner: Runner, ops: Ops, verification: VerificationMode
    ) -> None:
        self._rows = rows
        self.runner = runner
        self._ops = ops
        self._verification = verification
        self.computed: dict[int, int] = {}
        self._samplers = RowSamplers(rows, runner)
        self._drafted: dict[int, int] = {}  # rows whose round has no verdict yet, and how far
        self._behind: list[Behind] = []  # what the last plan put off
        self._foresight = Foresight(runner, ops)

    def follow(self, plan: StepPlan) -> None:
        # The plan may give blocks to others, to write them or to read what is cached there.
        self.catch_up()
        self._rows.begin(plan)
        for row in plan.draft_released:
            self.computed[row] = 0
        for init in plan.admitted:
            self.computed[init.row] = init.draft_cached
            self._samplers.forget(init.row)

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        """Drafts; what other rows are to catch up on is left to `catch_up`."""
        chunks, drafting, last_of = self._begin_round(plan)
        least = plan.least_survival
        if chunks and not self._draft_at_once(chunks, drafting, least):
            self._draft_step_by_step(chunks, drafting, last_of, least)
        # Added to: a plan that only catches up may come before the verdict of a round.
        self._drafted |= {each.row: len(each.span.drafts) for each in drafting}
        return {each.row: each.proposal for each in drafting}

    def observe(self, verdict: Verdict) -> None:
        self._rows.commit(verdict)
        for row in verdict.rows:
            drafted = self._drafted.pop(row.row, None)
            if drafted is not None and self._rows.is_current(row.row, row.generation):
                kept = own_guesses_kept(drafted, row.num_accepted)
                self.computed[row.row] = row.base_len + kept

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Start anew with these rows; no KV of before is valid."""
        self._rows.adopt(epoch, rows)
        self.computed = {init.row: init.draft_cached for init in rows}
        self._samplers.clear()
        self._drafted, self._behind = {}, []

    def catch_up(self) -> None:
        """Compute what the last plan put off, in one ragged pass. Of a row that has ended since as
        well: its blocks may be cached, as the scheduler counts them as computed."""
        behind, self._behind = self._behind, []
        if behind:
            hidden = self.runner.forward([each.chunk for each in behind])
            self._foresight.compare(hidden, behind)

    def take_agreements(self) -> tuple[Agreement, ...]:
        return self._foresight.take()

    def _begin_round(self, plan: StepPlan) -> tuple[list[Chunk], list[Drafting], list[int]]:
        """What drafting rows have not seen, who drafts, and the last token of each of these among
        those of all chunks; notes what the others have not seen."""
        chunks: list[Chunk] = []
        drafting: list[Drafting] = []
        last_of: list[int] = []
        total = 0
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
            chunk = Chunk(row, start, tokens[start:end])
            self.computed[row] = end
            if not planned.depth:
                self._put_off(chunk, planned.generation)
                continue
            chunks.append(chunk)
            total += end - start
            if planned.proposer == DRAFT and end == len(tokens):
                sampler = self._samplers[row]
                if sampler.can_choose:
                    span = Span(sampler, tokens, drafts=[])
                    drafting.append(start_drafting(row, planned.depth, planned.generation, span))
                    last_of.append(total - 1)
        return chunks, drafting, last_of

    def _draft_at_once(self, chunks: list[Chunk], drafting: list[Drafting], least: float) -> bool:
        """Whether all was drafted that is to be: for one row there may be a faster way."""
        if len(chunks) != 1 or not drafting:
            return False
        [each] = drafting
        if not each.span.sampler.is_greedy and self._verification != "shared":
            return False
        guesses = guess_at_once(self.runner, chunks[0], each.depth, each.span, least)
        if guesses is None:
            return False
        each.span.drafts = guesses.tokens
        each.confidences.extend(guesses.confidences)
        return True

    def _draft_step_by_step(
        self, chunks: list[Chunk], drafting: list[Drafting], last_of: list[int], least: float
    ) -> None:
        """One ragged pass over what rows have not seen, and one for each draft but the last."""
        if not drafting:
            self.runner.forward(chunks)
            return
        active, wanted = drafting, last_of
        while active:
            spans = [each.span for each in active]
            num_ids = ids_to_guess(spans, self.runner.vocab_size, self._verification)
            logits = self.runner.scores(chunks, wanted, num_ids)
            step = draft_sample(logits, spans, self._ops, self._verification, self.runner.vocab)
            take_step(active, step)
            active = [each for each in active if each.goes_on(least)]
            chunks, wanted = _last_drafts(active), list(range(len(active)))

    def _put_off(self, chunk: Chunk, generation: int) -> None:
        row, end = self._rows[chunk.row], chunk.start + len(chunk.tokens)
        span = None
        if end > row.init.prompt_len:  # prompt tokens were chosen by nobody
            sampler = self._samplers[chunk.row]
            span = output_span(sampler, row.tokens, chunk.start, end, self._verification)
        self._behind.append(Behind(chunk, generation, span))


def _last_drafts(active: list[Drafting]) -> list[Chunk]:
    return [
        Chunk(each.row, each.span.base_len + len(each.span.drafts) - 1, each.span.drafts[-1:])
        for each in active
    ]
