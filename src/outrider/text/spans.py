"""Which characters of a text were drafted."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import OutputDelta


class Span(NamedTuple):
    """The next `num_chars` characters come from drafted tokens, or all from the target's own."""

    num_chars: int
    is_draft: bool


class TextSpans:
    """Cuts the text of one sample's deltas by who wrote it.

    The text of a delta need not be that of its tokens: what may begin a stop string is held back,
    and a character may take several tokens. So the tokens are decoded once more, only to know how
    many characters each is worth.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._untold: deque[Span] = deque()

    def take(self, delta: OutputDelta) -> list[Span]:
        for position, token in enumerate(delta.token_ids):
            num_chars = len(self._detokenizer.push(token))
            if num_chars:
                self._untold.append(Span(num_chars, position < delta.num_accepted))
        return self._cut(len(delta.text))

    def _cut(self, num_chars: int) -> list[Span]:
        spans: list[Span] = []
        while num_chars:
            # Bytes that never become a character are written when the text ends, by nobody.
            size, is_draft = self._untold.popleft() if self._untold else Span(num_chars, False)
            if size > num_chars:
                self._untold.appendleft(Span(size - num_chars, is_draft))
                size = num_chars
            num_chars -= size
            if spans and spans[-1].is_draft == is_draft:
                size += spans.pop().num_chars
            spans.append(Span(size, is_draft))
        return spans
