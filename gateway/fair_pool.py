"""A bounded thread pool, fair among keys: prepares requests off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from outrider.api_types.errors import DeadlineError
from outrider.errors import CapacityError

P = ParamSpec("P")
T = TypeVar("T")


class FairThreadPool:
    """A few threads with a bounded queue. Owners (keys, or addresses where there are no keys) are
    served in turn, and a full queue rejects the owner that holds most of it.

    A thread cannot be stopped: a call abandoned at its deadline still runs to its end and counts
    until then, so each call must be bounded in itself.
    """

    def __init__(self, name: str, num_threads: int, max_pending: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"outrider-{name}")
        self._max_pending = max_pending
        self._lock = Lock()
        self._num_idle = num_threads
        self._num_pending = 0  # waiting and running
        self._pending: Counter[str] = Counter()  # the same by owner
        self._waiting: dict[str, deque[_Task]] = {}  # the owner whose turn is next first

    async def run(
        self,
        owner: str,
        deadline_s: float | None,
        function: Callable[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """The function's result, or `DeadlineError` at the deadline, on the clock of
        `time.monotonic`. Cancellation removes a call that is still queued."""
        task = _Task(owner, partial(function, *args, **kwargs))
        self._submit(task)
        result: asyncio.Future[T] = asyncio.wrap_future(task.result)
        result.add_done_callback(_drop_error)
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        try:
            await asyncio.wait((result,), timeout=left_s)
            if result.done():
                return result.result()
        finally:
            self._cancel(task)
        raise DeadlineError(
            "the deadline passed while the request was being prepared; allow it more time or "
            "shorten the prompt."
        )

    def close(self) -> None:
        with self._lock:
            waiting = [task for tasks in self._waiting.values() for task in tasks]
            self._waiting.clear()
        for task in waiting:
            task.result.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, task: _Task) -> None:
        with self._lock:
            self._check_capacity(task.owner)
            self._num_pending += 1
            self._pending[task.owner] += 1
            self._waiting.setdefault(task.owner, deque()).append(task)
            is_idle = self._num_idle > 0
            self._num_idle -= is_idle
        if is_idle:
            self._threads.submit(self._run_tasks)

    def _check_capacity(self, owner: str) -> None:
        """When full, an owner below an equal share is admitted, up to twice the limit in all."""
        num_pending, held = self._num_pending, self._pending.get(owner, 0)
        if num_pending < self._max_pending:
            return
        share = self._max_pending // (len(self._pending) + (held == 0))
        if held >= share or num_pending >= 2 * self._max_pending:
            raise CapacityError(f"{num_pending} requests are being prepared already; retry later.")

    def _run_tasks(self) -> None:
        """Runs in a thread until the queue is empty."""
        while (task := self._next()) is not None:
            if task.result.set_running_or_notify_cancel():
                task.run()
            self._count_out(task)

    def _next(self) -> _Task | None:
        """The next owner's oldest task; its others wait until all other owners had a turn."""
        with self._lock:
            for owner in self._waiting:
                tasks = self._waiting.pop(owner)
                task = tasks.popleft()
                if tasks:
                    self._waiting[owner] = tasks
                return task
            self._num_idle += 1
            return None

    def _cancel(self, task: _Task) -> None:
        """At once: cancelling the loop's future would take effect in its next turn only."""
        if not task.result.cancel():
            return
        with self._lock:
            tasks = self._waiting.get(task.owner, deque())
            if task not in tasks:
                return  # a thread has it and counts it out
            tasks.remove(task)
            if not tasks:
                del self._waiting[task.owner]
        self._count_out(task)

    def _count_out(self, task: _Task) -> None:
        with self._lock:
            self._num_pending -= 1
            self._pending[task.owner] -= 1
            if not self._pending[task.owner]:
                del self._pending[task.owner]


class _Task:
    def __init__(self, owner: str, function: Callable[[], Any]) -> None:
        self.owner = owner
        self.result: Future[Any] = Future()
        self._function: Callable[[], Any] | None = function

    def run(self) -> None:
        function, self._function = self._function, None  # prompts are large
        assert function is not None
        try:
            found = function()
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(found)


def _drop_error(result: asyncio.Future[Any]) -> None:
    """Mark the error of an abandoned task as retrieved, so that asyncio does not log it."""
    if not result.cancelled():
        result.exception()
