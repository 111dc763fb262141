"""The conductor's handle on the client processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from outrider.errors import OutriderError
from outrider.loadtest.clients.driver import STOPPED_DRAIN_S
from outrider.loadtest.clients.process import (
    ClientInit,
    RecordBatch,
    ShiftDone,
    ShiftOrder,
    TargetOpened,
    run_client,
)
from outrider.loadtest.clients.shifts import Shift
from outrider.loadtest.requests import Prompt
from outrider.loadtest.targets.registry import is_inprocess

OPEN_TIMEOUT_S = 630.0
REPORT_GRACE_S = 60.0  # beyond a shift's own limits, for a client to report that it is done
STOP_TIMEOUT_S = 10.0
START_DELAY_S = 0.1  # from the last client's readiness to the first request
# CPU cores in use beyond which a client process is the bottleneck and more of them help. The bound
# is lower for one that is late; below it, other processes hold the cores.
BOUND_CPU, LATE_CPU = 0.9, 0.5
LATE_S = 0.050


class TargetError(OutriderError):
    """A server was unreachable at the start of its shift."""


@dataclass(frozen=True, slots=True)
class ClientAccount:
    """Totals of one shift over all client processes."""

    processes: int
    start_s: float
    cpu_s: float
    sent: int
    loop_delay_p50_ms: float
    loop_delay_p99_ms: float
    loop_delay_max_ms: float
    send_lag_p99_ms: float
    is_bound: bool  # the clients were the bottleneck
    memory_mb: float
    stopped_s: float | None = None  # when the shift was interrupted


class _Process:
    def __init__(self, pool: Sequence[Prompt], number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run_client, args=(theirs,), daemon=True, name=f"client {number}"
        )
        with _ignored_interrupts():
            self.process.start()
        theirs.close()
        self.pipe.send(ClientInit(pool, number))

    async def receive(self, timeout_s: float) -> Any:
        """The next message; raises if the process exits or the timeout passes."""
        try:
            async with asyncio.timeout(timeout_s):
                await _readable(self.pipe)
        except TimeoutError:
            raise OutriderError(
                f"{self.process.name} did not report for {timeout_s:g} s; its requests are not "
                "accounted for, so the run ends."
            ) from None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise OutriderError(
                f"{self.process.name} exited with code {self.process.exitcode}; its requests are "
                "not accounted for, so the run ends."
            ) from None

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.close()
        self.process.join(STOP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class ClientPool:
    """The client processes; `grow` adds more from the next shift on."""

    def __init__(self, pool: Sequence[Prompt], processes: int = 1) -> None:
        self._pool = pool
        self._processes = [_Process(pool, number) for number in range(processes)]

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._processes if each.process.pid is not None]

    def grow(self, processes: int) -> None:
        start = len(self._processes)
        self._processes += [_Process(self._pool, number) for number in range(start, processes)]

    async def run(self, shift: Shift, take: Callable[[int, RecordBatch], None]) -> ClientAccount:
        """Runs one shift on all clients; `take` receives their record batches as they arrive.

        Cancellation ends the shift early. Records so far are still taken, and `stopped_s` of the
        account is when.
        """
        total = len(self._processes)
        for number, each in enumerate(self._processes):
            each.pipe.send(ShiftOrder(shift, number, total))
        opened = await asyncio.gather(*(each.receive(OPEN_TIMEOUT_S) for each in self._processes))
        errors = [message.error for message in opened if isinstance(message, TargetOpened)]
        if any(errors):
            for each, error in zip(self._processes, errors, strict=True):
                if error is None:
                    each.pipe.send(None)
            raise TargetError(
                f"arm {shift.arm!r}: {next(filter(None, errors))} ({shift.target.url})."
            )
        start_s = time.monotonic() + START_DELAY_S
        self._broadcast(start_s)
        limit_s = shift.sending_s + shift.drain_s + shift.timeout_s + REPORT_GRACE_S
        collecting = asyncio.gather(
            *(_collect(each, number, take, limit_s) for number, each in enumerate(self._processes))
        )
        stopped_s: float | None = None
        try:
            done = await asyncio.shield(collecting)
        except asyncio.CancelledError:
            stopped_s = time.monotonic()
            done = await self._stop_clients(collecting)
        account = _account(shift, start_s, done, time.monotonic() - start_s)
        return replace(account, stopped_s=stopped_s)

    async def _stop_clients(self, collecting: asyncio.Future[list[ShiftDone]]) -> list[ShiftDone]:
        self._broadcast(None)
        try:
            async with asyncio.timeout(STOPPED_DRAIN_S + STOP_TIMEOUT_S):
                return await collecting
        except TimeoutError:
            raise OutriderError(
                "the clients did not stop within the timeout; their last requests are not "
                "accounted for."
            ) from None

    def _broadcast(self, message: float | None) -> None:
        for each in self._processes:
            with contextlib.suppress(OSError):  # `receive` reports a process that has exited
                each.pipe.send(message)

    def close(self) -> None:
        self._broadcast(None)
        for each in self._processes:
            each.stop()


async def _readable(pipe: Connection) -> None:
    """Waits for a message or for the other end to close. Unlike a thread, this is cancellable."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    handle = pipe.fileno()
    loop.add_reader(handle, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(handle)


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Processes started here ignore SIGINT: Ctrl-C reaches the whole terminal, but only the
    conductor stops the clients."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _collect(
    process: _Process, number: int, take: Callable[[int, RecordBatch], None], limit_s: float
) -> ShiftDone:
    deadline_s = time.monotonic() + limit_s
    while True:
        message = await process.receive(max(0.0, deadline_s - time.monotonic()))
        if isinstance(message, ShiftDone):
            return message
        take(number, message)


def _account(shift: Shift, start_s: float, done: list[ShiftDone], seconds: float) -> ClientAccount:
    delays = np.concatenate([np.asarray(each.loop_delays_s) for each in done])
    lags = np.concatenate([np.asarray(each.send_lags_s) for each in done])
    loop_delay_p99_s = _percentile(delays, 99)
    send_lag_p99_s = _percentile(lags, 99)
    is_late = max(loop_delay_p99_s, send_lag_p99_s) > LATE_S
    busiest = max(each.cpu_s for each in done) / max(seconds, 1e-9)
    if is_inprocess(shift.target.url):
        busiest = 0.0  # CPU time of the engine, not of the client
    return ClientAccount(
        processes=len(done),
        start_s=start_s,
        cpu_s=sum(each.cpu_s for each in done),
        sent=sum(each.sent for each in done),
        loop_delay_p50_ms=_percentile(delays, 50) * 1e3,
        loop_delay_p99_ms=loop_delay_p99_s * 1e3,
        loop_delay_max_ms=max(each.worst_loop_delay_s for each in done) * 1e3,
        send_lag_p99_ms=send_lag_p99_s * 1e3,
        is_bound=busiest > (LATE_CPU if is_late else BOUND_CPU),
        memory_mb=sum(each.memory_mb for each in done),
    )


def _percentile(values: np.ndarray[Any, Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
