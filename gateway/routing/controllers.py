"""The controllers of a remote gateway: resolved by name, dialled until they answer; requests need
none of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from outrider.api_types.errors import UnavailableError
from outrider.errors import OutriderError
from outrider.gateway.frontend import Frontend
from outrider.gateway.gateway import Gateway
from outrider.gateway.routing.controller_link import ControllerLink
from outrider.links.address import TcpAddress, parse
from outrider.links.cluster_view import ClusterView
from outrider.links.frames import LinkError
from outrider.links.speculation import SpeculationChange

logger = logging.getLogger(__name__)

RESOLVE_S = 5.0  # between lookups of the names, and their timeout
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
_NO_CONTROLLER = "no controller is connected; wait for one to start."

Resolve: TypeAlias = Callable[[TcpAddress], Awaitable[set[str]]]
"""All current addresses of a name. Raises `OSError` if it has none."""


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
        """Resolve the name again, for at most `RESOLVE_S`; a slower answer is taken next time."""
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


class _ControllerAddress:
    """An address of a controller, kept while a name resolves to it or its link is up."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.link: ControllerLink | None = None
        self.num_processes = 0
        self.task: asyncio.Task[None] | None = None


class Controllers:
    """The controllers at `places`, as host:port; a name stands for all its addresses. Operators'
    commands go through one of them, since each knows every gateway."""

    def __init__(self, places: Sequence[str], secret: str, resolve: Resolve = resolve_name) -> None:
        self._gateway: Gateway  # from `begin` on
        self._names = [_Name(_parsed(place), resolve) for place in places]
        self._secret = secret
        self._addresses: dict[str, _ControllerAddress] = {}
        self._frontend: Frontend  # likewise
        self._is_stale = asyncio.Event()  # an address failed: its pod may have a new one

    # -- life cycle ---------------------------------------------------------------------------

    def begin(self, frontend: Frontend) -> asyncio.Task[None]:
        """Keep linked to the controllers until the task is cancelled; call it after `start`."""
        self._frontend, self._gateway = frontend, frontend.gateway
        self._gateway.replicas.on_speculation = self._send_speculation
        return asyncio.create_task(self._run(), name="outrider-controllers")

    async def _run(self) -> None:
        try:
            while True:
                self._is_stale.clear()
                await asyncio.gather(*(name.refresh() for name in self._names))
                self._follow(set[str]().union(*(name.addresses for name in self._names)))
                await asyncio.sleep(FIRST_PAUSE_S)  # the minimum between two lookups
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESOLVE_S):
                        await self._is_stale.wait()
        finally:
            for name in self._names:
                name.close()
            tasks = [entry.task for entry in self._addresses.values() if entry.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, addresses: set[str]) -> None:
        for address in addresses - set(self._addresses):
            entry = self._addresses[address] = _ControllerAddress(address)
            entry.task = asyncio.create_task(self._keep(entry), name=f"outrider-{address}")
        for address, entry in list(self._addresses.items()):
            if address not in addresses and entry.link is None and entry.task is not None:
                entry.task.cancel()
                del self._addresses[address]

    async def _keep(self, entry: _ControllerAddress) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                link = await ControllerLink.open(entry.address, self._secret, 0, is_remote=True)
            except (OutriderError, OSError, TimeoutError) as error:
                level = logging.INFO if pause_s == FIRST_PAUSE_S else logging.DEBUG
                logger.log(level, "no controller at %s yet, retrying: %s", entry.address, error)
            else:
                pause_s = FIRST_PAUSE_S
                try:
                    await self._visit(entry, link)
                except Exception:
                    logger.exception("the link to a controller failed; reconnecting")
            self._is_stale.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _visit(self, entry: _ControllerAddress, link: ControllerLink) -> None:
        """Serve the link until the controller is lost."""

        def count(num_processes: int) -> None:
            entry.num_processes = num_processes
            self._gateway.num_processes = max(
                each.num_processes for each in self._addresses.values()
            )

        link.on_num_processes = count
        entry.link = link
        link.send_addresses(self._frontend.http_address, self._frontend.grpc_address)
        reporting = asyncio.create_task(link.send_load(self._gateway))
        logger.info("connected to the controller at %s", entry.address)
        try:
            await link.obey(self._gateway)
        except LinkError as error:
            logger.warning("a controller is lost, its replicas serve on: %s", error)
        finally:
            reporting.cancel()
            link.close()
            entry.link, entry.num_processes = None, 0
        if not any(each.welcome.controller == link.welcome.controller for each in self._links):
            await self._gateway.replicas.forget(link.welcome.controller)

    # -- operators' commands ------------------------------------------------------------------

    @property
    def _links(self) -> list[ControllerLink]:
        """The links that are up, by address."""
        entries = sorted(self._addresses.values(), key=lambda entry: entry.address)
        return [entry.link for entry in entries if entry.link is not None]

    async def drain(self) -> None:
        """Drain every gateway; only this one without a controller."""
        await self._gateway.drain()
        if links := self._links:
            with contextlib.suppress(UnavailableError):
                await links[0].drain()

    async def abort(self, request_id: str) -> int:
        """Abort the request at every gateway; only at this one without a controller."""
        if links := self._links:
            return await links[0].abort(request_id)
        return self._gateway.active_requests.abort(request_id)

    async def scale(self, num_replicas: int) -> None:
        await self._some_link().scale(num_replicas)

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        await self._some_link().roll_out(settings)

    def _some_link(self) -> ControllerLink:
        if not (links := self._links):
            raise UnavailableError(_NO_CONTROLLER)
        return links[0]

    def _send_speculation(self, change: SpeculationChange) -> None:
        for link in self._links:
            link.send_speculation(change)

    # -- status -------------------------------------------------------------------------------

    async def view(self) -> ClusterView | None:
        """The merged view of all controllers."""
        by_controller = {link.welcome.controller: link for link in self._links}
        answers = await asyncio.gather(*(link.view() for link in by_controller.values()))
        views = [view for view in answers if view is not None]
        return united(views) if views else None


def united(views: Sequence[ClusterView]) -> ClusterView:
    """The views merged into one; a process that several report appears once."""
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
