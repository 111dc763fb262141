"""What a draft would have guessed of output that it only catches up on.

Under shared noise a text does not depend on its drafts: the guess at a position, drawn with the
row's own parameters and noise, is the one that drafting there would have proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.kernels.ops import Ops
from outrider.scheduler.types import Agreement
from outrider.workers.proposers.base import MOST_GUESSED
from outrider.workers.proposers.drafting import ids_to_guess
from outrider.workers.runner import Chunk, Runner
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import RowSampler, Span
from outrider.workers.sampling.verify import VerificationMode

_LOGIT_ROWS = 256  # about so many at a time: logits are large


class Behind(NamedTuple):
    """Known tokens of a row that its draft has yet to compute. It stands for itself: the row may be
    gone, or its text longer, when it is computed."""

    chunk: Chunk
    generation: int
    # The output in it, as drafts behind the text before: row j of the span is the guess at the
    # j-th of these positions, its last row that at the position after them. None: nothing to guess.
    span: Span | None


def output_span(
    sampler: RowSampler, text: Sequence[int], start: int, end: int, mode: VerificationMode
) -> Span | None:
    """What is to be guessed when positions `start` to `end` of `text` are computed, if anything.

    The guess at `start` needs the logits before it, which an earlier pass had.
    """
    if end <= sampler.prompt_len:
        return None
    # In rejection mode a draft that is not the target's sample may stand.
    if mode == "rejection" and not sampler.is_greedy:
        return None
    # Penalties, biases and bans are worked out from the text for each position anew: that costs
    # more than these bits are worth, and no other path tells them either.
    if sampler.changes_logits:
        return None
    first = max(start + 1, sampler.prompt_len, end - MOST_GUESSED)
    return Span(sampler, text[:first], text[first:end])


class _Foreseen(NamedTuple):
    generation: int
    position: int
    guess: int


class Foresight:
    """Compares guesses with committed tokens. The guess behind the last known token of a pass is
    kept until that token is caught up on as well."""

    def __init__(self, runner: Runner, ops: Ops) -> None:
        self._runner = runner
        self._ops = ops
        self._foreseen: dict[int, _Foreseen] = {}  # by row
        self._agreements: dict[int, Agreement] = {}  # by row: nobody may ask for them

    def compare(self, hidden: Tensor, caught_up: Sequence[Behind]) -> None:
        """`hidden` are the states of all chunks, one after the other."""
        for part, indices in _parts(caught_up):
            spans = [each.span for each in part if each.span is not None]
            num_ids = ids_to_guess(spans, self._runner.vocab_size, "shared")
            logits = self._runner.logits(hidden, indices, num_ids)
            guesses = sample(logits, spans, self._ops, vocab=self._runner.vocab).tolist()
            first = 0
            for each, span in zip(part, spans, strict=True):
                self._settle(each, span, guesses[first : first + span.num_rows])
                first += span.num_rows

    def take(self) -> tuple[Agreement, ...]:
        """What was found since the last call."""
        found = tuple(self._agreements.values())
        self._agreements = {}
        return found

    def _settle(self, behind: Behind, span: Span, guesses: list[int]) -> None:
        row, start, tokens = behind.chunk
        hits = [guess == token for guess, token in zip(guesses, span.drafts, strict=False)]
        known = self._foreseen.get(row)
        is_next = span.base_len == start + 1
        if is_next and known is not None and known[:2] == (behind.generation, start):
            hits.insert(0, known.guess == tokens[0])
        self._foreseen[row] = _Foreseen(behind.generation, start + len(tokens), guesses[-1])
        if hits:
            self._agreements[row] = Agreement(row, behind.generation, tuple(hits))


def _parts(caught_up: Sequence[Behind]) -> Iterator[tuple[list[Behind], list[int]]]:
    """Chunks with something to guess, about `_LOGIT_ROWS` logits together, and where the states
    for these are in the pass."""
    part: list[Behind] = []
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
