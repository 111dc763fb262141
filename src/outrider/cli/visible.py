"""Text of models and servers on a terminal, with control characters escaped.

An escape sequence could move the cursor, set the title or make the terminal type. Each character
is escaped by itself, so a sequence split across chunks is harmless, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

_KEPT = "\n\t"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))  # C0, delete and C1
_ESCAPED = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in _KEPT}


def visible(text: str) -> str:
    """With control characters but newline and tab as \\x1b and the like."""
    return text.translate(_ESCAPED)


def visible_on(file: IO[str], text: str) -> str:
    """Escaped only if `file` is a terminal: pipes get the text unchanged."""
    return visible(text) if file.isatty() else text


class SafeConsole(Console):
    """Writes only its own escape sequences; escapes those in the text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.is_terminal:
            self.push_render_hook(_Escaping())


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped:
    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        segments: Iterable[Segment] = console.render(self._shown, options)
        for each in segments:
            yield each if each.control else Segment(visible(each.text), each.style)
