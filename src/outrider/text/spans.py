"""Attributes the characters of a text to draft, target or prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import OutputDelta, Round

PROMPT, TARGET, BONUS, RECOVERED = "prompt", "target", "bonus", "recovered"

_Label = TypeVar("_Label")


class Span(NamedTuple):
    """`num_chars` characters, all from accepted draft tokens or all from the target's own."""

    num_chars: int
    is_draft: bool


class Origin(NamedTuple):
    """The origin of a token: `name` is the proposer of an accepted draft token, "bonus" or
    "recovered" for the target's own token of a round, "target" without draft tokens, or "prompt"
    for echoed text. `round` is the number of the round in the sample."""

    name: str
    round: int


class Piece(NamedTuple):
    """The text of one token."""

    text: str
    origin: Origin


class _Cuts(Generic[_Label]):
    """Cuts the text of one sample's deltas by token, each with its label.

    A delta's text need not match its tokens: text that may begin a stop string is held back, and a
    character may take several tokens. So the tokens are decoded once more to count their
    characters. The text may begin with the echoed prompt, which has no tokens here. Text beyond the
    tokens gets the label `of_no_token`.
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
            # Incomplete characters are released at the end of the text.
            size, label = self._untold.popleft() if self._untold else (num_chars, self.of_no_token)
            if size > num_chars:
                self._untold.appendleft((size - num_chars, label))
                size = num_chars
            num_chars -= size
            yield size, label


class TextSpans:
    """Cuts the text of one sample's deltas into drafted and own spans."""

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
    """Cuts the text of one sample's deltas by token; accepted draft tokens are from `proposer`."""

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
