"""Where requests are made ready, off the event loop and within limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from outrider.errors import CapacityError
from outrider.gateway.errors import DeadlineError

P = ParamSpec("P")
T = TypeVar("T")


class Preparing:
    """A few threads and a queue before them, both bounded.

    A thread cannot be stopped: what is given up at its deadline still runs to its end and counts
    until then. So what is done here must be bounded in itself.
    """

    def __init__(self, name: str, num_threads: int, max_pending: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"outrider-{name}")
        self._max_pending = max_pending
        self._lock = Lock()
        self._num_pending = 0

    async def run(
        self,
        deadline_s: float | None,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """What the function returns, or an error by the deadline, on the clock of
        `time.monotonic`. Leaving early takes what still waits out of the queue."""
        with self._lock:
            if self._num_pending >= self._max_pending:
                raise CapacityError(
                    f"{self._num_pending} requests are being prepared already; retry later."
                )
            self._num_pending += 1
        work = self._threads.submit(function, *args, **kwargs)
        work.add_done_callback(self._done)
        result = asyncio.wrap_future(work)
        result.add_done_callback(_nobody_asks)
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        try:
            await asyncio.wait((result,), timeout=left_s)
            if result.done():
                return result.result()
        finally:
            work.cancel()  # at once, where cancelling `result` would wait for the loop's next turn
        raise DeadlineError(
            "the deadline passed while the request was being prepared; allow it more time or "
            "shorten the prompt."
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: Future[T]) -> None:
        with self._lock:
            self._num_pending -= 1


def _nobody_asks(result: asyncio.Future[Any]) -> None:
    """An error of work that was given up is nobody's, and no news for the log."""
    if not result.cancelled():
        result.exception()
