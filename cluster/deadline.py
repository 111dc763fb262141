"""The time a server has to end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from outrider.log_stream import drain_stderr

END_S = 20.0  # for all processes to end, after running requests have had their time

_ABORT_S = 5.0

logger = logging.getLogger(__name__)


def abort_in_time(abort: Callable[[], None]) -> None:
    """Returns even if `abort` hangs, as a call to a Ray that is lost may."""

    def run() -> None:
        with contextlib.suppress(Exception):
            abort()

    thread = threading.Thread(target=run, name="outrider-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)


class Deadline:
    """From the first `begin` on, the time a server has to end; then it is ended, whatever it waits
    for."""

    def __init__(self, limit_s: float = END_S) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def begin(self, abort: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            return

        def end() -> None:
            logger.error("the server has not ended within %g s; it is ended now", self._limit_s)
            abort_in_time(abort)
            drain_stderr()
            os._exit(1)

        self._timer = threading.Timer(self._limit_s, end)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
