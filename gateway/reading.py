"""Room for what clients have sent of their requests, from the first byte until the prompt is
prepared: one budget for all protocols of a process.

No client can fill it for long. Small requests are exempt. While others wait, an owner (a key, or an
address where there are no keys) holds half of it at most; and if there is no room, the slowest
upload of the owner who holds most is closed, once it has had a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from outrider.errors import CapacityError

MAX_READING_BYTES = 128 * 2**20  # of requests, each of which takes several times its size
SMALL_BYTES = 64 * 2**10
GRACE_S = 1.0  # that every upload has
PATIENCE_S = 10.0  # that an upload waits for room
MAX_WAITING = 4096
_LOOK_S = 0.05  # how often there is a look for uploads to close while others wait
_FULL = "the server is reading as many large requests as it can hold; retry later."
_CLOSED = (
    "the server is reading as many large requests as it can hold, and this one came too slowly; "
    "send it again, faster."
)


class Upload:
    """One request: what it holds of the budget, and how it comes in."""

    def __init__(self, reading: Reading, owner: str) -> None:
        self.owner = owner
        self.num_bytes = 0  # that it holds of the budget
        self._num_received = 0
        self._began_s = reading.clock()
        self._reading = reading
        self._timer: asyncio.Timeout | None = None

    @property
    def is_receiving(self) -> bool:
        return self._timer is not None

    def age_s(self, now_s: float) -> float:
        return now_s - self._began_s

    def rate(self, now_s: float) -> float:
        """Bytes a second since its start."""
        return self._num_received / max(self.age_s(now_s), 1e-6)

    @contextlib.asynccontextmanager
    async def receiving(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Within it the upload may be closed, which raises `CapacityError`."""
        try:
            async with asyncio.timeout(timeout_s) as self._timer:
                yield
        except TimeoutError:
            self.release()
            raise CapacityError(_CLOSED) from None
        finally:
            self._timer = None

    def close(self) -> None:
        """What receives it ends in its next turn; what it holds counts no more from now on."""
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(0.0)
            self._timer = None
        self.release()

    async def reserve(self, num_bytes: int) -> None:
        """Wait for room for a request of which no more is known than that it has no more bytes."""
        await self._reading.take(self, num_bytes)

    async def receive(self, num_bytes: int) -> None:
        """`num_bytes` more were received; waits until there is room to go on."""
        self._num_received += num_bytes
        if self._num_received > SMALL_BYTES:
            await self._reading.take(self, self._num_received - self.num_bytes)

    def received(self, num_bytes: int) -> None:
        """It has come as a whole, and has so many bytes: what was reserved beyond is given back."""
        self._num_received = num_bytes
        self._reading.give_back(self, self.num_bytes - num_bytes * (num_bytes > SMALL_BYTES))

    def release(self) -> None:
        """Nothing of it is kept any more."""
        self._reading.give_back(self, self.num_bytes)


class Reading:
    """`clock` is that of `time.monotonic`."""

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._most = self._left = most_bytes
        self._uploads: set[Upload] = set()
        self._held: Counter[str] = Counter()  # bytes, by owner
        self._waiting: dict[str, deque[_Waiter]] = {}  # by owner
        self._num_waiting = 0
        self._next_look: asyncio.Handle | None = None

    @contextlib.contextmanager
    def upload(self, owner: str) -> Iterator[Upload]:
        upload = Upload(self, owner)
        self._uploads.add(upload)
        try:
            yield upload
        finally:
            self._uploads.discard(upload)
            upload.release()

    async def take(self, upload: Upload, num_bytes: int) -> None:
        """Wait for room; raises `CapacityError` if there is none in time."""
        if upload.owner not in self._waiting and self._fits(upload, num_bytes):
            self._give(upload, num_bytes)
            return
        if self._num_waiting >= MAX_WAITING:
            raise CapacityError(_FULL)
        waiter = _Waiter(upload, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(upload.owner, deque()).append(waiter)
        self._num_waiting += 1
        self._look_soon()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await waiter.given
        except TimeoutError:
            raise CapacityError(_FULL) from None
        finally:
            self._leave(waiter)

    def give_back(self, upload: Upload, num_bytes: int) -> None:
        if num_bytes:
            self._give(upload, -num_bytes)
            if self._waiting:
                self._look_soon()

    def _give(self, upload: Upload, num_bytes: int) -> None:
        upload.num_bytes += num_bytes
        self._left -= num_bytes
        self._held[upload.owner] += num_bytes
        if not self._held[upload.owner]:
            del self._held[upload.owner]

    def _leave(self, waiter: _Waiter) -> None:
        waiting = self._waiting.get(waiter.upload.owner, deque())
        with contextlib.suppress(ValueError):
            waiting.remove(waiter)
            self._num_waiting -= 1
        if not waiting:
            self._waiting.pop(waiter.upload.owner, None)

    def _look_soon(self, wait_s: float = 0.0) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        loop = asyncio.get_running_loop()
        self._next_look = (
            loop.call_later(wait_s, self._look) if wait_s else loop.call_soon(self._look)
        )

    def _look(self) -> None:
        """Admit uploads that fit, the first of each owner in turn."""
        is_full = False
        while not is_full:
            num_before = self._num_waiting
            for waiting in list(self._waiting.values()):
                waiter = waiting[0]
                if waiter.num_bytes > self._left and (victim := self._victim(waiter.upload)):
                    victim.close()
                if self._fits(waiter.upload, waiter.num_bytes):
                    self._give(waiter.upload, waiter.num_bytes)
                    if not waiter.given.done():
                        waiter.given.set_result(None)
                    self._leave(waiter)
                elif waiter.num_bytes > self._left:
                    is_full = True
                    break
            if self._num_waiting == num_before:
                break
        if self._waiting:
            self._look_soon(_LOOK_S)  # uploads grow old meanwhile

    def _fits(self, upload: Upload, num_bytes: int) -> bool:
        if num_bytes > self._left:
            return False
        if all(owner == upload.owner for owner in self._waiting):
            return True
        return self._held[upload.owner] + num_bytes <= self._most // 2

    def _victim(self, upload: Upload) -> Upload | None:
        """The slowest of the owner who holds most, if there is one that has had its moment."""
        biggest = max(self._held, key=self._held.__getitem__, default="")
        now_s = self.clock()
        found = [
            each
            for each in self._uploads
            if each.owner == biggest
            and each is not upload
            and each.num_bytes
            and each.is_receiving
            and each.age_s(now_s) >= GRACE_S
        ]
        return min(found, key=lambda each: each.rate(now_s), default=None)


@dataclass(eq=False, slots=True)
class _Waiter:
    upload: Upload
    num_bytes: int
    given: asyncio.Future[None]
