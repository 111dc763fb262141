"""Named stages of long work, reported while they run.

Long work names itself by `stage`. A `StageReporter` reports each stage that takes longer than
`SOON_S`, and again every `AGAIN_S`; of nested stages, the innermost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

SOON_S = 3.0  # shorter stages need no line
AGAIN_S = 30.0

Update = Callable[[str], None]
"""Replaces the stage's text, to show how far it is."""


class _Stage:
    def __init__(self, words: str, outer: _Stage | None) -> None:
        self.words = words
        self.outer = outer
        self.num_inner = 0
        self.begun_s = self.resumed_s = time.monotonic()
        self.reported_s: float | None = None


_lock = threading.Lock()
_under_way: list[_Stage] = []
# Per thread, and per task of an event loop.
_own: ContextVar[_Stage | None] = ContextVar("stage", default=None)


@contextmanager
def stage(words: str) -> Iterator[Update]:
    """Around work that may take long."""
    own = _Stage(words, _own.get())
    token = _own.set(own)
    with _lock:
        _under_way.append(own)
        if own.outer is not None:
            own.outer.num_inner += 1

    def update(words: str) -> None:
        own.words = words

    try:
        yield update
    finally:
        _own.reset(token)
        with _lock:
            _under_way.remove(own)
            if own.outer is not None:
                own.outer.num_inner -= 1
                own.outer.resumed_s = time.monotonic()


def current_stage() -> str | None:
    """The stage begun last."""
    with _lock:
        return _under_way[-1].words if _under_way else None


class StageReporter:
    """Reports the running stages from its own thread until `stop` or the end of the context.
    `stop` may be called twice."""

    def __init__(
        self, report: Callable[[str], None], *, soon_s: float = SOON_S, again_s: float = AGAIN_S
    ) -> None:
        self._report = report
        self._soon_s = soon_s
        self._again_s = again_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stage reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No report follows."""
        self._over.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> StageReporter:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._over.wait(self._soon_s / 10):
            for words in self._due():
                self._report(words)

    def _due(self) -> list[str]:
        now_s = time.monotonic()
        found = []
        with _lock:
            for each in _under_way:
                if each.num_inner:
                    continue
                if each.reported_s is None:
                    if now_s - each.resumed_s >= self._soon_s:
                        each.reported_s = now_s
                        found.append(each.words)
                elif now_s - each.reported_s >= self._again_s:
                    each.reported_s = now_s
                    found.append(f"{each.words}, {now_s - each.begun_s:.0f} s so far")
        return found
