"""The shutdown timeout of a server."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from outrider.log_stream import drain_stderr

END_S = 20.0  # for all processes to end, after requests have drained

_ABORT_S = 5.0

logger = logging.getLogger(__name__)


def abort_with_timeout(abort: Callable[[], None]) -> None:
    """Run `abort` with a timeout: a call to a lost Ray may hang."""

    def run() -> None:
        with contextlib.suppress(Exception):
            abort()

    thread = threading.Thread(target=run, name="outrider-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)


class Deadline:
    """The shutdown timeout, started by the first `begin`; on expiry the process exits."""

    def __init__(self, limit_s: float = END_S) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def begin(self, abort: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            return

        def end() -> None:
            logger.error("the server did not end within %g s and is killed", self._limit_s)
            abort_with_timeout(abort)
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
