"""The memory budget for request bodies, from the first byte until the prompt is prepared: one for
all protocols of a process.

No client can hold it for long. Small requests are exempt. While others wait, an owner (a key, or an
address where there are no keys) holds at most half of it; and when it is full, the slowest upload
of the owner who holds the most is closed, once its grace period is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from outrider.errors import CapacityError

MAX_UPLOAD_BYTES = 128 * 2**20  # of bodies; parsed, each takes several times its size
SMALL_BYTES = 64 * 2**10
GRACE_S = 1.0  # before an upload may be closed
WAIT_TIMEOUT_S = 10.0  # of an upload that waits for budget
MAX_WAITING = 4096
_CHECK_S = 0.05  # between checks for uploads to close, while others wait
_FULL = "the server is receiving as many large requests as it can hold; retry later."
_CLOSED = (
    "the server is receiving as many large requests as it can hold, and this one came too slowly; "
    "send it again, faster."
)


class Upload:
    """One request body: its share of the budget, and its progress."""

    def __init__(self, budget: UploadBudget, owner: str) -> None:
        self.owner = owner
        self.num_bytes = 0  # that it holds of the budget
        self._num_received = 0
        self._began_s = budget.clock()
        self._budget = budget
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
        """End `receiving` with an error and release the budget at once."""
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(0.0)
            self._timer = None
        self.release()

    async def reserve(self, num_bytes: int) -> None:
        """Wait for budget for a body of at most this many bytes, before it is read."""
        await self._budget.take(self, num_bytes)

    async def receive(self, num_bytes: int) -> None:
        """Count `num_bytes` more; waits until the budget allows them."""
        self._num_received += num_bytes
        if self._num_received > SMALL_BYTES:
            await self._budget.take(self, self._num_received - self.num_bytes)

    def received(self, num_bytes: int) -> None:
        """The whole body has this many bytes: returns what was reserved beyond them."""
        self._num_received = num_bytes
        self._budget.give_back(self, self.num_bytes - num_bytes * (num_bytes > SMALL_BYTES))

    def release(self) -> None:
        """The body was dropped."""
        self._budget.give_back(self, self.num_bytes)


class UploadBudget:
    """`clock` is that of `time.monotonic`."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._max = self._left = max_bytes
        self._uploads: set[Upload] = set()
        self._held: Counter[str] = Counter()  # bytes, by owner
        self._waiting: dict[str, deque[_Waiter]] = {}  # by owner
        self._num_waiting = 0
        self._next_check: asyncio.Handle | None = None

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
        """Wait for budget; raises `CapacityError` after `WAIT_TIMEOUT_S`."""
        if upload.owner not in self._waiting and self._fits(upload, num_bytes):
            self._give(upload, num_bytes)
            return
        if self._num_waiting >= MAX_WAITING:
            raise CapacityError(_FULL)
        waiter = _Waiter(upload, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(upload.owner, deque()).append(waiter)
        self._num_waiting += 1
        self._check_soon()
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await waiter.given
        except TimeoutError:
            raise CapacityError(_FULL) from None
        finally:
            self._leave(waiter)

    def give_back(self, upload: Upload, num_bytes: int) -> None:
        if num_bytes:
            self._give(upload, -num_bytes)
            if self._waiting:
                self._check_soon()

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

    def _check_soon(self, wait_s: float = 0.0) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        loop = asyncio.get_running_loop()
        self._next_check = (
            loop.call_later(wait_s, self._check) if wait_s else loop.call_soon(self._check)
        )

    def _check(self) -> None:
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
            self._check_soon(_CHECK_S)  # meanwhile grace periods end

    def _fits(self, upload: Upload, num_bytes: int) -> bool:
        if num_bytes > self._left:
            return False
        if all(owner == upload.owner for owner in self._waiting):
            return True
        return self._held[upload.owner] + num_bytes <= self._max // 2

    def _victim(self, upload: Upload) -> Upload | None:
        """The slowest upload past its grace period, of the owner who holds the most."""
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
