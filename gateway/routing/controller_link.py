"""A gateway's link to a controller; see `outrider.links.fleet_messages`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.api_types.errors import UnavailableError
from outrider.errors import RequestError
from outrider.gateway.gateway import Gateway, GatewayState
from outrider.gateway.routing.queries import Queries
from outrider.gateway.routing.replicas import qualified
from outrider.links.aio import AsyncChannel, open_channel
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
    NumProcesses,
    OperationResult,
    ReplicaTable,
    RollOut,
    ScaleTo,
    SpeculationChanged,
    StopGateway,
    ViewCluster,
    ViewClusterResult,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello, Role
from outrider.links.speculation import SpeculationChange

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
LOAD_S = 1.0  # between load reports


class ControllerLink:
    """Sends a gateway's queries to a controller, and carries out the controller's instructions.

    A remote gateway (`is_remote`) serves several controllers: it neither ends nor drains with one
    of them.
    `on_num_processes`, if set, handles the number of gateway processes.

    A gateway that its controller started ends with it, but not because the controller is silent: a
    stopped process still holds its end of the Unix socket, and engines run without it. A remote
    gateway drops a silent controller and redials: over a network, silence may be the only sign of a
    loss.
    """

    def __init__(self, channel: AsyncChannel, welcome: Welcome, *, is_remote: bool = False) -> None:
        self.welcome = welcome
        self.on_num_processes: Callable[[int], None] | None = None
        self._channel = channel
        self._is_remote = is_remote
        self._queries = Queries("the controller")

    @classmethod
    async def open(
        cls, address: str, secret: str, index: int, *, is_remote: bool = False
    ) -> ControllerLink:
        """As gateway number `index` of the controller; a remote gateway has no number."""
        rank, size = (REVISION, 0) if is_remote else (index, index + 1)
        hello = Hello(Role.GATEWAY, rank, size, os.getpid(), socket.gethostname())
        channel = await open_channel(
            address,
            secret,
            hello,
            FLEET_CODEC,
            CONNECT_TIMEOUT_S,
            peer="the controller",
            ends_when_silent=is_remote,
        )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                welcome = await channel.receive()
            if not isinstance(welcome, Welcome):
                raise LinkError(f"the controller began with a {type(welcome).__name__}.")
        except BaseException:
            channel.close()
            raise
        return cls(channel, welcome, is_remote=is_remote)

    def close(self) -> None:
        self._channel.close()

    # -- queries to the controller ------------------------------------------------------------

    async def view(self) -> ClusterView | None:
        try:
            found: ViewClusterResult = await self._ask(ViewCluster)
        except UnavailableError:
            return None
        return None if found.view is None else self._qualified(found.view)

    def _qualified(self, view: ClusterView) -> ClusterView:
        """With replica names as this gateway has them."""
        controller = self.welcome.controller
        return replace(
            view,
            processes=tuple(
                replace(each, replica=qualified(controller, each.replica)) if each.replica else each
                for each in view.processes
            ),
            replicas=tuple(
                replace(each, name=qualified(controller, each.name)) for each in view.replicas
            ),
        )

    async def drain(self) -> None:
        """Drain every gateway of the controller, this one included."""
        self._send(DrainAll())

    async def abort(self, request_id: str) -> int:
        found: AbortResult = await self._ask(lambda query: AbortAll(query, request_id))
        return found.num_ended

    async def scale(self, num_replicas: int) -> None:
        """Scale to this many replicas; returns once the change is accepted."""
        await self._start_operation(lambda query: ScaleTo(query, num_replicas))

    async def roll_out(self, settings: Mapping[str, Any]) -> None:
        """Replace all replicas with settings changed; returns once the rollout is accepted."""
        await self._start_operation(lambda query: RollOut(query, dict(settings)))

    async def _start_operation(self, message: Callable[[int], object]) -> None:
        done: OperationResult = await self._ask(message)
        if done.error:
            raise RequestError(done.error)

    async def _ask(self, message: Callable[[int], object]) -> Any:
        if self._channel.is_silent:
            raise UnavailableError("the controller is silent at the moment; try again.")
        return await self._queries.ask(self._send, message, ANSWER_TIMEOUT_S)

    def _send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except LinkError as error:
            raise UnavailableError(f"the server is ending: {error}") from error

    # -- reports to the controller ------------------------------------------------------------

    def send_addresses(self, http_address: str, grpc_address: str) -> None:
        self._report(GatewayListening(http_address, grpc_address))

    def send_failure(self, sentence: str) -> None:
        self._report(GatewayFailed(sentence))

    def _report(self, message: object) -> None:
        """Dropped if the controller is gone; `obey` raises then."""
        with contextlib.suppress(UnavailableError):
            self._send(message)

    def send_speculation(self, change: SpeculationChange) -> None:
        """Report an operator's change of speculation, for engines that start later."""
        self._report(SpeculationChanged(change))

    async def send_load(self, gateway: Gateway) -> None:
        """Report at every change of state and every `LOAD_S`, until the controller is gone."""

        async def report(state: GatewayState) -> None:
            if not self._channel.has_unsent:  # a controller that does not read gets a later state
                self._report(GatewayLoad(state.value, len(gateway.active_requests)))

        gateway.on_state.append(report)
        was_silent = False
        try:
            while not self._channel.is_closed:
                await report(gateway.state)
                if self._channel.is_silent is not was_silent:
                    was_silent = not was_silent
                    state = "is silent; this gateway serves on" if was_silent else "is back"
                    logger.warning("the controller %s", state)
                await asyncio.sleep(LOAD_S)
        finally:
            gateway.on_state.remove(report)

    # -- the controller's instructions --------------------------------------------------------

    async def obey(self, gateway: Gateway) -> float:
        """Carry out the controller's instructions until it stops this gateway; returns the drain
        timeout. Raises `LinkError` if the controller is lost."""
        self._count(gateway, self.welcome.num_processes)
        gateway.replicas.remember_speculation(self.welcome.speculation)
        if self.welcome.is_draining and not self._is_remote:
            await gateway.drain()
        try:
            while True:
                match await self._channel.receive():
                    case ReplicaTable(places=places):
                        await gateway.replicas.publish(self.welcome.controller, places)
                    case StopGateway(drain_s=drain_s):
                        return drain_s
                    case Drain():
                        await gateway.drain()
                    case Abort(query=query, request_id=request_id):
                        self._report(AbortResult(query, gateway.active_requests.abort(request_id)))
                    case NumProcesses(count=count):
                        self._count(gateway, count)
                    case SpeculationChanged(change=change):
                        gateway.replicas.remember_speculation(change)
                    case ViewClusterResult() | AbortResult() | OperationResult() as found:
                        self._queries.settle(found)
                    case other:
                        raise LinkError(
                            f"the controller sent a {type(other).__name__} out of turn."
                        )
        finally:
            self._queries.fail("the server is ending.")

    def _count(self, gateway: Gateway, num_processes: int) -> None:
        if self.on_num_processes is not None:
            self.on_num_processes(num_processes)
        else:
            gateway.num_processes = num_processes
