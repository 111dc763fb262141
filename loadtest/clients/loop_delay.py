"""Event loop lag: the error a client adds to each of its measurements."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from types import TracebackType

PERIOD_S = 0.01
_CAPACITY = 10_000


class Reservoir:
    """Reservoir sampling: a uniform sample of all values in bounded memory."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.worst = 0.0
        self._num_added = 0
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self._num_added += 1
        self.worst = max(self.worst, value)
        if len(self.values) < _CAPACITY:
            self.values.append(value)
        elif (place := self._random.randrange(self._num_added)) < _CAPACITY:
            self.values[place] = value


class LoopDelay:
    """Sleeps periodically and samples by how much each sleep overran."""

    def __init__(self) -> None:
        self.seconds = Reservoir()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopDelay:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            start_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            self.seconds.add(max(0.0, time.monotonic() - start_s - PERIOD_S))
