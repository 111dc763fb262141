"""Telling that long work goes on: a spinner on a terminal, else a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 5.0  # work that is done sooner needs no line


class Lines:
    """Something to say every few seconds, by whoever does the work."""

    def __init__(self, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._start_s = self._told_s = time.monotonic()

    def tell(self, text: str) -> None:
        """Says so with the seconds so far, unless something was said a moment ago."""
        now_s = time.monotonic()
        if now_s - self._told_s >= self._every_s:
            self._told_s = now_s
            self._say(f"{text}, {now_s - self._start_s:.0f} s so far")


class AtWork:
    """Around work that cannot speak for itself. It may be stopped before the end, and twice."""

    def __init__(
        self, console: Console, what: str, *, spins: bool = True, every_s: float = EVERY_S
    ) -> None:
        self._spinner = console.status(what) if spins and console.is_terminal else None
        self._lines = Lines(lambda line: console.print(line, markup=False, highlight=False), 0.0)
        self._what = what
        self._every_s = every_s
        self._over = threading.Event()

    def start(self) -> None:
        if self._spinner is not None:
            self._spinner.start()
        else:
            threading.Thread(target=self._tell, name="outrider-progress", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        if self._spinner is not None:
            self._spinner.stop()

    def _tell(self) -> None:
        while not self._over.wait(self._every_s):
            self._lines.tell(self._what)

    def __enter__(self) -> AtWork:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
