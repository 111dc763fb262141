"""Where gateways dial in: what they are told and ask, and what one of them has all of them do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError
from outrider.gateway.engine_link import Locate
from outrider.gateway.gateway import State
from outrider.links.aio import AsyncChannel, accept_channel
from outrider.links.cluster_view import ClusterView
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import (
    Abort,
    AbortAll,
    Aborted,
    CannotServe,
    ClusterViewed,
    Drain,
    DrainAll,
    EngineFound,
    FindEngine,
    Listening,
    Load,
    NumProcesses,
    Speculating,
    ViewCluster,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.speculation import SpeculationChange

GREETING_S = 5.0
MAX_GREETINGS = 64  # under way at once
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
    listening: Listening | None = None
    state: str = "starting"
    num_active: int = 0

    def tell(self, message: object) -> None:
        """Whoever is gone need not know; its own task tells of it."""
        with contextlib.suppress(LinkError):
            self.channel.send(message)


@dataclass(frozen=True, slots=True)
class Answers:
    """Who knows what gateways ask."""

    locate: Locate
    view: Callable[[], Awaitable[ClusterView | None]]


class Desk:
    """`settings` are what gateways are told of the configuration. Those in `on_change` hear of a
    member that has come, changed or gone, with what ended its link."""

    def __init__(self, settings: Mapping[str, Any], secret: str, answers: Answers) -> None:
        self.members: dict[int, Member] = {}
        self.failures: dict[int, str] = {}  # last words, by index
        self.on_change: list[Callable[[Member, LinkError | None], None]] = []
        self.is_draining = False
        self._settings = dict(settings)
        self._secret = secret
        self._answers = answers
        self._speculation = SpeculationChange()
        self._serial = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Take gateways until cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        greetings = asyncio.Semaphore(MAX_GREETINGS)
        try:
            while True:
                await greetings.acquire()
                sock, _ = await loop.sock_accept(listener)
                self._spawn(self._serve(sock, greetings))
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """About the members; whoever calls minds the time."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- to all -------------------------------------------------------------------------------

    def tell_all(self, message: object) -> None:
        for member in self.members.values():
            member.tell(message)

    def drain(self) -> None:
        """New requests are refused from now on, also by gateways to come."""
        self.is_draining = True
        self.tell_all(Drain())

    async def abort(self, request_id: str) -> int:
        """End a request wherever it is; how many answered that they had it."""
        found = await self._ask_all(lambda query: Abort(query, request_id))
        return sum(each.num_ended for each in found)

    async def _ask_all(self, question: Callable[[int], object]) -> list[Any]:
        asked = [(next(self._serial), member) for member in self.members.values()]
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

    async def _serve(self, sock: socket.socket, greetings: asyncio.Semaphore) -> None:
        try:
            hello, channel = await accept_channel(
                sock, self._secret, FLEET_CODEC, GREETING_S, peer="the gateway"
            )
        except (LinkError, OSError) as error:
            logger.warning("somebody dialled in and was refused: %s", error)
            return
        finally:
            greetings.release()
        channel.peer = f"gateway {hello.rank}"
        member = Member(hello.rank, hello.pid, hello.host, channel)
        failure: LinkError | None = None
        self._join(member)
        try:
            while True:
                self._take(member, await channel.receive())
        except LinkError as error:
            failure = error
        finally:
            channel.close()
            self._leave(member, failure)

    def _join(self, member: Member) -> None:
        self.failures.pop(member.index, None)
        self.members[member.index] = member
        member.tell(Welcome(self._settings, len(self.members), self.is_draining, self._speculation))
        self.tell_all(NumProcesses(len(self.members)))
        self._tell_change(member)

    def _leave(self, member: Member, failure: LinkError | None) -> None:
        if self.members.get(member.index) is member:
            del self.members[member.index]
        if self.members:
            self.tell_all(NumProcesses(len(self.members)))
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
            case FindEngine(query=query):
                self._spawn(self._find_engine(member, query))
            case ViewCluster(query=query):
                self._spawn(self._view_cluster(member, query))
            case DrainAll():
                self.drain()
            case AbortAll(query=query, request_id=request_id):
                self._spawn(self._abort_for(member, query, request_id))
            case Speculating(change=change):
                self._speculation = self._speculation.followed_by(change)
                for other in self.members.values():
                    if other is not member:
                        other.tell(message)
            case Aborted(query=query):
                answer = self._queries.get(query)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                raise LinkError(f"a gateway sent a {type(message).__name__} out of turn.")

    async def _find_engine(self, member: Member, query: int) -> None:
        try:
            found = await self._answers.locate()
        # Whoever locates the engine may fail in ways of their own; the gateway asks again.
        except Exception as error:
            member.tell(EngineFound(query, "", "", error=str(error) or type(error).__name__))
        else:
            member.tell(EngineFound(query, found.address, found.secret))

    async def _view_cluster(self, member: Member, query: int) -> None:
        view = None
        with contextlib.suppress(OutriderError):
            view = await self._answers.view()
        member.tell(ClusterViewed(query, view))

    async def _abort_for(self, member: Member, query: int, request_id: str) -> None:
        member.tell(Aborted(query, await self.abort(request_id)))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
