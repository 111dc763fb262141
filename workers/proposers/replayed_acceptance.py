"""Replayed acceptance: what a draft model would have guessed of output it only catches up on.

Under shared noise a text does not depend on its draft tokens: the guess at a position, drawn with
the row's own parameters and noise, is the one that drafting there would have proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.kernels.ops import Ops
from outrider.scheduler.types import Agreement
from outrider.workers.proposers.base import MAX_REPLAYED_TOKENS
from outrider.workers.proposers.drafting import ids_to_score
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import VerificationMode

_LOGIT_ROWS = 256  # about this many at a time: logits are large


class CatchUpChunk(NamedTuple):
    """Known tokens of a row that its draft has yet to compute. Self-contained: the row may have
    ended or grown by the time it is computed."""

    chunk: RowChunk
    generation: int
    # The output tokens in it, as draft tokens after the text before: row j of the span is the guess
    # at the j-th of these positions, the last row that after them. None: nothing to replay.
    span: LogitSpan | None


def output_span(
    sampler: RowSampler, text: Sequence[int], start: int, end: int, mode: VerificationMode
) -> LogitSpan | None:
    """The span to replay when positions `start` to `end` of `text` are computed, if any.

    The guess at `start` comes from the logits before it, in an earlier pass.
    """
    if end <= sampler.prompt_len:
        return None
    # In rejection mode a draft token may be accepted without being the target's sample.
    if mode == "rejection" and not sampler.is_greedy:
        return None
    # Penalties, biases and bans are recomputed from the text at each position: that costs more than
    # these statistics are worth, and no other path reports them either.
    if sampler.changes_logits:
        return None
    first = max(start + 1, sampler.prompt_len, end - MAX_REPLAYED_TOKENS)
    return LogitSpan(sampler, text[:first], text[first:end])


class _PendingGuess(NamedTuple):
    generation: int
    position: int
    guess: int


class ReplayedAcceptance:
    """Compares guesses with committed tokens. The guess after the last token of a pass is kept
    until the next catch-up of the row."""

    def __init__(self, runner: Runner, ops: Ops) -> None:
        self._runner = runner
        self._ops = ops
        self._pending: dict[int, _PendingGuess] = {}  # by row
        self._agreements: dict[int, Agreement] = {}  # by row: bounded if never taken

    def compare(self, hidden: Tensor, caught_up: Sequence[CatchUpChunk]) -> None:
        """`hidden` are the states of all chunks, concatenated."""
        for part, indices in _parts(caught_up):
            spans = [each.span for each in part if each.span is not None]
            num_ids = ids_to_score(spans, self._runner.vocab_size, "shared")
            logits = self._runner.logits(hidden, indices, num_ids)
            guesses = sample(logits, spans, self._ops, vocab=self._runner.vocab).tolist()
            first = 0
            for each, span in zip(part, spans, strict=True):
                self._settle(each, span, guesses[first : first + span.num_rows])
                first += span.num_rows

    def take(self) -> tuple[Agreement, ...]:
        """The agreements since the last call."""
        agreements = tuple(self._agreements.values())
        self._agreements = {}
        return agreements

    def _settle(self, each: CatchUpChunk, span: LogitSpan, guesses: list[int]) -> None:
        row, start, tokens = each.chunk
        hits = [guess == token for guess, token in zip(guesses, span.drafts, strict=False)]
        known = self._pending.get(row)
        is_next = span.base_len == start + 1
        if is_next and known is not None and known[:2] == (each.generation, start):
            hits.insert(0, known.guess == tokens[0])
        self._pending[row] = _PendingGuess(each.generation, start + len(tokens), guesses[-1])
        if hits:
            self._agreements[row] = Agreement(row, each.generation, tuple(hits))


def _parts(caught_up: Sequence[CatchUpChunk]) -> Iterator[tuple[list[CatchUpChunk], list[int]]]:
    """Chunks with a span, about `_LOGIT_ROWS` logits together, and the indices of their states in
    the pass."""
    part: list[CatchUpChunk] = []
    indices: list[int] = []
    first = 0
    for each in caught_up:
        end = first + len(each.chunk.tokens)
        if each.span is not None:
            part.append(each)
            indices += range(end - each.span.num_rows, end)
        first = end
        if len(indices) >= _LOGIT_ROWS:
            yield part, indices
            part, indices = [], []
    if part:
        yield part, indices
