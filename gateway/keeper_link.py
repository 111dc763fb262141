"""A gateway's link to its keeper; see `outrider.links.fleet_messages`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from typing import Any

from outrider.gateway.engine_link import EngineAddress
from outrider.gateway.errors import UnavailableError
from outrider.gateway.gateway import Gateway, State
from outrider.links.aio import AsyncChannel, open_channel
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
    Stop,
    ViewCluster,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello, Role
from outrider.links.speculation import SpeculationChange

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
LOAD_S = 1.0  # between reports of how it fares


class KeeperLink:
    """Answers what a gateway asks its keeper, and does what the keeper says."""

    def __init__(self, channel: AsyncChannel, welcome: Welcome) -> None:
        self.welcome = welcome
        self._channel = channel
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._serial = itertools.count(1)

    @classmethod
    async def open(cls, address: str, secret: str, index: int) -> KeeperLink:
        """As gateway number `index` of the keeper's."""
        hello = Hello(Role.GATEWAY, index, index + 1, os.getpid(), socket.gethostname())
        channel = await open_channel(
            address, secret, hello, FLEET_CODEC, CONNECT_TIMEOUT_S, peer="the keeper"
        )
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            welcome = await channel.receive()
        if not isinstance(welcome, Welcome):
            raise LinkError(f"the keeper began with a {type(welcome).__name__}.")
        return cls(channel, welcome)

    def close(self) -> None:
        self._channel.close()

    # -- what the gateway asks ----------------------------------------------------------------

    async def locate(self) -> EngineAddress:
        """Waits until there is an engine, or the keeper is gone."""
        query = next(self._serial)
        found: EngineFound = await self._ask(query, FindEngine(query), None)
        if found.error:
            raise UnavailableError(found.error)
        return EngineAddress(found.address, found.secret)

    async def view(self) -> ClusterView | None:
        query = next(self._serial)
        try:
            found: ClusterViewed = await self._ask(query, ViewCluster(query), ANSWER_TIMEOUT_S)
        except UnavailableError:
            return None
        return found.view

    async def drain(self) -> None:
        """Every gateway of the keeper, this one included."""
        self._send(DrainAll())

    async def abort(self, request_id: str) -> int:
        query = next(self._serial)
        found: Aborted = await self._ask(query, AbortAll(query, request_id), ANSWER_TIMEOUT_S)
        return found.num_ended

    async def _ask(self, query: int, message: object, timeout_s: float | None) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise UnavailableError(
                f"the server's first process has not answered for {timeout_s:g} s; try again."
            ) from None
        finally:
            self._queries.pop(query, None)

    def _send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except LinkError as error:
            raise UnavailableError(f"the server is ending: {error}") from error

    # -- what it tells ------------------------------------------------------------------------

    def tell_listening(self, http_address: str, grpc_address: str) -> None:
        self._tell(Listening(http_address, grpc_address))

    def tell_failure(self, sentence: str) -> None:
        self._tell(CannotServe(sentence))

    def _tell(self, message: object) -> None:
        """A keeper that is gone need not know; `obey` tells of its end."""
        with contextlib.suppress(UnavailableError):
            self._send(message)

    def _tell_speculation(self, change: SpeculationChange) -> None:
        self._tell(Speculating(change))

    async def tell_load(self, gateway: Gateway) -> None:
        """At every change of state and now and then, until the keeper is gone."""

        async def tell(state: State) -> None:
            self._tell(Load(state.value, len(gateway.in_hand)))

        gateway.on_state.append(tell)
        while not self._channel.is_closed:
            await tell(gateway.state)
            await asyncio.sleep(LOAD_S)

    # -- what it is told ----------------------------------------------------------------------

    async def obey(self, gateway: Gateway) -> float:
        """Do as the keeper says until it says to stop: how long running requests may take then.
        Raises `LinkError` once it is gone."""
        gateway.num_processes = self.welcome.num_processes
        gateway.link.remember_speculation(self.welcome.speculation)
        gateway.link.on_speculation = self._tell_speculation
        if self.welcome.is_draining:
            await gateway.drain()
        try:
            while True:
                match await self._channel.receive():
                    case Stop(drain_s=drain_s):
                        return drain_s
                    case Drain():
                        await gateway.drain()
                    case Abort(query=query, request_id=request_id):
                        self._tell(Aborted(query, gateway.in_hand.abort(request_id)))
                    case NumProcesses(count=count):
                        gateway.num_processes = count
                    case Speculating(change=change):
                        gateway.link.remember_speculation(change)
                    case EngineFound() | ClusterViewed() | Aborted() as found:
                        self._settle(found)
                    case other:
                        raise LinkError(f"the keeper sent a {type(other).__name__} out of turn.")
        finally:
            for answer in self._queries.values():
                if not answer.done():
                    answer.set_exception(UnavailableError("the server is ending."))

    def _settle(self, found: EngineFound | ClusterViewed | Aborted) -> None:
        answer = self._queries.pop(found.query, None)
        if answer is not None and not answer.done():
            answer.set_result(found)
