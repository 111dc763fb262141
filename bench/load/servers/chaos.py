"""Doing to an Outrider server what a chaos file says, and seeing it come back.

Only processes of this host that belong to the server under test are ever signalled.
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

from outrider.bench.load.runs import rows_of
from outrider.bench.load.servers.chaos_file import GROUPS, ROLES, SIGNALS, Part, Planned
from outrider.bench.load.servers.processes import listening_pid, parent_of
from outrider.bench.load.servers.server import Server
from outrider.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from outrider.client import AsyncClient
    from outrider.gateway.results import ServerStatus

FIND_S = 60.0  # for what is to be hit to be there
BACK_S = 180.0  # for a killed role to be ready again
_STATUS_S = 5.0
_POLL_S = 0.2
BACK = "back"
_READY = "ready"


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """Something that was done, or a role that is "back"; a line of `chaos.jsonl`.

    An event about several processes has a line for each; `of_s` of one that tells of a return is
    the `at_s` of what it returns from.
    """

    at_s: float
    did: str
    what: str
    pid: int | None = None
    error: str | None = None
    of_s: float | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A process that a server tells of."""

    part: Part
    pid: int
    is_ready: bool


class _AwayError(OutriderError):
    """Not there yet, or again."""


class Chaos:
    """The events of one run against one server."""

    def __init__(
        self,
        planned: Sequence[Planned],
        server: Server,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not server.url.startswith("grpc://"):
            raise ConfigError(
                f"chaos is asked for with server {server.spec.name} at {server.url}; it knows the "
                "processes of Outrider's gRPC servers only."
            )
        self._planned = planned
        self._server = server
        self._path = path
        self._clock = clock
        self.events: list[ChaosEvent] = []

    async def run(self) -> list[ChaosEvent]:
        """Do all of it, from now on; returns when the last role is back or will not come back.

        If it is cancelled, what it has stopped continues.
        """
        from outrider.client import AsyncClient

        start_s = self._clock()
        address = urlsplit(self._server.url).netloc
        client_of = AsyncClient(address, api_key=self._server.spec.api_key)
        async with client_of as client, asyncio.TaskGroup() as group:
            for planned in self._planned:
                group.create_task(self._do(planned, start_s, client))
        return self.events

    async def _do(self, planned: Planned, start_s: float, client: AsyncClient) -> None:
        await asyncio.sleep(max(0.0, start_s + planned.at_s - self._clock()))
        try:
            members = await self._find(planned.what, client)
        except OutriderError as error:
            self._tell(ChaosEvent(self._clock(), planned.do, str(planned.what), None, str(error)))
            return
        at_s = self._signal(planned.do, planned.what, members)
        if planned.for_s is not None:
            try:
                await asyncio.sleep(planned.for_s)
            finally:
                self._signal("continue", planned.what, members)
        is_ending = planned.do in ("kill", "term")
        if is_ending and planned.what.role in ROLES:
            await self._see_it_return(planned.what, {m.pid for m in members}, at_s, client)

    async def _find(self, part: Part, client: AsyncClient) -> list[Member]:
        """Waits for what an earlier event has taken away."""
        from outrider.gateway.errors import DeadlineError, UnavailableError

        deadline_s = time.monotonic() + FIND_S
        while True:
            try:
                return await self._members(part, client)
            except (_AwayError, UnavailableError, DeadlineError):
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _members(self, part: Part, client: AsyncClient) -> list[Member]:
        own = await asyncio.to_thread(self._server.pids)
        if not own:
            raise OutriderError("the server's processes are not on this host")
        if part.role == "server":
            return [Member(part, pid, is_ready=True) for pid in own]
        if part.role == "gateway":
            pid = await asyncio.to_thread(listening_pid, self._server.url)
            found = [Member(part, pid, is_ready=True)] if pid in own and pid is not None else []
        else:
            found = members_of(await client.status(_STATUS_S), part, own)
        if not found:
            raise _AwayError(f"the server has no {part} of its own on this host")
        return found

    def _signal(self, did: str, part: Part, members: Sequence[Member]) -> float:
        """When it was done, to the first of them."""
        first = len(self.events)
        for member in members:
            error = None
            try:
                os.kill(member.pid, SIGNALS[did])
            except OSError as reason:
                error = reason.strerror
            what = str(part if part.role == "server" else member.part)
            self._tell(ChaosEvent(self._clock(), did, what, member.pid, error))
        return self.events[first].at_s

    async def _see_it_return(
        self, part: Part, lost: Collection[int], at_s: float, client: AsyncClient
    ) -> None:
        deadline_s = time.monotonic() + BACK_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OutriderError):  # it may be away itself
                own = await asyncio.to_thread(self._server.pids)
                found = members_of(await client.status(_STATUS_S), part, own)
                fresh = [m for m in found if m.is_ready and m.pid not in lost]
                if len(fresh) >= len(lost):
                    self._tell(ChaosEvent(self._clock(), BACK, str(part), fresh[0].pid, None, at_s))
                    return
            await asyncio.sleep(_POLL_S)
        reason = f"not back within {BACK_S:g} s"
        self._tell(ChaosEvent(self._clock(), BACK, str(part), None, reason, at_s))

    def _tell(self, event: ChaosEvent) -> None:
        self.events.append(event)
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(dataclasses.asdict(event)) + "\n")


def read_events(path: Path) -> list[ChaosEvent]:
    return rows_of(path, ChaosEvent)


def members_of(status: ServerStatus, part: Part, own: Collection[int]) -> list[Member]:
    """The processes of a role, or of one of its ranks, that are among a server's own."""
    found = [
        member
        for member in _all_members(status)
        if member.part.role == part.role
        and part.rank in (None, member.part.rank)
        and member.pid in own
    ]
    return list({member.pid: member for member in found}.values())


def _all_members(status: ServerStatus) -> Iterator[Member]:
    """As whoever starts them tells, else as the engine does, whose own process is that of its
    models or the parent of its ranks."""
    told = () if status.cluster is None else status.cluster.processes
    for process in told:
        rank = process.rank if process.role in GROUPS else None
        yield Member(Part(process.role, rank), process.pid, process.state == _READY)
    if any(process.role in ROLES for process in told) or status.engine is None:
        return  # else it tells of gateways alone
    for rank_state in status.engine.ranks:
        part = Part(rank_state.role, rank_state.rank)
        yield Member(part, rank_state.pid, str(rank_state.state) == _READY)
        yield Member(Part("engine"), parent_of(rank_state.pid), is_ready=True)
    for model in status.engine.models:
        yield Member(Part("engine"), model.pid, is_ready=True)
