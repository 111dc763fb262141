"""The time a server has to end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from outrider.log_stream import drain_stderr

END_S = 20.0  # for all processes to end, after running requests have had their time

logger = logging.getLogger(__name__)


class Deadline:
    """From `begin` on, the time a server has to end; then it is ended, whatever it waits for."""

    def __init__(self, limit_s: float = END_S) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def begin(self, abort: Callable[[], None]) -> None:
        def end() -> None:
            logger.error("the server has not ended within %g s; it is ended now", self._limit_s)
            with contextlib.suppress(Exception):
                abort()
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
