"""Progress of long work: a spinner on a terminal, else one line per stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from outrider.progress_stages import AGAIN_S, SOON_S, StageReporter, current_stage, stage

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 5.0  # shorter work needs no line
_SPIN_S = 0.2


class ProgressLines:
    """Rate-limited progress lines, reported by the worker itself."""

    def __init__(self, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._start_s = self._reported_s = time.monotonic()

    def report(self, text: str) -> None:
        """Prints the text with the elapsed seconds, at most once per `every_s`."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= self._every_s:
            self._reported_s = now_s
            self._say(f"{text}, {now_s - self._start_s:.0f} s so far")


class ProgressSpinner:
    """Shows progress around work that reports none itself. `stop` may be called early, and twice.
    A `stage` within the work replaces the text while it lasts."""

    def __init__(
        self,
        console: Console,
        what: str,
        *,
        spins: bool = True,
        soon_s: float = SOON_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._spinner = console.status(what) if spins and console.is_terminal else None
        self._what = what
        self._stage = ExitStack()
        self._over = threading.Event()

        def print_line(words: str) -> None:
            console.print(words, markup=False, highlight=False)

        self._reporter = StageReporter(print_line, soon_s=soon_s, again_s=again_s)

    def start(self) -> None:
        self._stage.enter_context(stage(self._what))
        if self._spinner is None:
            self._reporter.start()
            return
        self._spinner.start()
        threading.Thread(target=self._spin, name="outrider-progress", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        self._stage.close()
        self._reporter.stop()
        if self._spinner is not None:
            self._spinner.stop()

    def _spin(self) -> None:
        assert self._spinner is not None
        while not self._over.wait(_SPIN_S):
            words = current_stage() or self._what
            self._spinner.update(words.replace("[", "\\["))  # no markup

    def __enter__(self) -> ProgressSpinner:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
