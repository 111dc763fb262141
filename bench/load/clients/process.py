"""A client process, started by the conductor and told what to do over a pipe.

It has a process of its own so that neither the dashboard nor the books of the run delay a request.
Messages are pickled, both ends being this program.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from outrider.bench.load.asks import Prompt
from outrider.bench.load.clients.driver import Driver
from outrider.bench.load.clients.shifts import Shift
from outrider.bench.load.records import Outcome, RequestRecord
from outrider.bench.load.targets.base import Target, TargetFault
from outrider.bench.load.targets.registry import make_target
from outrider.errors import OutriderError

FLUSH_S = 0.25
OPEN_TIMEOUT_S = 600.0  # an engine in this process loads its weights in it


@dataclass(frozen=True, slots=True)
class Welcome:
    """First message to a client."""

    pool: Sequence[Prompt]
    client: int


@dataclass(frozen=True, slots=True)
class Order:
    """Take this share of a shift."""

    shift: Shift
    client: int
    clients: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The target answers; the shift begins at the time the conductor sends back."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class Glimpse:
    """One ended request, as the dashboard needs it."""

    end_s: float
    is_ok: bool
    error: str | None
    first_token_s: float | None
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that have ended since the last one, as lines of JSON."""

    lines: list[str]
    glimpses: list[Glimpse]
    sent: int
    under_way: int


@dataclass(frozen=True, slots=True)
class Done:
    """A share is finished: the client's own account."""

    cpu_s: float
    sent: int
    ended: int
    loop_delays_s: list[float]
    worst_loop_delay_s: float
    send_lags_s: list[float]
    memory_mb: float


@dataclass(slots=True)
class _Outbox:
    """Sends from a thread of its own, as a full pipe must not stop the event loop."""

    pipe: Connection
    _waiting: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="outbox").start()

    def put(self, message: object) -> None:
        self._waiting.put(message)

    def _run(self) -> None:
        while True:
            message = self._waiting.get()
            try:
                self.pipe.send(message)
            except OSError:
                return  # the conductor has gone; the main thread hears of it too


class _Inbox:
    """What the conductor says, heard also while a shift runs."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._is_closed = False
        threading.Thread(target=self._run, daemon=True, name="inbox").start()

    async def get(self) -> Any:
        """The next message; None when there is nothing more to do, or nobody to do it for."""
        if self._is_closed and self._heard.empty():
            return None
        return await self._heard.get()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._heard.put_nowait, self._pipe.recv())
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._is_closed = True
        self._heard.put_nowait(None)


class _Client:
    def __init__(self, pipe: Connection, welcome: Welcome) -> None:
        self._inbox = _Inbox(pipe)
        self._outbox = _Outbox(pipe)
        self._pool = welcome.pool
        self._targets: dict[str, Target] = {}

    async def serve(self) -> None:
        """Shift after shift, until told otherwise."""
        while (order := await self._inbox.get()) is not None:
            await self._work(order)
        for target in self._targets.values():
            await target.close()

    async def _work(self, order: Order) -> None:
        try:
            target = self._targets.get(order.shift.arm) or make_target(order.shift.target)
        except OutriderError as error:
            self._outbox.put(Opened(str(error)))
            return
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await target.open()
        except (TargetFault, TimeoutError, OutriderError) as fault:
            self._outbox.put(Opened(str(fault) or "it did not answer in time"))
            await target.close()
            return
        self._outbox.put(Opened())
        start_s = await self._inbox.get()
        if start_s is None:  # another client could not open it, or the run was interrupted
            await target.close()
            return
        shift = order.shift.starting(start_s)
        records = _Books(self._outbox)
        driver = Driver(
            target,
            shift,
            self._pool,
            records.keep,
            client=order.client,
            clients=order.clients,
        )
        cpu_s = time.process_time()
        flushing = asyncio.create_task(records.flush_forever(driver))
        stopping = asyncio.create_task(self._stop_when_told(driver))
        await driver.run()
        stopping.cancel()
        flushing.cancel()
        records.flush(driver)
        if target.outlives_shifts:
            self._targets[shift.arm] = target
        else:
            await target.close()
        self._outbox.put(
            Done(
                cpu_s=time.process_time() - cpu_s,
                sent=driver.progress.sent,
                ended=driver.progress.ended,
                loop_delays_s=driver.loop_delay.seconds.values,
                worst_loop_delay_s=driver.loop_delay.seconds.worst,
                send_lags_s=driver.send_lag.values,
                memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            )
        )

    async def _stop_when_told(self, driver: Driver) -> None:
        await self._inbox.get()
        driver.stop()


class _Books:
    """Ended requests on their way to the conductor."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox
        self._lines: list[str] = []
        self._glimpses: list[Glimpse] = []

    def keep(self, record: RequestRecord) -> None:
        # Written out one by one: all of a quarter second at once would hold up the loop.
        self._lines.append(record.to_json())
        self._glimpses.append(_glimpse(record))

    async def flush_forever(self, driver: Driver) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.flush(driver)

    def flush(self, driver: Driver) -> None:
        lines, self._lines = self._lines, []
        glimpses, self._glimpses = self._glimpses, []
        self._outbox.put(
            Batch(
                lines=lines,
                glimpses=glimpses,
                sent=driver.progress.sent,
                under_way=driver.progress.under_way,
            )
        )


def _glimpse(record: RequestRecord) -> Glimpse:
    first_s = record.first_s
    return Glimpse(
        end_s=record.end_s,
        is_ok=record.outcome is Outcome.OK,
        error=record.error or (None if record.outcome is Outcome.OK else record.outcome.value),
        first_token_s=None if first_s is None else first_s - record.intended_s,
        output_tokens=record.output_tokens,
    )


def run_client(pipe: Connection) -> None:
    """The process's own main."""
    try:
        welcome = pipe.recv()
    except (EOFError, OSError):
        return  # the conductor has gone
    # Prompts of a trace are made when asked for, and the first takes as long as all its texts.
    if len(welcome.pool):
        _ = welcome.pool[0]
    # A full collection would stop the loop for as long as the pool is large.
    gc.freeze()
    _runner()(_serve(pipe, welcome))


async def _serve(pipe: Connection, welcome: Welcome) -> None:
    await _Client(pipe, welcome).serve()


def _runner() -> Callable[[Any], Any]:
    """uvloop where it is installed: it halves what a client adds."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    runner: Callable[[Any], Any] = uvloop.run
    return runner
