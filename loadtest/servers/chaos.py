"""Injects the faults of a chaos file into an Outrider server and waits for its recovery.

Signals only processes of this host that belong to the server under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from outrider.errors import ConfigError, OutriderError
from outrider.loadtest.runs import rows_of
from outrider.loadtest.servers.chaos_file import GROUPS, ROLES, SIGNALS, ChaosTarget, PlannedEvent
from outrider.loadtest.servers.processes import listening_pid, parent_of
from outrider.loadtest.servers.server import ServerUnderTest

if TYPE_CHECKING:
    from outrider.api_types.results import ServerStatus
    from outrider.client import AsyncClient

FIND_S = 60.0  # for the target process to exist
BACK_S = 180.0  # for a killed role to be ready again
_STATUS_S = 5.0
_POLL_S = 0.2
BACK = "back"
_READY = "ready"


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """An injected fault, or a role that is "back"; a line of `chaos.jsonl`.

    A fault on several processes has a line for each. `of_s` of a "back" event is the `at_s` of
    its fault.
    """

    at_s: float
    did: str
    what: str
    pid: int | None = None
    error: str | None = None
    of_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process in a server's status."""

    target: ChaosTarget
    pid: int
    is_ready: bool


class _NoProcessError(OutriderError):
    """The process does not exist yet, or not any more."""


class Chaos:
    """Runs planned events against one server."""

    def __init__(
        self,
        planned: Sequence[PlannedEvent],
        server: ServerUnderTest,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not server.url.startswith("grpc://"):
            raise ConfigError(
                f"chaos is given with server {server.spec.name} at {server.url}; it supports "
                "Outrider's gRPC servers only."
            )
        self._planned = planned
        self._server = server
        self._path = path
        self._clock = clock
        self.events: list[ChaosEvent] = []

    async def run(self) -> list[ChaosEvent]:
        """Runs all events from now on, until the last role is back or has timed out.

        Cancellation resumes stopped processes.
        """
        from outrider.client import AsyncClient

        start_s = self._clock()
        address = urlsplit(self._server.url).netloc
        client_of = AsyncClient(address, api_key=self._server.spec.api_key)
        async with client_of as client, asyncio.TaskGroup() as group:
            for planned in self._planned:
                group.create_task(self._run_event(planned, start_s, client))
        return self.events

    async def _run_event(self, planned: PlannedEvent, start_s: float, client: AsyncClient) -> None:
        await asyncio.sleep(max(0.0, start_s + planned.at_s - self._clock()))
        try:
            processes = await self._find(planned.what, client)
        except OutriderError as error:
            self._record(ChaosEvent(self._clock(), planned.do, str(planned.what), None, str(error)))
            return
        at_s = self._signal(planned.do, planned.what, processes)
        if planned.for_s is not None:
            try:
                await asyncio.sleep(planned.for_s)
            finally:
                self._signal("continue", planned.what, processes)
        is_ending = planned.do in ("kill", "term")
        if is_ending and planned.what.role in ROLES:
            await self._await_return(planned.what, {m.pid for m in processes}, at_s, client)

    async def _find(self, target: ChaosTarget, client: AsyncClient) -> list[ServerProcess]:
        """Waits for processes that an earlier event ended."""
        from outrider.api_types.errors import DeadlineError, UnavailableError

        deadline_s = time.monotonic() + FIND_S
        while True:
            try:
                return await self._matching_processes(target, client)
            except (_NoProcessError, UnavailableError, DeadlineError):
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _matching_processes(
        self, target: ChaosTarget, client: AsyncClient
    ) -> list[ServerProcess]:
        own = await asyncio.to_thread(self._server.pids)
        if not own:
            raise OutriderError("the server's processes are not on this host")
        if target.role == "server":
            return [ServerProcess(target, pid, is_ready=True) for pid in own]
        if target.role == "gateway":
            pid = await asyncio.to_thread(listening_pid, self._server.url)
            found = (
                [ServerProcess(target, pid, is_ready=True)]
                if pid in own and pid is not None
                else []
            )
        else:
            found = processes_of(await client.status(_STATUS_S), target, own)
        if not found:
            raise _NoProcessError(f"the server has no {target} of its own on this host")
        return found

    def _signal(self, did: str, target: ChaosTarget, processes: Sequence[ServerProcess]) -> float:
        """Signals the processes; returns the time of the first signal."""
        first = len(self.events)
        for process in processes:
            error = None
            try:
                os.kill(process.pid, SIGNALS[did])
            except OSError as reason:
                error = reason.strerror
            what = str(target if target.role == "server" else process.target)
            self._record(ChaosEvent(self._clock(), did, what, process.pid, error))
        return self.events[first].at_s

    async def _await_return(
        self, target: ChaosTarget, lost: Collection[int], at_s: float, client: AsyncClient
    ) -> None:
        deadline_s = time.monotonic() + BACK_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OutriderError):  # the gateway may be unreachable itself
                own = await asyncio.to_thread(self._server.pids)
                found = processes_of(await client.status(_STATUS_S), target, own)
                fresh = [m for m in found if m.is_ready and m.pid not in lost]
                if len(fresh) >= len(lost):
                    self._record(
                        ChaosEvent(self._clock(), BACK, str(target), fresh[0].pid, None, at_s)
                    )
                    return
            await asyncio.sleep(_POLL_S)
        reason = f"not back within {BACK_S:g} s"
        self._record(ChaosEvent(self._clock(), BACK, str(target), None, reason, at_s))

    def _record(self, event: ChaosEvent) -> None:
        self.events.append(event)
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(dataclasses.asdict(event)) + "\n")


def read_events(path: Path) -> list[ChaosEvent]:
    return rows_of(path, ChaosEvent)


def processes_of(
    status: ServerStatus, target: ChaosTarget, own: Collection[int]
) -> list[ServerProcess]:
    """The processes of a role, or of one rank of it, among the server's own pids."""
    found = [
        process
        for process in _reported_processes(status)
        if process.target.role == target.role
        and target.rank in (None, process.target.rank)
        and process.pid in own
    ]
    return list({process.pid: process for process in found}.values())


def _reported_processes(status: ServerStatus) -> Iterator[ServerProcess]:
    """Processes in the cluster status, else in the engine's. The engine's own process is that of
    its models or the parent of its ranks."""
    processes = () if status.cluster is None else status.cluster.processes
    for process in processes:
        rank = process.rank if process.role in GROUPS else None
        yield ServerProcess(ChaosTarget(process.role, rank), process.pid, process.state == _READY)
    if any(process.role in ROLES for process in processes) or status.engine is None:
        return  # a cluster status without roles lists gateways only
    for rank_state in status.engine.ranks:
        target = ChaosTarget(rank_state.role, rank_state.rank)
        yield ServerProcess(target, rank_state.pid, str(rank_state.state) == _READY)
        yield ServerProcess(ChaosTarget("engine"), parent_of(rank_state.pid), is_ready=True)
    for model in status.engine.models:
        yield ServerProcess(ChaosTarget("engine"), model.pid, is_ready=True)
