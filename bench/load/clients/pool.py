"""The conductor's side of the client processes."""

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

from outrider.bench.load.asks import Prompt
from outrider.bench.load.clients.driver import STOPPED_DRAIN_S
from outrider.bench.load.clients.process import Batch, Done, Opened, Order, Welcome, run_client
from outrider.bench.load.clients.shifts import Shift
from outrider.bench.load.targets.registry import is_inprocess
from outrider.errors import OutriderError

OPEN_TIMEOUT_S = 630.0
SPARE_S = 60.0  # beyond a shift's own limits, for a client to say that it is done
STOP_TIMEOUT_S = 10.0
LEAD_S = 0.1  # from the last client's word to the first request
# Of a core: beyond this a client is the bottleneck, and more of them would help. One that is late
# is so from less on; below that it is late because others have the cores.
BOUND_CPU, LATE_CPU = 0.9, 0.5
LATE_S = 0.050


class TargetError(OutriderError):
    """A server did not answer when its shift was to begin."""


@dataclass(frozen=True, slots=True)
class ClientAccount:
    """All clients' own account of one shift."""

    processes: int
    start_s: float
    cpu_s: float
    sent: int
    loop_delay_p50_ms: float
    loop_delay_p99_ms: float
    loop_delay_max_ms: float
    send_lag_p99_ms: float
    is_bound: bool  # they could not keep up
    memory_mb: float
    stopped_s: float | None = None  # when they were told to end early


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
        self.pipe.send(Welcome(pool, number))

    async def receive(self, timeout_s: float) -> Any:
        """The next message; raises if the process has ended or takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await _readable(self.pipe)
        except TimeoutError:
            raise OutriderError(
                f"{self.process.name} said nothing for {timeout_s:g} s; its requests are not "
                "accounted for, so the run ends."
            ) from None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise OutriderError(
                f"{self.process.name} ended with code {self.process.exitcode}; its requests are "
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
    """One or several client processes; `grow` adds more from the next shift on."""

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

    async def run(self, shift: Shift, take: Callable[[int, Batch], None]) -> ClientAccount:
        """One shift by all clients; `take` is given what they send while it runs.

        Being cancelled while they send ends the shift early: what they have is still taken, and
        the account says when that was.
        """
        total = len(self._processes)
        for number, each in enumerate(self._processes):
            each.pipe.send(Order(shift, number, total))
        opened = await asyncio.gather(*(each.receive(OPEN_TIMEOUT_S) for each in self._processes))
        errors = [message.error for message in opened if isinstance(message, Opened)]
        if any(errors):
            for each, error in zip(self._processes, errors, strict=True):
                if error is None:
                    each.pipe.send(None)
            raise TargetError(
                f"arm {shift.arm!r}: {next(filter(None, errors))} ({shift.target.url})."
            )
        start_s = time.monotonic() + LEAD_S
        self._tell(start_s)
        limit_s = shift.sending_s + shift.drain_s + shift.timeout_s + SPARE_S
        listening = asyncio.gather(
            *(_listen(each, number, take, limit_s) for number, each in enumerate(self._processes))
        )
        stopped_s: float | None = None
        try:
            done = await asyncio.shield(listening)
        except asyncio.CancelledError:
            stopped_s = time.monotonic()
            done = await self._last_words(listening)
        account = _account(shift, start_s, done, time.monotonic() - start_s)
        return replace(account, stopped_s=stopped_s)

    async def _last_words(self, listening: asyncio.Future[list[Done]]) -> list[Done]:
        self._tell(None)
        try:
            async with asyncio.timeout(STOPPED_DRAIN_S + STOP_TIMEOUT_S):
                return await listening
        except TimeoutError:
            raise OutriderError(
                "the clients did not end when they were told to; their last requests are not "
                "accounted for."
            ) from None

    def _tell(self, message: float | None) -> None:
        for each in self._processes:
            with contextlib.suppress(OSError):  # one that has ended is told of by `receive`
                each.pipe.send(message)

    def close(self) -> None:
        self._tell(None)
        for each in self._processes:
            each.stop()


async def _readable(pipe: Connection) -> None:
    """Until there is a message, or the other end has gone; unlike a thread, it can be cancelled."""
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
    """A process started here inherits it: Ctrl-C goes to all of a terminal's processes, and clients
    are to end when the conductor tells them to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _listen(
    process: _Process, number: int, take: Callable[[int, Batch], None], limit_s: float
) -> Done:
    deadline_s = time.monotonic() + limit_s
    while True:
        message = await process.receive(max(0.0, deadline_s - time.monotonic()))
        if isinstance(message, Done):
            return message
        take(number, message)


def _account(shift: Shift, start_s: float, done: list[Done], seconds: float) -> ClientAccount:
    delays = np.concatenate([np.asarray(each.loop_delays_s) for each in done])
    lags = np.concatenate([np.asarray(each.send_lags_s) for each in done])
    loop_delay_p99_s = _percentile(delays, 99)
    send_lag_p99_s = _percentile(lags, 99)
    is_late = max(loop_delay_p99_s, send_lag_p99_s) > LATE_S
    busiest = max(each.cpu_s for each in done) / max(seconds, 1e-9)
    if is_inprocess(shift.target.url):
        busiest = 0.0  # the models' own work
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
