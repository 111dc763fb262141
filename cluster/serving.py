"""The gateways of a server before an engine, from the start of both to the end of both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.cluster.admin import admin_server, build_admin_app
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.fleet import Fleet
from outrider.cluster.fleet_desk import Answers
from outrider.config import EngineConfig
from outrider.gateway.engine_link import EngineAddress, EngineLink
from outrider.gateway.errors import UnavailableError
from outrider.gateway.http.server import HttpServer
from outrider.gateway.metrics_page import render_all
from outrider.gateway.ports import ReservedPorts
from outrider.links.cluster_view import ClusterView
from outrider.links.gateway_messages import EngineFacts
from outrider.links.speculation import SpeculationStatus

END_S = 20.0  # for all processes to end, after running requests have had their time
SELF = "outrider serve"

logger = logging.getLogger(__name__)


class Launch(Protocol):
    """A way to have an engine."""

    async def locate(self) -> EngineAddress:
        """Where it is; waits until it is anywhere."""

    async def view(self) -> ClusterView | None:
        """How its processes fare, as far as whoever starts them knows."""

    async def keep(self, say: Say) -> None:
        """Start it and keep it running until `stop`. Raises what is beyond repair."""

    async def stop(self) -> None:
        """End all its processes."""

    def abort(self) -> None:
        """End them at once: this process will have ended when the call returns, or just after."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where clients reach a server."""

    http: str
    grpc: str
    admin: str | None = None


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who is told how a server fares."""

    say: Say
    # The addresses, and how far the engine there means to draft; None if it has not said.
    on_ready: Callable[[Addresses, SpeculationStatus | None], None]


class Deadline:
    """From `begin` on, the time a server has to end; then it is ended, whatever it waits for."""

    def __init__(self, limit_s: float = END_S) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def begin(self, abort: Callable[[], None]) -> None:
        def end() -> None:
            logger.error("the server has not ended within %g s; it is ended now", self._limit_s)
            with contextlib.suppress(Exception):
                abort()
            os._exit(1)

        self._timer = threading.Timer(self._limit_s, end)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Serving:
    """The gateways before one launch, until a signal or the failure of either."""

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch,
        watchers: Watchers,
        deadline: Deadline,
        ports: ReservedPorts,
    ) -> None:
        self._config = config
        self._launch = launch
        self._watchers = watchers
        self._deadline = deadline
        self._signalled = asyncio.Event()
        self._launch_stop: asyncio.Task[None] | None = None
        server = config.server
        self._fleet = Fleet(
            server.processes, _settings_of(config), Answers(launch.locate, self._view), watchers.say
        )
        self._link = EngineLink(launch.locate, _accept, _take_note)
        self._admin: HttpServer | None = None
        if ports.admin is not None:
            app = build_admin_app(self._state, self._metrics)
            self._admin = admin_server(app, server, ports.admin)

    async def run(self) -> None:
        self._catch_signals()
        keeping = asyncio.create_task(self._launch.keep(self._watchers.say))
        gateways = asyncio.create_task(self._fleet.keep())
        linking = asyncio.create_task(self._link.run())
        signalled = asyncio.create_task(self._signalled.wait())
        opening = asyncio.create_task(self._open())
        try:
            await _first_failure_or([keeping, gateways, signalled], opening)
        finally:
            self._deadline.begin(self._abort)
            for task in (signalled, opening, linking):
                task.cancel()
            await self._close(keeping, gateways)

    async def _open(self) -> None:
        if self._admin is not None:
            await self._admin.start()
        await self._link.wait_connected(math.inf)  # the launch minds the time
        member = await self._fleet.wait_serving()
        facts, listening = self._link.facts, member.listening
        assert facts is not None and listening is not None
        admin = None if self._admin is None else self._admin.address
        addresses = Addresses(listening.http_address, listening.grpc_address, admin)
        say = self._watchers.say
        say(Event(Kind.STAGE, kv_sentence(facts, self._config.cache.block_size)))
        say(Event(Kind.STAGE, listening_sentence(addresses, self._config.server.tls_cert)))
        self._watchers.on_ready(addresses, await _speculation_of(self._link))

    async def _close(self, keeping: asyncio.Task[None], gateways: asyncio.Task[None]) -> None:
        is_failed = keeping.done() or gateways.done()
        async with contextlib.AsyncExitStack() as stack:  # the last is done first
            stack.callback(self._fleet.close)
            if self._admin is not None:
                stack.push_async_callback(self._admin.stop, 0.0)
            stack.push_async_callback(self._stop_launch, keeping)
            if is_failed:
                await self._stop_gateways(gateways, 0.0)
                return
            await self._fleet.drain()
            self._say_stopping(self._fleet.num_active)
            if self._fleet.num_active:
                await self._stop_gateways(gateways, self._config.server.drain_s)
            else:  # nobody needs the engine any more
                await asyncio.gather(self._stop_gateways(gateways, 0.0), self._stop_launch(keeping))

    async def _stop_gateways(self, gateways: asyncio.Task[None], drain_s: float) -> None:
        await self._fleet.stop(drain_s)
        await _ended(gateways)

    async def _stop_launch(self, keeping: asyncio.Task[None]) -> None:
        """May be called again."""
        if self._launch_stop is None:
            self._launch_stop = asyncio.create_task(self._launch.stop())
        await self._launch_stop
        await _ended(keeping)

    def _say_stopping(self, num_active: int) -> None:
        drain_s = self._config.server.drain_s
        running = (
            "1 running request gets" if num_active == 1 else f"{num_active} running requests get"
        )
        waits = f"{running} {drain_s:g} s; " if num_active else ""
        text = f"stopping: {waits}Ctrl-C again ends all at once"
        self._watchers.say(Event(Kind.STAGE, text))

    def _abort(self) -> None:
        self._fleet.close()
        self._launch.abort()

    # -- what is asked of it ------------------------------------------------------------------

    def _state(self) -> str:
        if self._signalled.is_set() or self._fleet.desk.is_draining:
            return "draining"
        if self._link.facts is None:
            return "starting"
        if not self._link.connected:
            return "engine away"
        return "serving" if self._fleet.num_serving else "no gateway serves"

    async def _metrics(self) -> bytes:
        """What all gateways have counted, and the engine."""
        status = None
        with contextlib.suppress(UnavailableError):
            status = await self._link.status()
        view, server = await self._view(), self._config.server
        model = next(iter(server.model_names), self._config.target.model)
        folder = self._fleet.metrics_folder
        if folder is None:
            return b""
        return await asyncio.to_thread(
            render_all, folder, model, status, view, with_vllm=server.vllm_metrics
        )

    async def _view(self) -> ClusterView:
        """Gateways before the processes that the launch has started."""
        found = await self._launch.view() or ClusterView(SELF, self._state(), 0, 0, ())
        return dataclasses.replace(found, processes=(*self._fleet.view(), *found.processes))

    # -- signals ------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)

    def _on_signal(self, number: int) -> None:
        if self._signalled.is_set():
            self._abort()
            os._exit(128 + number)  # as shells report it
        self._signalled.set()


async def _speculation_of(link: EngineLink) -> SpeculationStatus | None:
    try:
        return (await link.status()).speculation
    except UnavailableError:
        return None


async def _first_failure_or(ends: Sequence[asyncio.Task[Any]], opening: asyncio.Task[None]) -> None:
    """Until one of `ends` has ended or `opening` has failed; raises what failed."""
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


async def _accept(facts: EngineFacts) -> None:
    """Whatever the engine is."""


async def _take_note() -> None:
    """Its state is looked at when somebody asks."""


def _settings_of(config: EngineConfig) -> dict[str, Any]:
    """Those that gateways need."""
    values = config.to_settings()
    return {p: v for p, v in values.items() if p.startswith(("server.", "log_"))}


def listening_sentence(addresses: Addresses, tls_cert: str | None = None) -> str:
    """The address of each protocol."""
    scheme = "http" if tls_cert is None else "https"
    said = f"listening on {scheme}://{addresses.http} and, for gRPC, on {addresses.grpc}"
    return said if addresses.admin is None else f"{said}; for probes on http://{addresses.admin}"


def kv_sentence(facts: EngineFacts, block_size: int) -> str:
    """How many tokens the target's KV has room for, and the draft's."""
    said = f"KV: {facts.num_blocks} blocks, room for {facts.num_blocks * block_size} tokens"
    if facts.num_draft_blocks:
        said += f"; the draft's for {facts.num_draft_blocks * block_size}"
    return said
