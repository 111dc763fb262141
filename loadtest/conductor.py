"""Executes a plan: wakes the server under test, runs the clients, writes the records.

The primitive is `shift`: one arm under one load. A plan is a fixed sequence of shifts; a search
chooses the next one from the last result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BufferedRandom

from outrider.loadtest.clients.pool import ClientAccount, ClientPool
from outrider.loadtest.clients.process import RecordBatch
from outrider.loadtest.clients.shifts import LoadSpec, Shift
from outrider.loadtest.dashboard import View
from outrider.loadtest.plain import without_key
from outrider.loadtest.plan import ArmSpec, RunPlan
from outrider.loadtest.records import ShiftPhase
from outrider.loadtest.runs import RunFolder, ServerSample, ShiftRecord, append
from outrider.loadtest.servers.processes import use_of_tree
from outrider.loadtest.servers.server import ServerUnderTest
from outrider.loadtest.servers.watch import ServerWatch, sample_of_processes

MAX_CLIENT_PROCESSES = 8
SAMPLE_S = 1.0
CLIENTS = "clients"  # server name of the client processes' own samples


@dataclass(frozen=True, slots=True)
class _CpuClock:
    """CPU seconds used so far, by server; None where unknown."""

    by_server: dict[str, float | None]

    @classmethod
    def read(cls, servers: dict[str, ServerUnderTest]) -> _CpuClock:
        return cls({name: _cpu_s(server) for name, server in servers.items()})

    def since(self, earlier: _CpuClock, name: str) -> float | None:
        now, before = self.by_server[name], earlier.by_server[name]
        return None if now is None or before is None else max(0.0, now - before)


class Conductor:
    """Use as `async with conductor.open()`: leaving it ends every process it started."""

    def __init__(self, plan: RunPlan, run: RunFolder, view: View) -> None:
        self.plan = plan
        self.origin_s = time.monotonic()
        self._run = run
        self._view = view
        self._servers = {spec.name: ServerUnderTest(spec, run.folder) for spec in plan.servers}
        self._watches = {
            name: ServerWatch(server, self.now_s) for name, server in self._servers.items()
        }
        self._clients = ClientPool(plan.pool, plan.client_processes or 1)
        self._arm: ArmSpec | None = None  # being measured
        self.remarks: list[str] = []  # deviations from the plan
        run.folder.mkdir(parents=True, exist_ok=True)
        self._lines: BufferedRandom = run.requests_path.open("w+b")
        for path in (run.shifts_path, run.samples_path, run.chaos_path):
            path.unlink(missing_ok=True)

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.origin_s

    def server_of(self, arm: ArmSpec) -> ServerUnderTest:
        return self._servers[arm.server.name]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Conductor]:
        """Starts every server; with several, each rests until its turn."""
        watching: asyncio.Task[None] | None = None
        try:
            for server in self._servers.values():
                if server.command is not None:
                    self._view.say(f"starting {server.spec.name}: {without_key(server.command)}")
                else:
                    self._view.say(f"connecting to {server.spec.name} at {server.url}")
                await server.start()
                if len(self._servers) > 1:
                    await server.rest()
            watching = asyncio.create_task(self._watch())
            yield self
        finally:
            if watching is not None:
                watching.cancel()
            await asyncio.to_thread(self._clients.close)
            for watch in self._watches.values():
                await watch.close()
            await asyncio.gather(*(server.stop() for server in self._servers.values()))
            self._lines.close()

    async def run_plan(self) -> None:
        for block, load, arm in self.plan.order():
            await self.shift(arm, load, block)

    async def shift(self, arm: ArmSpec, load: LoadSpec, block: int) -> ShiftRecord:
        """Runs one shift; repeats it with more client processes if the clients were too slow.

        Cancellation keeps what was measured so far, as a shorter shift.
        """
        while True:
            begin = self._lines.tell()
            record, account = await self._attempt(arm, load, block)
            num_processes = min(2 * len(self._clients), MAX_CLIENT_PROCESSES, os.cpu_count() or 1)
            may_grow = self.plan.client_processes is None and num_processes > len(self._clients)
            is_cut = account.stopped_s is not None
            if is_cut:
                record.is_discarded = record.seconds <= 0
            else:
                record.is_discarded = account.is_bound and may_grow
            append(self._run.shifts_path, record)
            self._view.shift_ends(record)
            if is_cut:
                raise asyncio.CancelledError
            if not record.is_discarded:
                return record
            self._discard(begin)
            self._view.say(f"the client was the bottleneck: using {num_processes} processes now")
            self._clients.grow(num_processes)

    async def _attempt(
        self, arm: ArmSpec, load: LoadSpec, block: int
    ) -> tuple[ShiftRecord, ClientAccount]:
        server = await self._wake(arm)
        shift = self.plan.shift(arm, load, block, server.url, self.origin_s)
        self._view.shift_begins(arm, load, block)
        before = _CpuClock.read(self._servers)
        account = await self._clients.run(shift, self._take)
        end_s = self.now_s()
        after = _CpuClock.read(self._servers)
        others = [name for name in self._servers if name != arm.server.name]
        record = _shift_record(shift, account, end_s - (account.start_s - self.origin_s))
        record.server_cpu_s = after.since(before, arm.server.name)
        used = [after.since(before, name) for name in others]
        record.idle_arms_cpu_s = sum(seconds or 0.0 for seconds in used) if others else None
        return record, account

    async def _wake(self, arm: ArmSpec) -> ServerUnderTest:
        """Wakes the arm's server and rests all others."""
        for name, server in self._servers.items():
            if name != arm.server.name and not server.is_resting:
                await server.rest()
        server = self._servers[arm.server.name]
        if server.spec.command is not None and not (server.is_resting or server.is_running):
            self._remark(f"Server {arm.server.name} exited unexpectedly and was restarted.")
        await server.wake()
        self._arm = arm
        return server

    def _remark(self, text: str) -> None:
        self.remarks.append(text)
        self._view.say(text)

    def _take(self, client: int, batch: RecordBatch) -> None:
        self._lines.write("".join(line + "\n" for line in batch.lines).encode())
        self._lines.flush()
        self._view.ended(client, batch)

    def _discard(self, begin: int) -> None:
        """Marks the requests of the last attempt as discarded; they stay in the file."""
        self._lines.seek(begin)
        lines = self._lines.read()
        self._lines.seek(begin)
        self._lines.truncate()
        for phase in (ShiftPhase.WARM_UP, ShiftPhase.MEASURED, ShiftPhase.COOL_DOWN):
            lines = lines.replace(
                f'"phase":"{phase}"'.encode(), f'"phase":"{ShiftPhase.DISCARDED}"'.encode()
            )
        self._lines.write(lines)

    async def _watch(self) -> None:
        """Samples resource usage of servers and clients once a second; skips resting servers."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            for name, server in self._servers.items():
                if server.is_resting:
                    continue
                arm = self._arm.name if self._arm and self._arm.server.name == name else None
                self._note(await self._watches[name].sample(arm))
            self._note(sample_of_processes(CLIENTS, self._clients.pids, self.now_s()))

    def _note(self, sample: ServerSample) -> None:
        with contextlib.suppress(OSError):  # writing the requests reports a full disk
            append(self._run.samples_path, sample)


def _shift_record(shift: Shift, account: ClientAccount, seconds: float) -> ShiftRecord:
    start_s = account.start_s - shift.origin_s
    measured_from_s = start_s + shift.warm_up_s
    measured_to_s = measured_from_s + shift.measured_s
    if shift.max_requests is not None:
        measured_to_s = start_s + seconds  # until the last one finished
    if account.stopped_s is not None:
        measured_to_s = min(measured_to_s, account.stopped_s - shift.origin_s)
    return ShiftRecord(
        arm=shift.arm,
        cell=shift.load.name,
        block=shift.block,
        start_s=start_s,
        measured_from_s=measured_from_s,
        measured_to_s=measured_to_s,
        end_s=start_s + seconds,
        client_processes=account.processes,
        client_cpu_s=account.cpu_s,
        loop_delay_p50_ms=account.loop_delay_p50_ms,
        loop_delay_p99_ms=account.loop_delay_p99_ms,
        loop_delay_max_ms=account.loop_delay_max_ms,
        send_lag_p99_ms=account.send_lag_p99_ms,
        is_client_bound=account.is_bound,
    )


def _cpu_s(server: ServerUnderTest) -> float | None:
    root = server.root_pid
    use = use_of_tree(root) if root is not None else None
    return None if use is None else use.cpu_s
