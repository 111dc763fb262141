"""Entry points of a gateway process: for one engine at a fixed address, as a remote gateway of
controllers, or started by one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import time
from collections.abc import Coroutine
from typing import Any

import uvloop

from outrider.api_types.cluster_view import AskCluster, no_cluster_view
from outrider.config import EngineConfig, ServerConfig
from outrider.errors import ConfigError, OutriderError
from outrider.gateway.admin import admin_server, build_admin_app
from outrider.gateway.frontend import Frontend
from outrider.gateway.http.server import HttpServer
from outrider.gateway.metrics.page import FOLDER_VARIABLE, MetricsPage
from outrider.gateway.ports import ADMIN_OPTION, listener
from outrider.gateway.routing.controller_link import ControllerLink
from outrider.gateway.routing.controllers import Controllers
from outrider.links.address import UnixAddress, parse
from outrider.links.frames import LinkError
from outrider.links.secret import secret_from_environment
from outrider.logs import setup_logging

_POLL_S = 0.05


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine until the gateway has ended."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


# -- started by itself ------------------------------------------------------------------------


async def serve(
    config: ServerConfig, engine: str | None = None, engine_away_s: float | None = None
) -> None:
    """Serve until a signal: the engine at that address, else the replicas of the configured
    controllers."""
    _check(config, engine)
    secret = secret_from_environment()
    controllers = Controllers(config.controllers, secret)
    ask_cluster = no_cluster_view if engine is not None else controllers.view
    frontend = Frontend(
        secret,
        config,
        ask_cluster,
        resubmit_timeout_s=engine_away_s,
        broadcast=None if engine is not None else controllers,
    )
    signals = _Signals()
    async with contextlib.AsyncExitStack() as stack:  # in reverse order
        admin = _admin(frontend, config, ask_cluster)
        if admin is not None:
            await admin.start()
            stack.push_async_callback(admin.stop, 0.0)
        await frontend.start()
        if engine is not None:
            await frontend.gateway.replicas.publish_fixed(engine)
        else:
            stack.push_async_callback(_ended, controllers.begin(frontend))
        # Drain before the controllers' links close: requests may move to new replicas.
        stack.push_async_callback(_stop, frontend, config.drain_s, signals)
        line = f"listening on {frontend.http_address} (HTTP) and {frontend.grpc_address}"
        print(line if admin is None else f"{line}; for probes on {admin.address}", flush=True)
        gc.freeze()  # start-up objects: a full collection takes 100 ms
        await signals.next()


def _check(config: ServerConfig, engine: str | None) -> None:
    if engine is not None:
        parse(engine)
    elif not config.controllers:
        raise ConfigError(
            "server.controllers is empty and no engine is given; name the servers whose replicas "
            "are to be served (--controllers host:port)."
        )
    if config.processes > 1:
        raise ConfigError(
            f"server.processes is {config.processes}, but a gateway started by itself is one "
            "process; start as many as are needed, each with ports of its own."
        )


def _admin(frontend: Frontend, config: ServerConfig, ask_cluster: AskCluster) -> HttpServer | None:
    """The admin server, if an admin port is configured."""
    if config.admin_port is None:
        return None
    page = MetricsPage(frontend.gateway, ask_cluster)
    app = build_admin_app(lambda: frontend.gateway.state.value, page.render)
    return admin_server(app, config, listener(config.host, config.admin_port, ADMIN_OPTION))


# -- for a controller -----------------------------------------------------------------------------


async def serve_for(address: str, index: int) -> None:
    """Serve as gateway number `index` of the controller at that address, with its settings."""
    secret = secret_from_environment()
    controller = await ControllerLink.open(address, secret, index)
    config = EngineConfig.from_settings(controller.welcome.settings)
    is_json = config.log_format == "json"
    setup_logging(config.log_level, role="gateway", rank=index, json_lines=is_json)
    frontend = Frontend(
        secret, config.server, controller.view, broadcast=controller, shares_ports=True
    )
    frontend.gateway.replicas.on_speculation = controller.send_speculation
    frontend.gateway.tokenizers.expect(config)
    signals = _Signals()
    obeying = asyncio.create_task(controller.obey(frontend.gateway))
    try:
        await frontend.start()
    except OutriderError as error:
        controller.send_failure(str(error))
        obeying.cancel()
        controller.close()
        raise
    controller.send_addresses(frontend.http_address, frontend.grpc_address)
    gc.freeze()  # start-up objects: a full collection takes 100 ms
    reporting = asyncio.create_task(controller.send_load(frontend.gateway))
    signalled = asyncio.create_task(signals.next())
    await asyncio.wait((obeying, signalled), return_when=asyncio.FIRST_COMPLETED)
    drain_s = config.server.drain_s
    try:
        if obeying.done():
            drain_s = obeying.result()
    except LinkError:
        _remove_socket(address)
        await _finish_without_controller(frontend, drain_s)
        drain_s = 0.0
    signalled.cancel()
    await _stop(frontend, drain_s, signals)
    for task in (obeying, reporting):
        task.cancel()
    controller.close()


async def _finish_without_controller(frontend: Frontend, drain_s: float) -> None:
    """Drain while an engine is connected: without the controller no replacement is published."""
    gateway = frontend.gateway
    await gateway.drain()
    deadline_s = time.monotonic() + drain_s
    while (
        len(gateway.active_requests)
        and gateway.replicas.connected
        and time.monotonic() < deadline_s
    ):
        await asyncio.sleep(_POLL_S)


def _remove_socket(address: str) -> None:
    """Remove the files of a controller that was killed on this host."""
    place = parse(address)
    if isinstance(place, UnixAddress):
        with contextlib.suppress(OSError):
            os.unlink(place.path)
        counts = os.environ.get(FOLDER_VARIABLE, "")
        if counts and os.path.dirname(counts) == os.path.dirname(place.path):
            shutil.rmtree(counts, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or removed by another gateway
            os.rmdir(os.path.dirname(place.path))


# -- the end ----------------------------------------------------------------------------------


class _Signals:
    """SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self._seen = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._seen.set)

    async def next(self) -> None:
        await self._seen.wait()
        self._seen.clear()


async def _stop(frontend: Frontend, drain_s: float, signals: _Signals) -> None:
    """Drain; a second signal ends at once."""
    stopping = asyncio.create_task(frontend.stop(drain_s))
    again = asyncio.create_task(signals.next())
    await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await frontend.stop(drain_s=0.0)
    await stopping
    again.cancel()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
