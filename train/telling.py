"""What a distillation tells on the terminal: bars there, else a line every few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.progress import AtWork, Lines


class Bar(Protocol):
    def at(self, done: int, note: str = "") -> None: ...


class Teller:
    """Speaks on stderr, unless it is quiet."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def at_work(self, what: str) -> AbstractContextManager[object]:
        return AtWork(self._console, what)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Bar]:
        shown = self._console.is_terminal and not self._console.quiet
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, disable=not shown) as progress:
            task = progress.add_task("", total=total, note="")
            lines = Lines(self.say)

            class Shown:
                def at(self, done: int, note: str = "") -> None:
                    if shown:
                        progress.update(task, completed=done)
                        if note:
                            progress.update(task, note=note)
                    else:
                        told = f", {note}" if note else ""
                        lines.tell(f"{what}: {done} of {total}{told}")

            yield Shown()
