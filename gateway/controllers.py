"""The controllers of a gateway that has settings of its own: found by name, dialled until they
answer, and none of them needed for what is under way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from outrider.errors import OutriderError
from outrider.gateway.errors import UnavailableError
from outrider.gateway.front import Front
from outrider.gateway.gateway import Gateway
from outrider.gateway.keeper_link import KeeperLink
from outrider.links.address import TcpAddress, parse
from outrider.links.cluster_view import ClusterView
from outrider.links.frames import LinkError
from outrider.links.speculation import SpeculationChange

logger = logging.getLogger(__name__)

RESOLVE_S = 5.0  # between lookups of the names, and the longest wait for their answers
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
_NOBODY = "no controller is connected; wait for one to start."

Resolve: TypeAlias = Callable[[TcpAddress], Awaitable[set[str]]]
"""All addresses that a name has now. Raises `OSError` if it has none."""


async def resolve_name(place: TcpAddress) -> set[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    return {str(TcpAddress(str(name[0]), place.port)) for *_, name in infos}


class _Name:
    """A configured name and the addresses it had when it was last resolved.

    A name that fails keeps its last addresses: a headless Service has no records while its pod is
    replaced, and a controller may still answer at the address it had.
    """

    def __init__(self, place: TcpAddress, resolve: Resolve) -> None:
        self.addresses: set[str] = set()
        self._place = place
        self._resolve = resolve
        self._lookup: asyncio.Task[set[str]] | None = None  # at most one, however long it takes
        self._is_failing = False

    async def refresh(self) -> None:
        """Look it up anew, for at most `RESOLVE_S`; a slower answer is taken next time."""
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._resolve(self._place))
        done, _ = await asyncio.wait({self._lookup}, timeout=RESOLVE_S)
        if not done:
            self._note_failure("no answer from the resolver")
            return
        lookup, self._lookup = self._lookup, None
        try:
            found = lookup.result()
        except (OSError, UnicodeError) as error:
            self._note_failure(str(error))
            return
        if found:
            self.addresses, self._is_failing = found, False
        else:
            self._note_failure("it has no address")

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()

    def _note_failure(self, reason: str) -> None:
        level = logging.DEBUG if self._is_failing else logging.WARNING
        kept = f"; keeping {', '.join(sorted(self.addresses))}" if self.addresses else ""
        logger.log(level, "the name %s cannot be resolved: %s%s", self._place.host, reason, kept)
        self._is_failing = True


class _Line:
    """To one address of a controller, for as long as a name has it or somebody is there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.link: KeeperLink | None = None
        self.num_processes = 0
        self.task: asyncio.Task[None] | None = None


