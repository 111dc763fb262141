"""What long work is doing, on a terminal beside a spinner, else in a line for each stage of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from outrider.stages import AGAIN_S, SOON_S, StageReporter, current_stage, stage

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 5.0  # work that is done sooner needs no line
_SPIN_S = 0.2


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
    """Around work that cannot speak for itself. It may be stopped before the end, and twice. What
    is done within it is shown in its place, as far as that names itself by `stage`."""

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
