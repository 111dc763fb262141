"""The fleet registry: gateways connect to it for replicas and cluster-wide operations.

Local gateways, children of this process, connect over a Unix socket and receive their settings.
Remote gateways have their own settings and connect over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.compat_fields import without_added_fields
from outrider.errors import OutriderError
from outrider.gateway.gateway import GatewayState
from outrider.links.address import TcpAddress, parse
from outrider.links.aio import AsyncChannel, accept_channel
from outrider.links.cluster_view import ClusterView
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import (
    REVISION,
    Abort,
    AbortAll,
    AbortResult,
    Drain,
    DrainAll,
    GatewayFailed,
    GatewayListening,
    GatewayLoad,
    NodeDrained,
    NodeLeaving,
    NumProcesses,
    OperationResult,
    ReplicaPlace,
    ReplicaTable,
    RollOut,
    ScaleTo,
    SpeculationChanged,
    ViewCluster,
    ViewClusterResult,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.pending_connections import ACCEPT_PAUSE_S, PendingConnections
from outrider.links.rank_messages import Hello, Role
from outrider.links.speculation import SpeculationChange
from outrider.rate_limited_log import RateLimitedLog

GREETING_TIMEOUT_S = 5.0  # of gateways and leaving nodes

ANSWER_S = 2.0
SERVING, DRAINING = GatewayState.SERVING.value, GatewayState.DRAINING.value

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class GatewayMember:
    """A connected gateway."""

    index: int
    pid: int
    host: str
    channel: AsyncChannel
    reached_at: str | None = None  # this host's address that a remote gateway used
    listening: GatewayListening | None = None
    state: str = "starting"
    num_active: int = 0
    is_remote: bool = False
    revision: int = REVISION  # of the messages it knows

    def send(self, message: object) -> None:
        """Ignores a lost link: the member's own task reports it."""
        with contextlib.suppress(LinkError):
            self.channel.send(message)


@dataclass(frozen=True, slots=True)
class FleetHandlers:
    """Handlers for the requests of gateways."""

    view: Callable[[], Awaitable[ClusterView | None]]
    scale: Callable[[int], None]  # raises `OutriderError` to refuse
    roll_out: Callable[[Mapping[str, Any]], None]  # likewise
    # Moves or drains the replicas of a host with these addresses, which ends within the seconds.
    leave: Callable[[Collection[str], float], Awaitable[None]] | None = None