class Controllers:
    """Those at `places`, as host:port; a name stands for all its addresses. What an operator wants
    of all goes through one of them, since each knows every gateway."""

    def __init__(self, places: Sequence[str], secret: str, resolve: Resolve = resolve_name) -> None:
        self._gateway: Gateway  # from `begin` on
        self._names = [_Name(_parsed(place), resolve) for place in places]
        self._secret = secret
        self._lines: dict[str, _Line] = {}
        self._front: Front  # likewise
        self._is_stale = asyncio.Event()  # an address failed: its pod may have another by now

    # -- life ---------------------------------------------------------------------------------

    def begin(self, front: Front) -> asyncio.Task[None]:
        """Keep in touch, for a gateway that has started, until the task is cancelled."""
        self._front, self._gateway = front, front.gateway
        self._gateway.replicas.on_speculation = self._tell_speculation
        return asyncio.create_task(self._run(), name="outrider-controllers")

    async def _run(self) -> None:
        try:
            while True:
                self._is_stale.clear()
                await asyncio.gather(*(name.refresh() for name in self._names))
                self._follow(set[str]().union(*(name.addresses for name in self._names)))
                await asyncio.sleep(FIRST_PAUSE_S)  # the least between two lookups
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESOLVE_S):
                        await self._is_stale.wait()
        finally:
            for name in self._names:
                name.close()
            tasks = [line.task for line in self._lines.values() if line.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, addresses: set[str]) -> None:
        for address in addresses - set(self._lines):
            line = self._lines[address] = _Line(address)
            line.task = asyncio.create_task(self._keep(line), name=f"outrider-{address}")
        for address, line in list(self._lines.items()):
            if address not in addresses and line.link is None and line.task is not None:
                line.task.cancel()
                del self._lines[address]

    async def _keep(self, line: _Line) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                link = await KeeperLink.open(line.address, self._secret, 0, is_guest=True)
            except (OutriderError, OSError, TimeoutError) as error:
                level = logging.INFO if pause_s == FIRST_PAUSE_S else logging.DEBUG
                logger.log(level, "no controller at %s yet, trying on: %s", line.address, error)
            else:
                pause_s = FIRST_PAUSE_S
                try:
                    await self._visit(line, link)
                except Exception:
                    logger.exception("the link to a controller failed; connecting anew")
            self._is_stale.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _visit(self, line: _Line, link: KeeperLink) -> None:
        """As long as the controller is there."""

        def count(num_processes: int) -> None:
            line.num_processes = num_processes
            self._gateway.num_processes = max(each.num_processes for each in self._lines.values())

        link.on_num_processes = count
        line.link = link
        link.tell_listening(self._front.http_address, self._front.grpc_address)
        telling = asyncio.create_task(link.tell_load(self._gateway))
        logger.info("connected to the controller at %s", line.address)
        try:
            await link.obey(self._gateway)
        except LinkError as error:
            logger.warning("a controller is lost, its replicas serve on: %s", error)
        finally:
            telling.cancel()
            link.close()
            line.link, line.num_processes = None, 0
        if not any(each.welcome.controller == link.welcome.controller for each in self._links):
            await self._gateway.replicas.forget(link.welcome.controller)

    # -- what operators want ------------------------------------------------------------------

    @property
    def _links(self) -> list[KeeperLink]:
        """One to each address where a controller is, by address."""
        lines = sorted(self._lines.values(), key=lambda line: line.address)
        return [line.link for line in lines if line.link is not None]

    async def drain(self) -> None:
        """Every gateway; only this one while there is no controller."""
        await self._gateway.drain()
        if links := self._links:
            with contextlib.suppress(UnavailableError):
                await links[0].drain()

    async def abort(self, request_id: str) -> int:
        """Wherever the request is; here while there is no controller."""
        if links := self._links:
            return await links[0].abort(request_id)
        return self._gateway.in_hand.abort(request_id)

    async def scale(self, num_replicas: int) -> None:
        await self._some_link().scale(num_replicas)

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        await self._some_link().roll_out(settings)

    def _some_link(self) -> KeeperLink:
        if not (links := self._links):
            raise UnavailableError(_NOBODY)
        return links[0]

    def _tell_speculation(self, change: SpeculationChange) -> None:
        for link in self._links:
            link.tell_speculation(change)

    # -- how they fare ------------------------------------------------------------------------

    async def view(self) -> ClusterView | None:
        """What all of them know, as one."""
        by_controller = {link.welcome.controller: link for link in self._links}
        answers = await asyncio.gather(*(link.view() for link in by_controller.values()))
        views = [view for view in answers if view is not None]
        return united(views) if views else None


def united(views: Sequence[ClusterView]) -> ClusterView:
    """As if one controller had told it all; what several tell of a process is told once."""
    if len(views) == 1:
        return views[0]
    states = [view.state for view in views]
    processes = {
        (each.role, each.rank, each.pid, each.node): each
        for view in views
        for each in view.processes
    }
    numbers = [view.num_configured for view in views if view.num_configured is not None]
    return dataclasses.replace(
        views[0],
        num_configured=sum(numbers) if len(numbers) == len(views) else None,
        controller=", ".join(view.controller for view in views),
        state=states[0] if len(set(states)) == 1 else ", ".join(states),
        restarts=sum(view.restarts for view in views),
        draft_restarts=sum(view.draft_restarts for view in views),
        processes=tuple(processes.values()),
        replicas=tuple(each for view in views for each in view.replicas),
    )


def _parsed(place: str) -> TcpAddress:
    found = parse(place if place.startswith("tcp:") else f"tcp:{place}")
    assert isinstance(found, TcpAddress)
    return found
