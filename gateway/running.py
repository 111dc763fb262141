"""A gateway as a process: before an engine at a fixed address, as the guest of controllers, or kept
by one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Coroutine
from typing import Any

import uvloop

from outrider.config import EngineConfig, ServerConfig
from outrider.errors import ConfigError, OutriderError
from outrider.garbage import leave_out_what_is_loaded
from outrider.gateway.admin import admin_server, build_admin_app
from outrider.gateway.cluster_view import AskCluster, nobody_knows
from outrider.gateway.controllers import Controllers
from outrider.gateway.front import Front
from outrider.gateway.http.server import HttpServer
from outrider.gateway.keeper_link import KeeperLink
from outrider.gateway.metrics_page import FOLDER_VARIABLE, MetricsPage
from outrider.gateway.ports import ADMIN_OPTION, listener
from outrider.links.address import UnixAddress, parse
from outrider.links.frames import LinkError
from outrider.links.secret import secret_from_environment
from outrider.logs import setup_logging

_POLL_S = 0.05


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Until a gateway has ended."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


# -- by itself --------------------------------------------------------------------------------


async def serve(
    config: ServerConfig, engine: str | None = None, engine_away_s: float | None = None
) -> None:
    """Until a signal: before the engine at that address, else before the replicas of the
    controllers that are configured."""
    _check(config, engine)
    secret = secret_from_environment()
    controllers = Controllers(config.controllers, secret)
    ask_cluster = nobody_knows if engine is not None else controllers.view
    front = Front(
        secret,
        config,
        ask_cluster,
        resubmit_timeout_s=engine_away_s,
        broadcast=None if engine is not None else controllers,
    )
    signals = _Signals()
    async with contextlib.AsyncExitStack() as stack:  # the last is done first
        admin = _admin(front, config, ask_cluster)
        if admin is not None:
            await admin.start()
            stack.push_async_callback(admin.stop, 0.0)
        await front.start()
        if engine is not None:
            await front.gateway.replicas.publish_fixed(engine)
        else:
            stack.push_async_callback(_ended, controllers.begin(front))
        # Requests that are finished may need replicas that come meanwhile.
        stack.push_async_callback(_stop, front, config.drain_s, signals)
        said = f"listening on {front.http_address} (HTTP) and {front.grpc_address}"
        print(said if admin is None else f"{said}; for probes on {admin.address}", flush=True)
        leave_out_what_is_loaded()
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


def _admin(front: Front, config: ServerConfig, ask_cluster: AskCluster) -> HttpServer | None:
    """Where probes ask, unless there is no port for it."""
    if config.admin_port is None:
        return None
    page = MetricsPage(front.gateway, ask_cluster)
    app = build_admin_app(lambda: front.gateway.state.value, page.render)
    return admin_server(app, config, listener(config.host, config.admin_port, ADMIN_OPTION))


# -- for a keeper -----------------------------------------------------------------------------


async def serve_for(address: str, index: int) -> None:
    """As gateway number `index` of the keeper there, which says all the rest."""
    secret = secret_from_environment()
    keeper = await KeeperLink.open(address, secret, index)
    config = EngineConfig.from_settings(keeper.welcome.settings)
    is_json = config.log_format == "json"
    setup_logging(config.log_level, role="gateway", rank=index, json_lines=is_json)
    front = Front(secret, config.server, keeper.view, broadcast=keeper, shares_ports=True)
    front.gateway.replicas.on_speculation = keeper.tell_speculation
    front.gateway.tokenizers.expect(config)
    signals = _Signals()
    obeying = asyncio.create_task(keeper.obey(front.gateway))
    try:
        await front.start()
    except OutriderError as error:
        keeper.tell_failure(str(error))
        obeying.cancel()
        keeper.close()
        raise
    keeper.tell_listening(front.http_address, front.grpc_address)
    leave_out_what_is_loaded()
    telling = asyncio.create_task(keeper.tell_load(front.gateway))
    signalled = asyncio.create_task(signals.next())
    await asyncio.wait((obeying, signalled), return_when=asyncio.FIRST_COMPLETED)
    drain_s = config.server.drain_s
    try:
        if obeying.done():
            drain_s = obeying.result()
    except LinkError:
        _remove_socket(address)
        await _finish_without_keeper(front, drain_s)
        drain_s = 0.0
    signalled.cancel()
    await _stop(front, drain_s, signals)
    for task in (obeying, telling):
        task.cancel()
    keeper.close()


async def _finish_without_keeper(front: Front, drain_s: float) -> None:
    """As long as there is an engine: nobody will tell where the next one is."""
    gateway = front.gateway
    await gateway.drain()
    deadline_s = time.monotonic() + drain_s
    while len(gateway.in_hand) and gateway.replicas.connected and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)


def _remove_socket(address: str) -> None:
    """What a keeper that was killed has left of itself on this host."""
    place = parse(address)
    if isinstance(place, UnixAddress):
        with contextlib.suppress(OSError):
            os.unlink(place.path)
        counts = os.environ.get(FOLDER_VARIABLE, "")
        if counts and os.path.dirname(counts) == os.path.dirname(place.path):
            shutil.rmtree(counts, ignore_errors=True)
        with contextlib.suppress(OSError):  # unless there is more in it, or others were quicker
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


async def _stop(front: Front, drain_s: float, signals: _Signals) -> None:
    """Drain, or end at once if there is a signal meanwhile."""
    stopping = asyncio.create_task(front.stop(drain_s))
    again = asyncio.create_task(signals.next())
    await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await front.stop(drain_s=0.0)
    await stopping
    again.cancel()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
