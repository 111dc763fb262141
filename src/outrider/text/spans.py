"""Who wrote which characters of a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import OutputDelta, Round

PROMPT, TARGET, BONUS, RECOVERED = "prompt", "target", "bonus", "recovered"

_Label = TypeVar("_Label")


class Span(NamedTuple):
    """The next `num_chars` characters come from drafted tokens, or all from the target's own."""

    num_chars: int
    is_draft: bool


class Origin(NamedTuple):
    """Where a token is from: `name` is that of whoever drafted it, or "bonus" or "recovered" for
    the target's own after drafts that were all accepted or were not, or "target" where there were
    none; `round` counts those of the sample. Text that repeats the prompt is from "prompt"."""

    name: str
    round: int


class Piece(NamedTuple):
    """The text of one token."""

    text: str
    origin: Origin


class _Cuts(Generic[_Label]):
    """Cuts the text of one sample's deltas by token, each with what is said of that token.

    The text of a delta need not be that of its tokens: what may begin a stop string is held back,
    and a character may take several tokens. So the tokens are decoded once more, only to know how
    many characters each is worth. The first may be of no token: the prompt's, repeated. What the
    text has beyond its tokens goes by `of_no_token`.
    """

    def __init__(self, detokenizer: Detokenizer, num_echoed: int, echoed: _Label) -> None:
        self._detokenizer = detokenizer
        self._untold: deque[tuple[int, _Label]] = deque()
        self.of_no_token = echoed
        if num_echoed:
            self._untold.append((num_echoed, echoed))

    def take(self, delta: OutputDelta, labels: Iterable[_Label]) -> Iterator[tuple[int, _Label]]:
        """Numbers of characters that make up the delta's text."""
        for token, label in zip(delta.token_ids, labels, strict=True):
            num_chars = len(self._detokenizer.push(token))
            if num_chars:
                self._untold.append((num_chars, label))
        return self._cut(len(delta.text))

    def _cut(self, num_chars: int) -> Iterator[tuple[int, _Label]]:
        while num_chars:
            # Bytes that never become a character are written when the text ends.
            size, label = self._untold.popleft() if self._untold else (num_chars, self.of_no_token)
            if size > num_chars:
                self._untold.appendleft((size - num_chars, label))
                size = num_chars
            num_chars -= size
            yield size, label


class TextSpans:
    """Cuts the text of one sample's deltas by who wrote it."""

    def __init__(self, detokenizer: Detokenizer, num_echoed: int = 0) -> None:
        self._cuts = _Cuts(detokenizer, num_echoed, echoed=False)

    def take(self, delta: OutputDelta) -> list[Span]:
        spans: list[Span] = []
        for size, is_draft in self._cuts.take(delta, delta.is_drafted):
            if spans and spans[-1].is_draft == is_draft:
                size += spans.pop().num_chars
            spans.append(Span(size, is_draft))
        return spans


class TextPieces:
    """Cuts the text of one sample's deltas by token; accepted drafts are from `proposer`."""

    def __init__(self, detokenizer: Detokenizer, proposer: str, num_echoed: int = 0) -> None:
        self._cuts = _Cuts(detokenizer, num_echoed, Origin(PROMPT, -1))
        self._proposer = proposer
        self._num_rounds = 0

    def take(self, delta: OutputDelta) -> list[Piece]:
        origins: list[Origin] = []
        for done in delta.rounds:
            drafted = Origin(self._proposer, self._num_rounds)
            own = Origin(_own_name(done), self._num_rounds)
            origins += [drafted] * done.num_accepted
            origins += [own] * (done.num_tokens - done.num_accepted)
            self._cuts.of_no_token = own
            self._num_rounds += 1
        start, pieces = 0, []
        for size, origin in self._cuts.take(delta, origins):
            pieces.append(Piece(delta.text[start : start + size], origin))
            start += size
        return pieces


def _own_name(done: Round) -> str:
    if not done.num_verified:
        return TARGET
    return BONUS if done.num_accepted == done.num_verified else RECOVERED
