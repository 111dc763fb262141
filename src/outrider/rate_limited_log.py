"""Rate-limited log lines for events that clients can trigger at will: a few per minute and kind,
with a count of the suppressed ones, so that no client can fill the log."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable

PERIOD_S = 60.0
MAX_KINDS = 256  # counted separately in a period; all others share one count
_OTHERS = object()


class RateLimitedLog:
    """Writes the first `burst` lines of each kind immediately. Thread-safe."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: int = 1,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._burst = burst
        self._lock = threading.Lock()
        # Start of the kind's period, and lines since then, written or suppressed.
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def info(self, kind: Hashable, message: str, *args: object, **extra: object) -> None:
        """Log a line of that kind; `extra` goes into its record."""
        self._write(logging.INFO, kind, message, *args, extra=extra)

    def warning(self, message: str, *args: object) -> None:
        """Lines with the same `message` are of one kind, regardless of `args`."""
        self._write(logging.WARNING, message, message, *args)

    def exception(self, message: str, error: BaseException) -> None:
        """Log an unexpected error with its traceback. The kind is where it was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        place = (frames[-1].filename, frames[-1].lineno) if frames else None
        self._write(logging.ERROR, (type(error), place), message, error=error)

    def _write(
        self,
        level: int,
        kind: Hashable,
        message: str,
        *args: object,
        error: BaseException | None = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        num_suppressed = self._num_suppressed(kind)
        if num_suppressed is None:
            return
        if num_suppressed:
            message += " (and %d more like it since the last line)"
            args = (*args, num_suppressed)
        self._logger.log(level, message, *args, exc_info=error, extra=extra)

    def _num_suppressed(self, kind: Hashable) -> int | None:
        """Lines of the kind suppressed before this one; None if this one is suppressed too."""
        now_s = self._clock()
        with self._lock:
            kind = self._counted_as(kind, now_s)
            began_s, count = self._kinds.get(kind, (now_s, 0))
            if now_s - began_s < PERIOD_S:
                self._kinds[kind] = (began_s, count + 1)
                return 0 if count < self._burst else None
            del self._kinds[kind]  # re-inserted as the newest
            self._kinds[kind] = (now_s, 1)
            return max(count - self._burst, 0)

    def _counted_as(self, kind: Hashable, now_s: float) -> Hashable:
        """The kind itself, or the shared one while the table is full of kinds of this period."""
        if kind in self._kinds or len(self._kinds) < MAX_KINDS:
            return kind
        oldest = next(iter(self._kinds))
        if now_s - self._kinds[oldest][0] < PERIOD_S:
            return _OTHERS
        del self._kinds[oldest]
        return kind
