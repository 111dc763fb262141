"""Runs the gateways and the replicas of a server together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.api_types.errors import UnavailableError
from outrider.cluster.deadline import Deadline, abort_with_timeout
from outrider.cluster.events import Event, EventKind
from outrider.cluster.fleet import Fleet
from outrider.cluster.fleet_registry import FleetHandlers
from outrider.cluster.launch import Launch
from outrider.cluster.operations import Operations
from outrider.cluster.serve_callbacks import (
    Addresses,
    ServeCallbacks,
    defaults_sentence,
    kv_sentence,
    listening_sentence,
)
from outrider.cluster.signals import termination_signals
from outrider.config import EngineConfig
from outrider.gateway.metrics.page import render_all
from outrider.gateway.ports import ReservedPorts
from outrider.gateway.routing.engine_link import EngineLink
from outrider.gateway.routing.replicas import ReplicaLinks
from outrider.links.address import bound_address
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaState
from outrider.links.gateway_messages import EngineFacts
from outrider.links.speculation import SpeculationStatus
from outrider.progress_stages import stage

if TYPE_CHECKING:
    from outrider.gateway.http.server import HttpServer

SELF = "outrider serve"
_POLL_S = 0.25
_START_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerSockets:
    """Sockets opened before any process starts, and the secret that authenticates connections."""

    ports: ReservedPorts
    secret: str
    gateway_listener: socket.socket | None = None  # for gateways of other hosts


class Serving:
    """Gateways and one launch, until a signal or the failure of either."""

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch,
        callbacks: ServeCallbacks,
        deadline: Deadline,
        sockets: ServerSockets,
        gateway_log_level: str,
    ) -> None:
        self._config = config
        self._launch = launch
        self._callbacks = callbacks
        self._deadline = deadline
        self._sockets = sockets
        self._signalled = asyncio.Event()
        self._launch_stop: asyncio.Task[None] | None = None
        self._has_served = False
        self._is_ending = False
        server = config.server
        self._operations = Operations(
            config.without_secrets(), launch, callbacks.say, _check_models
        )
        handlers = FleetHandlers(
            self._view, self._operations.scale, self._operations.roll_out, self._leave
        )
        self._fleet = Fleet(
            server.processes,
            _settings_of(dataclasses.replace(config, log_level=gateway_log_level)),
            sockets.secret,
            handlers,
            self._operations.say,
            sockets.gateway_listener,
        )
        self._replicas = ReplicaLinks(sockets.secret, _accept, _take_note)  # for status
        self._is_stale = asyncio.Event()  # published places have changed
        launch.on_change.append(self._is_stale.set)
        self._admin: HttpServer | None = None
        if sockets.ports.admin is not None:
            from outrider.gateway.admin import admin_server, build_admin_app  # FastAPI

            app = build_admin_app(self._state, self._metrics)
            self._admin = admin_server(app, server, sockets.ports.admin)

    async def run(self, received: Sequence[int] = ()) -> None:
        """`received` are signals that came before the handlers of the loop."""
        self._catch_signals()
        if received:
            self._signalled.set()
        launching = asyncio.create_task(self._launch.run(self._operations.say))
        gateways = asyncio.create_task(self._fleet.run())
        signalled = asyncio.create_task(self._signalled.wait())
        opening = asyncio.create_task(self._open())
        publishing = asyncio.create_task(self._publish_changes())
        try:
            await _first_failure_or([launching, gateways, signalled, publishing], opening)
        finally:
            self._deadline.begin(self._abort)
            for task in (signalled, opening):
                task.cancel()
            try:
                await self._close(launching, gateways)
            finally:
                await _ended(publishing)

    async def _open(self) -> None:
        say = self._callbacks.say
        if self._admin is not None:
            await self._admin.start()
        if self._sockets.gateway_listener is not None:
            where = bound_address(self._sockets.gateway_listener).removeprefix("tcp:")
            say(Event(EventKind.STAGE, f"replicas are published on {where}"))
        while not self._serve_all():  # the launch has the timeout
            await asyncio.sleep(_START_POLL_S)
        with stage("connecting to the engines"):
            while not self._replicas.connected:
                await self._replicas.changed.wait()
        first = self._replicas.connected[0].link
        facts = first.facts
        assert facts is not None
        with stage("waiting for the gateways"):
            member = await self._fleet.wait_serving()
        admin = None if self._admin is None else self._admin.address
        addresses = Addresses("", "", admin)
        if member is not None:
            assert member.listening is not None
            listening = member.listening
            addresses = Addresses(listening.http_address, listening.grpc_address, admin)
        say(Event(EventKind.STAGE, kv_sentence(facts, self._config.cache.block_size)))
        if sentence := defaults_sentence(facts, self._config.server.generation_config):
            say(Event(EventKind.STAGE, sentence))
        if sentence := listening_sentence(addresses, self._config.server.tls_cert):
            say(Event(EventKind.STAGE, sentence))
        self._has_served = True
        settled = EngineConfig.from_settings(facts.settings)
        self._callbacks.on_ready(addresses, await _speculation_of(first), settled)

    def _serve_all(self) -> bool:
        states = {each.state for each in self._launch.places}
        return states == {ReplicaState.SERVING}

    # -- shutdown -----------------------------------------------------------------------------

    async def _close(self, launching: asyncio.Task[None], gateways: asyncio.Task[None]) -> None:
        is_failed = launching.done() or gateways.done()
        self._is_ending = True
        self._replicas.drain()
        await self._operations.close()
        async with contextlib.AsyncExitStack() as stack:  # LIFO
            stack.callback(self._fleet.close)
            if self._admin is not None:
                stack.push_async_callback(self._admin.stop, 0.0)
            stack.push_async_callback(self._replicas.stop)
            stack.push_async_callback(self._stop_launch, launching)
            if is_failed:
                await self._stop_gateways(gateways, 0.0)
                return
            await self._fleet.drain()
            await self._publish()
            self._say_stopping(self._fleet.num_active)
            began_s, drain_s = time.monotonic(), self._config.server.drain_s
            await self._drain_remote(drain_s)
            left_s = max(drain_s - (time.monotonic() - began_s), 0.0)
            if self._fleet.num_active:
                await self._stop_gateways(gateways, left_s)
            else:  # no request needs the engines
                await asyncio.gather(
                    self._stop_gateways(gateways, 0.0), self._stop_launch(launching)
                )

    async def _drain_remote(self, limit_s: float) -> None:
        """Wait until no replica has requests of remote gateways."""
        deadline_s = time.monotonic() + limit_s
        while self._fleet.registry.remote_members and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)  # for them to learn of the drain
            statuses = (await self._replicas.statuses()).values()
            if not any(each.running or each.waiting for each in statuses if each is not None):
                return

    async def _stop_gateways(self, gateways: asyncio.Task[None], drain_s: float) -> None:
        await self._fleet.stop(drain_s)
        await _ended(gateways)

    async def _stop_launch(self, launching: asyncio.Task[None]) -> None:
        """Idempotent."""
        if self._launch_stop is None:
            self._launch_stop = asyncio.create_task(self._launch.stop())
        await self._launch_stop
        await _ended(launching)

    def _say_stopping(self, num_active: int) -> None:
        drain_s = self._config.server.drain_s
        running = (
            "1 running request gets" if num_active == 1 else f"{num_active} running requests get"
        )
        drain = f"{running} {drain_s:g} s; " if num_active else ""
        text = f"stopping: {drain}Ctrl-C again ends all at once"
        self._callbacks.say(Event(EventKind.STAGE, text))

    def _abort(self) -> None:
        self._fleet.close()
        self._launch.abort()

    # -- publishing replicas ------------------------------------------------------------------

    async def _publish_changes(self) -> None:
        """Publish changed places, once per turn of the loop."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            await self._publish()

    async def _publish(self) -> None:
        places = self._launch.places
        if not places:  # unknown: gateways go on with those that they reach
            return
        await self._replicas.publish("", places)
        if (
            self._is_ending and self._fleet.registry.remote_members
        ):  # they may have replicas of other controllers
            places = tuple(
                dataclasses.replace(each, state=ReplicaState.DRAINING)
                if each.state is ReplicaState.SERVING
                else each
                for each in places
            )
        self._fleet.registry.publish(places)

    # -- handlers -----------------------------------------------------------------------------

    def _state(self) -> str:
        if self._signalled.is_set() or self._fleet.registry.is_draining:
            return "draining"
        serves = any(each.state is ReplicaState.SERVING for each in self._launch.places)
        if not serves or not self._replicas.is_any_usable:  # as reported, and as observed
            return "engine away" if self._has_served else "starting"
        is_served = self._fleet.num_serving or not self._config.server.processes
        return "serving" if is_served else "no gateway serves"

    async def _leave(self, hosts: Collection[str], limit_s: float) -> None:
        if self._signalled.is_set():  # the shutdown drains the replicas; keep the host until then
            await asyncio.get_running_loop().create_future()
        await self._launch.leave(hosts, limit_s)

    async def _metrics(self) -> bytes:
        """The metrics of all gateways and engines."""
        statuses = await self._replicas.statuses()
        view, server = await self._view(), self._config.server
        model = next(iter(server.model_names), self._config.target.model)
        folder = self._fleet.metrics_folder
        if folder is None:
            return b""
        return await asyncio.to_thread(
            render_all, folder, model, statuses, view, with_vllm=server.vllm_metrics
        )

    async def _view(self) -> ClusterView:
        """The gateways, then the processes of the launch."""
        found = await self._launch.view() or ClusterView(
            SELF, self._state(), 0, 0, (), num_configured=self._config.cluster.replicas
        )
        processes = (*self._fleet.view(), *found.processes)
        num_configured = 0 if self._is_ending else found.num_configured
        order = self._operations.last or found.order  # else a previous server's
        return dataclasses.replace(
            found, processes=processes, order=order, num_configured=num_configured
        )

    # -- signals ------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, *termination_signals()):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._signalled.is_set():
            abort_with_timeout(self._abort)
            os._exit(128 + number)  # as shells report it
        self._signalled.set()


async def _speculation_of(link: EngineLink) -> SpeculationStatus | None:
    try:
        return (await link.status()).speculation
    except UnavailableError:
        return None


async def _accept(facts: EngineFacts) -> None:
    """Accepts any engine."""


async def _take_note() -> None:
    """Status is fetched on demand."""


async def _first_failure_or(ends: Sequence[asyncio.Task[Any]], opening: asyncio.Task[None]) -> None:
    """Wait until one of `ends` is done or `opening` fails; raises the failure."""
    pending = {*ends, opening}
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if any(task.done() for task in ends):
            return


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _check_models(config: EngineConfig) -> None:
    from outrider.engine.preflight import check_models  # torch

    check_models(config)


def _settings_of(config: EngineConfig) -> dict[str, Any]:
    """The settings that gateways need, including those used before there is an engine."""
    values = config.to_settings()
    return {p: v for p, v in values.items() if p.startswith(("server.", "log_", "target."))}