class FleetRegistry:
    """`settings` are sent to local gateways. Calls `on_change` when a member connects, changes or
    leaves, with the link error if there was one."""

    def __init__(self, settings: Mapping[str, Any], secret: str, handlers: FleetHandlers) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.members: dict[int, GatewayMember] = {}  # local gateways, by index
        self.remote_members: set[GatewayMember] = set()
        self.failures: dict[int, str] = {}  # causes of failed starts, by index
        self.on_change: list[Callable[[GatewayMember, LinkError | None], None]] = []
        self.is_draining = False
        self._settings = dict(settings)
        self._secret = secret
        self._limited_log = RateLimitedLog(logger)
        self._handlers = handlers
        self._places: tuple[ReplicaPlace, ...] = ()
        self._speculation = SpeculationChange()
        self._serial = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve gateways until cancelled. May run with several listeners at once.

        With too many unauthenticated connections, the oldest is closed: a gateway authenticates
        within moments, and reconnects otherwise.
        """
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        pending = PendingConnections()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self._limited_log.warning("cannot accept connections: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                pending.add(sock)
                self._spawn(self._serve(sock, pending))
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the members. Has no timeout of its own."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- broadcasts ---------------------------------------------------------------------------

    @property
    def all_members(self) -> list[GatewayMember]:
        return [*self.members.values(), *self.remote_members]

    def broadcast(self, message: object) -> None:
        for member in self.all_members:
            member.send(message)

    def publish(self, places: tuple[ReplicaPlace, ...]) -> None:
        """Send the replicas' addresses to all gateways, including those that connect later."""
        if places != self._places:
            self._places = places
            for member in self.all_members:
                member.send(self._replicas_for(member))

    def _replicas_for(self, member: GatewayMember) -> ReplicaTable:
        if member.reached_at is None:
            return ReplicaTable(self._places)
        return ReplicaTable(tuple(_as_reached_at(each, member.reached_at) for each in self._places))

    def drain(self) -> None:
        """Have local gateways, including later ones, refuse new requests. Remote ones may have
        replicas of other controllers."""
        self.is_draining = True
        for member in self.members.values():
            member.send(Drain())

    async def abort(self, request_id: str) -> int:
        """Abort a request at all gateways; returns how many requests ended."""
        found = await self._query_all(lambda query: Abort(query, request_id))
        return sum(each.num_ended for each in found)

    async def _query_all(self, question: Callable[[int], object]) -> list[Any]:
        queries = [(next(self._serial), member) for member in self.all_members]
        for query, member in queries:
            self._queries[query] = asyncio.get_running_loop().create_future()
            member.send(question(query))
        try:
            futures = [self._queries[query] for query, _ in queries]
            if futures:
                await asyncio.wait(futures, timeout=ANSWER_S)
            return [each.result() for each in futures if each.done()]
        finally:
            for query, _ in queries:
                self._queries.pop(query, None)

    # -- one gateway --------------------------------------------------------------------------

    async def _serve(self, sock: socket.socket, pending: PendingConnections) -> None:
        try:
            sock_name, peer_name = sock.getsockname(), sock.getpeername()
            hello, channel = await accept_channel(
                sock, self._secret, FLEET_CODEC, GREETING_TIMEOUT_S, peer="the gateway"
            )
        except (LinkError, OSError) as error:
            self._limited_log.warning("rejected unauthenticated connection: %s", error)
            return
        finally:
            pending.remove(sock)
        if hello.role is Role.NODE:
            await self._serve_leaving_node(channel, peer_name)
            return
        member = _member_of(hello, channel, sock_name)
        channel.peer = "a remote gateway" if member.is_remote else f"gateway {hello.rank}"
        failure: LinkError | None = None
        try:
            self._join(member)
            while True:
                self._take(member, await channel.receive())
        except LinkError as error:
            failure = error
        finally:
            channel.close()
            self._leave(member, failure)

    async def _serve_leaving_node(self, channel: AsyncChannel, peer_name: Any) -> None:
        """Serve `outrider leave`: a node that is about to end and waits until it has no replica."""
        channel.peer = "a leaving node"
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                message = await channel.receive()
            if not isinstance(message, NodeLeaving):
                raise LinkError(f"{channel.peer} sent a {type(message).__name__} out of turn.")
            hosts = {*message.hosts, *peer_name[:1]} if peer_name else set(message.hosts)
            error = ""
            try:
                if self._handlers.leave is not None:
                    await self._handlers.leave(hosts, message.limit_s)
            except OutriderError as failure:
                error = str(failure)
            channel.send(NodeDrained(error))
        except (LinkError, TimeoutError) as error_:
            logger.warning("a leaving node disconnected early: %s", error_)
        finally:
            channel.close()

    def _join(self, member: GatewayMember) -> None:
        if member.is_remote:
            self.remote_members.add(member)
        else:
            self.failures.pop(member.index, None)
            self.members[member.index] = member
        settings = {} if member.is_remote else self._settings
        is_draining = self.is_draining and not member.is_remote
        count = len(self.all_members)
        member.send(Welcome(self.name, settings, count, is_draining, self._speculation))
        member.send(self._replicas_for(member))
        self.broadcast(NumProcesses(count))
        self._notify_change(member)

    def _leave(self, member: GatewayMember, failure: LinkError | None) -> None:
        self.remote_members.discard(member)
        if self.members.get(member.index) is member:
            del self.members[member.index]
        self.broadcast(NumProcesses(len(self.all_members)))
        self._notify_change(member, failure)

    def _notify_change(self, member: GatewayMember, failure: LinkError | None = None) -> None:
        self._changed.set()
        for callback in self.on_change:
            callback(member, failure)

    def _take(self, member: GatewayMember, message: object) -> None:
        match message:
            case GatewayLoad(state=state, num_active=num_active):
                member.state, member.num_active = state, num_active
                self._notify_change(member)
            case GatewayListening() as listening:
                member.listening = listening
                self._notify_change(member)
            case GatewayFailed(message=sentence):
                self.failures[member.index] = sentence
            case ScaleTo(query=query, num_replicas=num_replicas):
                self._start_operation(member, query, lambda: self._handlers.scale(num_replicas))
            case RollOut(query=query, settings=settings):
                self._start_operation(member, query, lambda: self._handlers.roll_out(settings))
            case ViewCluster(query=query):
                self._spawn(self._view_cluster(member, query))
            case DrainAll():
                self.is_draining = True
                self.broadcast(Drain())
            case AbortAll(query=query, request_id=request_id):
                self._spawn(self._abort_for(member, query, request_id))
            case SpeculationChanged(change=change):
                self._speculation = self._speculation.followed_by(change)
                for other in self.all_members:
                    if other is not member:
                        other.send(message)
            case AbortResult(query=query):
                answer = self._queries.get(query)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                raise LinkError(f"a gateway sent a {type(message).__name__} out of turn.")

    def _start_operation(
        self, member: GatewayMember, query: int, begin: Callable[[], None]
    ) -> None:
        try:
            begin()
        except OutriderError as error:
            member.send(OperationResult(query, str(error)))
        else:
            member.send(OperationResult(query))

    async def _view_cluster(self, member: GatewayMember, query: int) -> None:
        view = None
        with contextlib.suppress(OutriderError):
            view = await self._handlers.view()
        answer = ViewClusterResult(query, view)
        member.send(answer if member.revision >= REVISION else without_added_fields(answer))

    async def _abort_for(self, member: GatewayMember, query: int, request_id: str) -> None:
        member.send(AbortResult(query, await self.abort(request_id)))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _member_of(hello: Hello, channel: AsyncChannel, sock_name: Any) -> GatewayMember:
    """A gateway without an index, or over a network, is remote: API keys stay on this host."""
    member = GatewayMember(hello.rank, hello.pid, hello.host, channel)
    is_remote = isinstance(sock_name, tuple)
    if hello.size == 0 or is_remote:
        member.index, member.is_remote = -1, True
        member.reached_at = sock_name[0] if is_remote else None
        member.revision = hello.rank if hello.size == 0 else 0
    return member


def _as_reached_at(place: ReplicaPlace, host: str) -> ReplicaPlace:
    """The addresses that a process of another host can reach. A wildcard address becomes `host`,
    the address at which the gateway reached this process."""
    addresses = []
    for address in place.addresses:
        parsed = parse(address)
        if isinstance(parsed, TcpAddress):
            is_any = parsed.host in ("0.0.0.0", "::")
            addresses.append(str(TcpAddress(host, parsed.port)) if is_any else address)
    return dataclasses.replace(place, addresses=tuple(addresses))
