"""Progress of a distillation on stderr: bars on a terminal, else a line every few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.progress import ProgressLines, ProgressSpinner


class ProgressBar(Protocol):
    def update(self, done: int, note: str = "") -> None: ...


class ProgressReporter:
    """Writes to stderr, unless `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def log(self, text: str) -> None:
        self._console.print(text, markup=False)

    def task(self, what: str) -> AbstractContextManager[object]:
        return ProgressSpinner(self._console, what)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[ProgressBar]:
        has_bar = self._console.is_terminal and not self._console.quiet
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, disable=not has_bar) as progress:
            task = progress.add_task("", total=total, note="")
            lines = ProgressLines(self.log)

            class BarOrLines:
                def update(self, done: int, note: str = "") -> None:
                    if has_bar:
                        progress.update(task, completed=done)
                        if note:
                            progress.update(task, note=note)
                    else:
                        suffix = f", {note}" if note else ""
                        lines.report(f"{what}: {done} of {total}{suffix}")

            yield BarOrLines()
