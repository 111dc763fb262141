"""Where gateways dial in: what they are told and ask, and what one of them has all of them do.

Those this process keeps dial in over a Unix socket and are told their settings; guests have their
own, and come from anywhere.
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

from outrider.added_fields import without_added
from outrider.errors import OutriderError
from outrider.gateway.gateway import State
from outrider.links.address import TcpAddress, parse
from outrider.links.aio import AsyncChannel, accept_channel
from outrider.links.cluster_view import ClusterView
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import (
    REVISION,
    Abort,
    AbortAll,
    Aborted,
    CannotServe,
    ClusterViewed,
    Drain,
    DrainAll,
    Leaving,
    Left,
    Listening,
    Load,
    NumProcesses,
    Ordered,
    ReplicaPlace,
    Replicas,
    RollOut,
    ScaleTo,
    Speculating,
    ViewCluster,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello, Role
from outrider.links.speculation import SpeculationChange
from outrider.quiet_log import QuietLog

GREETING_S = 5.0
MOST_STRANGERS = 64  # who have dialled in and not proved themselves yet
ACCEPT_PAUSE_S = 0.1  # after a failure, most likely for want of descriptors
ANSWER_S = 2.0
SERVING, DRAINING = State.SERVING.value, State.DRAINING.value

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """A gateway that has dialled in."""

    index: int
    pid: int
    host: str
    channel: AsyncChannel
    reached_at: str | None = None  # the host's address at which a guest has reached it
    listening: Listening | None = None
    state: str = "starting"
    num_active: int = 0
    is_guest: bool = False
    revision: int = REVISION  # of the messages it knows

    def tell(self, message: object) -> None:
        """Whoever is gone need not know; its own task tells of it."""
        with contextlib.suppress(LinkError):
            self.channel.send(message)


@dataclass(frozen=True, slots=True)
class Answers:
    """Who knows what gateways ask."""

    view: Callable[[], Awaitable[ClusterView | None]]
    scale: Callable[[int], None]  # raises `OutriderError` if that is refused
    roll_out: Callable[[Mapping[str, Any]], None]  # likewise
    # Have no replica on a host that is known by these addresses and ends in so many seconds.
    leave: Callable[[Collection[str], float], Awaitable[None]] | None = None


class Desk:
    """`settings` are what the gateways kept here are told of the configuration. Those in
    `on_change` hear of a member that has come, changed or gone, with what ended its link."""

    def __init__(self, settings: Mapping[str, Any], secret: str, answers: Answers) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.members: dict[int, Member] = {}  # those kept here, by index
        self.guests: set[Member] = set()
        self.failures: dict[int, str] = {}  # last words, by index
        self.on_change: list[Callable[[Member, LinkError | None], None]] = []
        self.is_draining = False
        self._settings = dict(settings)
        self._secret = secret
        self._quiet_log = QuietLog(logger)
        self._answers = answers
        self._places: tuple[ReplicaPlace, ...] = ()
        self._speculation = SpeculationChange()
        self._serial = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Take gateways until cancelled. May run with several listeners at once.

        When there are too many strangers, the oldest is turned away: a gateway needs a moment
        only, and dials again if that was too long.
        """
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        strangers: dict[socket.socket, None] = {}  # the oldest first
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self._quiet_log.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if len(strangers) >= MOST_STRANGERS:
                    _hang_up(next(iter(strangers)), strangers)
                strangers[sock] = None
                self._spawn(self._serve(sock, strangers))
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """About the members; whoever calls minds the time."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- to all -------------------------------------------------------------------------------

    @property
    def everybody(self) -> list[Member]:
        return [*self.members.values(), *self.guests]

    def tell_all(self, message: object) -> None:
        for member in self.everybody:
            member.tell(message)

    def publish(self, places: tuple[ReplicaPlace, ...]) -> None:
        """Where the replicas are from now on, for gateways to come as well."""
        if places != self._places:
            self._places = places
            for member in self.everybody:
                member.tell(self._replicas_for(member))

    def _replicas_for(self, member: Member) -> Replicas:
        if member.reached_at is None:
            return Replicas(self._places)
        return Replicas(tuple(_from_afar(each, member.reached_at) for each in self._places))

    def drain(self) -> None:
        """New requests are refused from now on by the gateways kept here, also by those to come.
        Guests may have replicas elsewhere."""
        self.is_draining = True
        for member in self.members.values():
            member.tell(Drain())

    async def abort(self, request_id: str) -> int:
        """End a request wherever it is; how many answered that they had it."""
        found = await self._ask_all(lambda query: Abort(query, request_id))
        return sum(each.num_ended for each in found)

    async def _ask_all(self, question: Callable[[int], object]) -> list[Any]:
        asked = [(next(self._serial), member) for member in self.everybody]
        for query, member in asked:
            self._queries[query] = asyncio.get_running_loop().create_future()
            member.tell(question(query))
        try:
            waited = [self._queries[query] for query, _ in asked]
            if waited:
                await asyncio.wait(waited, timeout=ANSWER_S)
            return [each.result() for each in waited if each.done()]
        finally:
            for query, _ in asked:
                self._queries.pop(query, None)

    # -- one gateway --------------------------------------------------------------------------

    async def _serve(self, sock: socket.socket, strangers: dict[socket.socket, None]) -> None:
        try:
            sock_name, peer_name = sock.getsockname(), sock.getpeername()
            hello, channel = await accept_channel(
                sock, self._secret, FLEET_CODEC, GREETING_S, peer="the gateway"
            )
        except (LinkError, OSError) as error:
            self._quiet_log.warning("a connection was refused: %s", error)
            return
        finally:
            strangers.pop(sock, None)
        if hello.role is Role.NODE:
            await self._see_off(channel, peer_name)
            return
        member = _member(hello, channel, sock_name)
        channel.peer = "a guest" if member.is_guest else f"gateway {hello.rank}"
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

    async def _see_off(self, channel: AsyncChannel, peer_name: Any) -> None:
        """A host that is about to end; it waits for the answer, or for the end of this process."""
        channel.peer = "a node that ends"
        try:
            async with asyncio.timeout(GREETING_S):
                message = await channel.receive()
            if not isinstance(message, Leaving):
                raise LinkError(f"{channel.peer} sent a {type(message).__name__} out of turn.")
            hosts = {*message.hosts, *peer_name[:1]} if peer_name else set(message.hosts)
            error = ""
            try:
                if self._answers.leave is not None:
                    await self._answers.leave(hosts, message.limit_s)
            except OutriderError as failure:
                error = str(failure)
            channel.send(Left(error))
        except (LinkError, TimeoutError) as error_:
            logger.warning("a node that ends was not seen off: %s", error_)
        finally:
            channel.close()

    def _join(self, member: Member) -> None:
        if member.is_guest:
            self.guests.add(member)
        else:
            self.failures.pop(member.index, None)
            self.members[member.index] = member
        settings = {} if member.is_guest else self._settings
        is_draining = self.is_draining and not member.is_guest
        count = len(self.everybody)
        member.tell(Welcome(self.name, settings, count, is_draining, self._speculation))
        member.tell(self._replicas_for(member))
        self.tell_all(NumProcesses(count))
        self._tell_change(member)

    def _leave(self, member: Member, failure: LinkError | None) -> None:
        self.guests.discard(member)
        if self.members.get(member.index) is member:
            del self.members[member.index]
        self.tell_all(NumProcesses(len(self.everybody)))
        self._tell_change(member, failure)

    def _tell_change(self, member: Member, failure: LinkError | None = None) -> None:
        self._changed.set()
        for hear in self.on_change:
            hear(member, failure)

    def _take(self, member: Member, message: object) -> None:
        match message:
            case Load(state=state, num_active=num_active):
                member.state, member.num_active = state, num_active
                self._tell_change(member)
            case Listening() as listening:
                member.listening = listening
                self._tell_change(member)
            case CannotServe(message=sentence):
                self.failures[member.index] = sentence
            case ScaleTo(query=query, num_replicas=num_replicas):
                self._order(member, query, lambda: self._answers.scale(num_replicas))
            case RollOut(query=query, settings=settings):
                self._order(member, query, lambda: self._answers.roll_out(settings))
            case ViewCluster(query=query):
                self._spawn(self._view_cluster(member, query))
            case DrainAll():
                self.is_draining = True
                self.tell_all(Drain())
            case AbortAll(query=query, request_id=request_id):
                self._spawn(self._abort_for(member, query, request_id))
            case Speculating(change=change):
                self._speculation = self._speculation.followed_by(change)
                for other in self.everybody:
                    if other is not member:
                        other.tell(message)
            case Aborted(query=query):
                answer = self._queries.get(query)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                raise LinkError(f"a gateway sent a {type(message).__name__} out of turn.")

    def _order(self, member: Member, query: int, begin: Callable[[], None]) -> None:
        try:
            begin()
        except OutriderError as error:
            member.tell(Ordered(query, str(error)))
        else:
            member.tell(Ordered(query))

    async def _view_cluster(self, member: Member, query: int) -> None:
        view = None
        with contextlib.suppress(OutriderError):
            view = await self._answers.view()
        answer = ClusterViewed(query, view)
        member.tell(answer if member.revision >= REVISION else without_added(answer))

    async def _abort_for(self, member: Member, query: int, request_id: str) -> None:
        member.tell(Aborted(query, await self.abort(request_id)))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _member(hello: Hello, channel: AsyncChannel, sock_name: Any) -> Member:
    """Whoever gives no number of its own is a guest, and whoever comes over a network: keys of
    clients are told on this host only."""
    member = Member(hello.rank, hello.pid, hello.host, channel)
    is_remote = isinstance(sock_name, tuple)
    if hello.size == 0 or is_remote:
        member.index, member.is_guest = -1, True
        member.reached_at = sock_name[0] if is_remote else None
        member.revision = hello.rank if hello.size == 0 else 0
    return member


def _hang_up(stranger: socket.socket, strangers: dict[socket.socket, None]) -> None:
    """Its own task closes it."""
    del strangers[stranger]
    with contextlib.suppress(OSError):
        stranger.shutdown(socket.SHUT_RDWR)


def _from_afar(place: ReplicaPlace, host: str) -> ReplicaPlace:
    """As a process of another host reaches it. An engine that listens at every address of this host
    is where the guest has found this one."""
    addresses = []
    for address in place.addresses:
        parsed = parse(address)
        if isinstance(parsed, TcpAddress):
            is_any = parsed.host in ("0.0.0.0", "::")
            addresses.append(str(TcpAddress(host, parsed.port)) if is_any else address)
    return dataclasses.replace(place, addresses=tuple(addresses))
