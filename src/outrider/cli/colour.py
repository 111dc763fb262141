"""A stream of text in two colours: accepted drafts, and the target's own tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.text.detokenize import Detokenizer
    from outrider.text.outputs import OutputDelta

ACCEPTED_COLOUR, OWN_COLOUR = "green", "magenta"


class ColouredText:
    """Writes a stream's text, each character in the colour of its token."""

    def __init__(self, file: IO[str], detokenizer: Detokenizer) -> None:
        from outrider.text.spans import TextSpans

        self._file = file
        self._spans = TextSpans(detokenizer)

    def write(self, delta: OutputDelta) -> None:
        self._file.write(coloured(delta.text, self._spans.take(delta)))


def coloured(text: str, spans: Iterable[tuple[int, bool]]) -> str:
    """`text` cut into spans of (characters, whether they were drafted), with escape codes; its own
    control characters are shown."""
    from rich.style import Style

    from outrider.cli.visible import visible

    shown, at = "", 0
    for num_chars, is_draft in spans:
        colour = ACCEPTED_COLOUR if is_draft else OWN_COLOUR
        shown += Style(color=colour).render(visible(text[at : at + num_chars]))
        at += num_chars
    return shown + visible(text[at:])
