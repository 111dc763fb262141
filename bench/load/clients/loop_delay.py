"""How late an event loop is: what a client adds to every figure it takes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from types import TracebackType

PERIOD_S = 0.01
_MOST = 10_000


class Reservoir:
    """A bounded sample, drawn evenly from all values: eight hours take no more than a minute."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.worst = 0.0
        self._seen = 0
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self._seen += 1
        self.worst = max(self.worst, value)
        if len(self.values) < _MOST:
            self.values.append(value)
        elif (place := self._random.randrange(self._seen)) < _MOST:
            self.values[place] = value


class LoopDelay:
    """Sleeps for a short while over and over and notes by how much each sleep was too long."""

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
