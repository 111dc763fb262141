"""A stream of text in two colours: accepted drafts, and the target's own tokens."""

from __future__ import annotations

from collections import deque
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.detokenize import Detokenizer
    from outrider.engine.outputs import OutputDelta

ACCEPTED_COLOUR, OWN_COLOUR = "green", "magenta"


class ColouredText:
    """Writes a stream's text unchanged, each character in the colour of its token.

    The text of a delta need not be that of its tokens: what may begin a stop string is held back,
    and a character may take several tokens. So the tokens are decoded once more, only to know how
    many characters each is worth, and what is written is always the text itself.
    """

    def __init__(self, file: IO[str], detokenizer: Detokenizer) -> None:
        from rich.style import Style

        self._file = file
        self._detokenizer = detokenizer
        self._styles = {True: Style(color=ACCEPTED_COLOUR), False: Style(color=OWN_COLOUR)}
        self._unwritten: deque[tuple[bool, int]] = deque()  # (is a draft, characters)

    def write(self, delta: OutputDelta) -> None:
        for position, token in enumerate(delta.token_ids):
            size = len(self._detokenizer.push(token))
            self._unwritten.append((position < delta.num_accepted, size))
        text = delta.text
        while text:
            is_draft, size = self._take(len(text))
            self._file.write(self._styles[is_draft].render(text[:size]))
            text = text[size:]

    def _take(self, most: int) -> tuple[bool, int]:
        """Whose the next characters are, and how many of them."""
        while self._unwritten:
            is_draft, size = self._unwritten.popleft()
            if size > most:
                self._unwritten.appendleft((is_draft, size - most))
            if size:
                return is_draft, min(size, most)
        return False, most  # bytes that never became a character: written when the text ends
