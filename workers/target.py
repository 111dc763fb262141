"""The target: one pass over prompt chunks and drafts, then the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.kernels.ops import Ops
from outrider.scheduler.types import (
    NO_TOKEN,
    Proposal,
    RowPlan,
    RowVerdict,
    StepPlan,
    Ticket,
    TokenLogprobs,
    Verdict,
)
from outrider.workers.rows import RowTable
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.logprobs import token_logprobs
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import SpanVerdict, VerificationMode, accept_matching, verify
from outrider.workers.selection import Offer, select_drafts

# About how many rows are sampled at a time: logits are large, and sampling takes several copies.
LOGIT_ROWS = 256


class _RowWork(NamedTuple):
    """One row's part of a pass: its chunk, and which of the pass's tokens and logits it uses."""

    planned: RowPlan
    chunk: RowChunk
    base_len: int
    span: LogitSpan | None  # None: a prompt chunk that does not sample
    num_drafted: int  # length of its proposal, of which the span verifies a part
    prompt_tokens: range  # tokens of the pass before a prompt token whose logprob is requested
    sample_tokens: range  # tokens of the pass that the span samples from


class LocalTarget:
    """Owns the target's weights and KV, and commits the text of every row."""

    lag = 0  # synchronous: the pass has ended when `verify` returns
    exclusivity = None  # any requests can share a step
    max_depth: int | None = None
    num_captures = 0  # see `DeviceStep`, which captures its passes

    def __init__(
        self, rows: RowTable, runner: Runner, ops: Ops, verification: VerificationMode
    ) -> None:
        self._rows = rows
        self.runner = runner
        self._ops = ops
        self._verification = verification
        self.computed: dict[int, int] = {}
        self.samplers: dict[int, RowSampler] = {}

    def capture(self, on_size: Callable[[], None]) -> None:
        """Nothing to do."""

    def capture_largest(self) -> int:
        return 0

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        """Run the pass; commit each row's accepted draft tokens and one of the target's own."""
        start_s = time.perf_counter()
        self.begin(plan)
        works = self._lay_out(plan, ticket)
        reader = self.runner.feature_reader
        keep_features = reader is not None and any(
            self._rows[row.row].init.proposer == reader for row in plan.rows
        )
        rows = self._run_pass(works, keep_features=keep_features)
        verify_s = time.perf_counter() - start_s
        verdict = Verdict(plan.epoch, plan.step, rows, ticket.draft_s, verify_s, ticket.agreements)
        self._rows.commit(verdict)
        return verdict

    def begin(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        for init in plan.admitted:
            self.computed[init.row] = init.target_cached
            self.samplers[init.row] = RowSampler.from_init(
                init, self.runner.vocab_size, self.runner.device, self.runner.vocab.held
            )

    def _lay_out(self, plan: StepPlan, ticket: Ticket) -> list[_RowWork]:
        """Each row's part, in the plan's order."""
        works: list[_RowWork] = []
        first = 0
        proposals = [self._proposal(planned, ticket) for planned in plan.rows]
        num_verified = _selected(plan, proposals)
        for planned, proposal, count in zip(plan.rows, proposals, num_verified, strict=True):
            row = self._rows[planned.row]
            self.runner.extend_table(planned.row, planned.target_start, planned.target_blocks)
            start = self.computed[planned.row]
            chunk_tokens = row.tokens[start : start + planned.num_tokens]
            span, num_drafted = None, 0
            if planned.samples:
                span = _span(self.samplers[planned.row], row.tokens, proposal, count)
                num_drafted = 0 if proposal is None else len(proposal.tokens)
                chunk_tokens += span.drafts
            end = first + len(chunk_tokens)
            prompt_tokens = range(0)
            if row.init.params.prompt_logprobs is not None:
                known = min(len(chunk_tokens), max(row.init.prompt_len - 1 - start, 0))
                prompt_tokens = range(first, first + known)
            num_sampled = span.num_rows if span is not None else 0
            sample_tokens = range(end - num_sampled, end)
            chunk = RowChunk(planned.row, start, chunk_tokens)
            works.append(
                _RowWork(
                    planned,
                    chunk,
                    len(row.tokens),
                    span,
                    num_drafted,
                    prompt_tokens,
                    sample_tokens,
                )
            )
            first = end
        return works

    def _proposal(self, planned: RowPlan, ticket: Ticket) -> Proposal | None:
        """The proposal for the row at its current length, if any."""
        if not (planned.samples and planned.depth):
            return None
        base_len = len(self._rows[planned.row].tokens)
        return ticket.drafts_for(planned.row, planned.generation, base_len)

    def _run_pass(self, works: list[_RowWork], *, keep_features: bool) -> tuple[RowVerdict, ...]:
        """The verdict of every row; the pass is a single call where no hidden states are needed."""
        chunks = [work.chunk for work in works]
        if not keep_features and not any(work.prompt_tokens for work in works):
            sampled, spans = _sampled(works), _spans(works)
            if all(span.sampler.wants_best_only for span in spans):
                best = self.runner.best(chunks, sampled)
                if best is not None:
                    return tuple(self._settle_all(works, accept_matching(best, spans)))
            logits = self.runner.score(chunks, sampled)
            if logits is not None:
                return tuple(self._verify_part(works, None, logits))
        hidden = self.runner.forward(chunks, keep_features=keep_features)
        rows: list[RowVerdict] = []
        for part in _parts(works):
            sampled = _sampled(part)
            own = self.runner.logits(hidden, sampled) if sampled else None
            rows += self._verify_part(part, hidden, own)
        return tuple(rows)

    def _verify_part(
        self, works: list[_RowWork], hidden: Tensor | None, logits: Tensor | None
    ) -> Iterator[RowVerdict]:
        """Verdicts of some of the rows, from their logits if they have any."""
        span_verdicts: Sequence[SpanVerdict] = ()
        if logits is not None:
            mode, vocab = self._verification, self.runner.vocab
            span_verdicts = verify(logits, _spans(works), self._ops, mode, vocab)
        return self._settle_all(works, span_verdicts, hidden, logits)

    def _settle_all(
        self,
        works: list[_RowWork],
        span_verdicts: Sequence[SpanVerdict],
        hidden: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Iterator[RowVerdict]:
        """`span_verdicts` are those of the rows that sample, in order."""
        verdicts, first = iter(span_verdicts), 0
        for work in works:
            if work.span is None:
                yield self._settle(work, None, hidden, None)
                continue
            end = first + work.span.num_rows
            wants_logits = work.span.sampler.params.logprobs is not None
            own = logits[first:end] if logits is not None and wants_logits else None
            yield self._settle(work, next(verdicts), hidden, own)
            first = end

    def _settle(
        self,
        work: _RowWork,
        span_verdict: SpanVerdict | None,
        hidden: Tensor | None,
        logits: Tensor | None,
    ) -> RowVerdict:
        """Advance the row's KV (the scheduler applies the same rule) and make its verdict."""
        planned = work.planned
        row, generation = planned.row, planned.generation
        prompt_logprobs = () if hidden is None else tuple(self._prompt_logprobs(work, hidden))
        if span_verdict is None or work.span is None:
            self.computed[row] += planned.num_tokens
            return RowVerdict(row, generation, work.base_len, 0, 0, 0, (), (), prompt_logprobs)
        self.computed[row] = work.base_len + span_verdict.num_accepted
        tokens, is_broken = span_verdict.tokens, span_verdict.tokens[-1] == NO_TOKEN
        if is_broken:
            tokens = (*tokens[:-1], 0)  # any valid id: the next pass may have begun
        logprobs: Sequence[TokenLogprobs] = ()
        num_top = work.span.sampler.params.logprobs
        if num_top is not None and logits is not None:
            whole = self.runner.vocab.gather(logits[: len(tokens)])
            logprobs = token_logprobs(whole, tokens, num_top)
        return RowVerdict(
            row,
            generation,
            work.base_len,
            work.num_drafted,
            len(work.span.drafts),
            span_verdict.num_accepted,
            tuple(tokens),
            tuple(logprobs),
            prompt_logprobs,
            is_broken,
        )

    def _prompt_logprobs(self, work: _RowWork, hidden: Tensor) -> Iterator[TokenLogprobs]:
        row = self._rows[work.planned.row]
        num_top = row.init.params.prompt_logprobs or 0
        for first in range(0, len(work.prompt_tokens), LOGIT_ROWS):
            tokens = work.prompt_tokens[first : first + LOGIT_ROWS]
            start = work.chunk.start + 1 + first
            successors = row.tokens[start : start + len(tokens)]
            logits = self.runner.vocab.gather(self.runner.logits(hidden, tokens))
            yield from token_logprobs(logits, successors, num_top)


def _selected(plan: StepPlan, proposals: Sequence[Proposal | None]) -> list[int]:
    """How many draft tokens of each row of the plan are verified."""
    offers = [
        Offer((), 0)
        if proposal is None
        else Offer(proposal.confidences, min(planned.num_verified, len(proposal.tokens)))
        for planned, proposal in zip(plan.rows, proposals, strict=True)
    ]
    return select_drafts(offers, plan.num_selected)


def _span(
    sampler: RowSampler, tokens: list[int], proposal: Proposal | None, num_verified: int
) -> LogitSpan:
    """The logit rows of a row of which `num_verified` draft tokens are verified."""
    if proposal is None:
        return LogitSpan(sampler, tokens)
    q = None if proposal.q is None else proposal.q[:num_verified]
    return LogitSpan(sampler, tokens, proposal.tokens[:num_verified], q)


def _spans(works: list[_RowWork]) -> list[LogitSpan]:
    return [work.span for work in works if work.span is not None]


def _sampled(works: list[_RowWork]) -> list[int]:
    """The tokens of the pass whose successors are sampled."""
    return [at for work in works for at in work.sample_tokens]


def _parts(works: list[_RowWork]) -> Iterator[list[_RowWork]]:
    """Consecutive rows with about `LOGIT_ROWS` logits together."""
    part: list[_RowWork] = []
    num_rows = 0
    for work in works:
        part.append(work)
        num_rows += len(work.sample_tokens)
        if num_rows >= LOGIT_ROWS:
            yield part
            part, num_rows = [], 0
    if part:
        yield part
