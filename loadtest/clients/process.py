"""A client process, started by the conductor and controlled over a pipe.

A separate process, so that neither the dashboard nor result files delay a request. Messages are
pickled: both ends are this program.
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

from outrider.errors import OutriderError
from outrider.loadtest.clients.driver import LoadDriver
from outrider.loadtest.clients.shifts import Shift
from outrider.loadtest.records import RequestOutcome, RequestRecord
from outrider.loadtest.requests import Prompt
from outrider.loadtest.targets.base import Target, TargetFault
from outrider.loadtest.targets.registry import make_target

FLUSH_S = 0.25
OPEN_TIMEOUT_S = 600.0  # long enough for an in-process engine to load its weights


@dataclass(frozen=True, slots=True)
class ClientInit:
    """The first message to a client."""

    pool: Sequence[Prompt]
    client: int


@dataclass(frozen=True, slots=True)
class ShiftOrder:
    """Run this client's share of a shift."""

    shift: Shift
    client: int
    clients: int


@dataclass(frozen=True, slots=True)
class TargetOpened:
    """The target is open, or the error; the conductor replies with the start time."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One finished request, for the dashboard."""

    end_s: float
    is_ok: bool
    error: str | None
    first_token_s: float | None
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Requests finished since the last batch, as lines of JSON."""

    lines: list[str]
    summaries: list[RequestSummary]
    sent: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class ShiftDone:
    """The share is finished: totals of this client."""

    cpu_s: float
    sent: int
    ended: int
    loop_delays_s: list[float]
    worst_loop_delay_s: float
    send_lags_s: list[float]
    memory_mb: float


@dataclass(slots=True)
class _MessageSender:
    """Sends from a thread, so that a full pipe does not block the event loop."""

    pipe: Connection
    _queue: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="outbox").start()

    def put(self, message: object) -> None:
        self._queue.put(message)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            try:
                self.pipe.send(message)
            except OSError:
                return  # the conductor is gone; the receiver notices as well


class _MessageReceiver:
    """Receives the conductor's messages in a thread, also while a shift runs."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._is_closed = False
        threading.Thread(target=self._run, daemon=True, name="inbox").start()

    async def get(self) -> Any:
        """The next message; None to stop, or when the conductor is gone."""
        if self._is_closed and self._messages.empty():
            return None
        return await self._messages.get()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._messages.put_nowait, self._pipe.recv())
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._is_closed = True
        self._messages.put_nowait(None)


class _Client:
    def __init__(self, pipe: Connection, welcome: ClientInit) -> None:
        self._inbox = _MessageReceiver(pipe)
        self._outbox = _MessageSender(pipe)
        self._pool = welcome.pool
        self._targets: dict[str, Target] = {}

    async def serve(self) -> None:
        """Runs shifts until the conductor sends None."""
        while (order := await self._inbox.get()) is not None:
            await self._work(order)
        for target in self._targets.values():
            await target.close()

    async def _work(self, order: ShiftOrder) -> None:
        try:
            target = self._targets.get(order.shift.arm) or make_target(order.shift.target)
        except OutriderError as error:
            self._outbox.put(TargetOpened(str(error)))
            return
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await target.open()
        except (TargetFault, TimeoutError, OutriderError) as fault:
            self._outbox.put(TargetOpened(str(fault) or "it did not answer in time"))
            await target.close()
            return
        self._outbox.put(TargetOpened())
        start_s = await self._inbox.get()
        if start_s is None:  # another client failed to open its target, or the run was interrupted
            await target.close()
            return
        shift = order.shift.starting(start_s)
        records = _RecordBuffer(self._outbox)
        driver = LoadDriver(
            target,
            shift,
            self._pool,
            records.keep,
            client=order.client,
            clients=order.clients,
        )
        cpu_s = time.process_time()
        flushing = asyncio.create_task(records.flush_forever(driver))
        stopping = asyncio.create_task(self._stop_on_message(driver))
        await driver.run()
        stopping.cancel()
        flushing.cancel()
        records.flush(driver)
        if target.outlives_shifts:
            self._targets[shift.arm] = target
        else:
            await target.close()
        self._outbox.put(
            ShiftDone(
                cpu_s=time.process_time() - cpu_s,
                sent=driver.progress.sent,
                ended=driver.progress.ended,
                loop_delays_s=driver.loop_delay.seconds.values,
                worst_loop_delay_s=driver.loop_delay.seconds.worst,
                send_lags_s=driver.send_lag.values,
                memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            )
        )

    async def _stop_on_message(self, driver: LoadDriver) -> None:
        await self._inbox.get()
        driver.stop()


class _RecordBuffer:
    """Finished requests not yet sent to the conductor."""

    def __init__(self, outbox: _MessageSender) -> None:
        self._outbox = outbox
        self._lines: list[str] = []
        self._summaries: list[RequestSummary] = []

    def keep(self, record: RequestRecord) -> None:
        # Serialized one by one: a batch at once would block the event loop.
        self._lines.append(record.to_json())
        self._summaries.append(_summary_of(record))

    async def flush_forever(self, driver: LoadDriver) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.flush(driver)

    def flush(self, driver: LoadDriver) -> None:
        lines, self._lines = self._lines, []
        summaries, self._summaries = self._summaries, []
        self._outbox.put(
            RecordBatch(
                lines=lines,
                summaries=summaries,
                sent=driver.progress.sent,
                in_flight=driver.progress.in_flight,
            )
        )


def _summary_of(record: RequestRecord) -> RequestSummary:
    first_s = record.first_s
    return RequestSummary(
        end_s=record.end_s,
        is_ok=record.outcome is RequestOutcome.OK,
        error=record.error
        or (None if record.outcome is RequestOutcome.OK else record.outcome.value),
        first_token_s=None if first_s is None else first_s - record.intended_s,
        output_tokens=record.output_tokens,
    )


def run_client(pipe: Connection) -> None:
    """Main function of the process."""
    try:
        welcome = pipe.recv()
    except (EOFError, OSError):
        return  # the conductor is gone
    # Prompts of a trace are built lazily, and the first one loads all texts.
    if len(welcome.pool):
        _ = welcome.pool[0]
    # Without it a full collection scans the whole prompt pool and stalls the event loop.
    gc.freeze()
    _runner()(_serve(pipe, welcome))


async def _serve(pipe: Connection, welcome: ClientInit) -> None:
    await _Client(pipe, welcome).serve()


def _runner() -> Callable[[Any], Any]:
    """uvloop where installed: it halves the client's overhead."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    runner: Callable[[Any], Any] = uvloop.run
    return runner
