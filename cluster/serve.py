"""A server from beginning to end: models checked, processes started, requests answered, all ended.

The gateway runs in this process and holds the requests, so they outlive engine and ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.cluster.events import Event, Kind, Say
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.gateway.cluster_view import ClusterView
from outrider.gateway.engine_link import EngineAddress, EngineLink
from outrider.gateway.errors import UnavailableError
from outrider.gateway.server import GrpcServer, ServerOptions
from outrider.links.gateway_messages import EngineFacts
from outrider.links.speculation import SpeculationStatus

DRAIN_S = 10.0
END_S = 20.0  # for all processes to end, after running requests have had their time

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
class Watchers:
    """Who is told how a server fares."""

    say: Say
    # The address, and how far the engine there means to draft; None if it has not said.
    on_ready: Callable[[str, SpeculationStatus | None], None]


def serve(config: EngineConfig, watchers: Watchers, *, use_ray: bool = True) -> None:
    """Serve until SIGINT, SIGTERM, or SIGHUP unless that is ignored, as nohup has it. No process is
    left when it returns, raises or is killed, and none of these takes longer than `DRAIN_S` and
    `END_S`."""
    from outrider.engine.preflight import check_models  # torch, which a bad flag need not wait for

    models = check_models(config)
    checked = "model and tokenizer" if models.draft is None else "models and tokenizers"
    watchers.say(Event(Kind.STAGE, f"{checked} checked"))
    check_port(config.server.host, config.server.port)
    with contextlib.ExitStack() as stack:
        deadline = stack.enter_context(Deadline())
        launch = _ray_launch(config, watchers.say, stack) if use_ray else _local_launch(config)
        asyncio.run(Serving(config, launch, watchers, deadline).run())


def _local_launch(config: EngineConfig) -> Launch:
    import torch

    from outrider.cluster.local_launch import LocalLaunch
    from outrider.config.colocation import settle_colocation

    return LocalLaunch(settle_colocation(config, torch.cuda.device_count()))


def _ray_launch(config: EngineConfig, say: Say, stack: contextlib.ExitStack) -> Launch:
    if config.cluster.address is None:
        # Ray reads these once, when it is imported. It listens on every interface, so only a
        # token keeps other users and hosts out.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    try:
        from outrider.cluster.ray_launch import RayLaunch
        from outrider.cluster.ray_session import ray_session
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; install Ray, or serve on this host with --no-ray.") from error
    from outrider.engine.over_ranks import group_sizes

    num_ranks = sum(group_sizes(config).values())
    session = stack.enter_context(ray_session(config.cluster.address, num_ranks))
    say(Event(Kind.STAGE, session.summary))
    return RayLaunch(config, session)


def check_port(host: str, port: int) -> None:
    """Minutes before the port is needed, so that nobody waits for weights in vain."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, name = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
    except OSError as error:
        raise ConfigError(
            f"server.host is {host!r} and server.port {port}, but that cannot be listened on: "
            f"{error.strerror}; choose others."
        ) from error


class Deadline:
    """From `begin` on, the time a server has to end; then it is ended, whatever it waits for."""

    def __init__(self, limit_s: float = DRAIN_S + END_S) -> None:
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
    """The gateway before one launch, until a signal or the launch's failure."""

    def __init__(
        self, config: EngineConfig, launch: Launch, watchers: Watchers, deadline: Deadline
    ) -> None:
        self._config = config
        self._launch = launch
        self._watchers = watchers
        self._deadline = deadline
        self._signalled = asyncio.Event()

    async def run(self) -> None:
        self._catch_signals()
        server = self._config.server
        host = f"[{server.host}]" if ":" in server.host else server.host
        options = ServerOptions(
            address=f"{host}:{server.port}", served_name=server.model_name, drain_s=DRAIN_S
        )
        gateway = GrpcServer(self._launch.locate, options, self._launch.view)
        keeping = asyncio.create_task(self._launch.keep(self._watchers.say))
        signalled = asyncio.create_task(self._signalled.wait())
        opening = asyncio.create_task(self._open(gateway))
        try:
            await _first_failure_or([keeping, signalled], opening)
        finally:
            self._deadline.begin(self._launch.abort)
            signalled.cancel()
            opening.cancel()
            await self._close(gateway, keeping)

    async def _open(self, gateway: GrpcServer) -> None:
        await gateway.start()
        await gateway.gateway.link.wait_connected(math.inf)  # the launch minds the time
        facts = gateway.gateway.facts
        assert facts is not None
        say = self._watchers.say
        say(Event(Kind.STAGE, kv_sentence(facts, self._config.cache.block_size)))
        say(Event(Kind.STAGE, f"listening on {gateway.address}"))
        self._watchers.on_ready(gateway.address, await _speculation_of(gateway.gateway.link))

    async def _close(self, gateway: GrpcServer, keeping: asyncio.Task[None]) -> None:
        is_failed = keeping.done()
        async with contextlib.AsyncExitStack() as stack:  # the last is done first
            stack.push_async_callback(self._stop_launch, keeping)
            stack.push_async_callback(gateway.stop, 0.0 if is_failed else DRAIN_S)
            if not is_failed:
                self._say_stopping(gateway.gateway.num_active)

    async def _stop_launch(self, keeping: asyncio.Task[None]) -> None:
        await self._launch.stop()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await keeping

    def _say_stopping(self, num_active: int) -> None:
        waits = f"{num_active} running requests get {DRAIN_S:g} s; " if num_active else ""
        text = f"stopping: {waits}Ctrl-C again ends all at once"
        self._watchers.say(Event(Kind.STAGE, text))

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)

    def _on_signal(self, number: int) -> None:
        if self._signalled.is_set():
            self._launch.abort()
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


def kv_sentence(facts: EngineFacts, block_size: int) -> str:
    """How many tokens the target's KV has room for, and the draft's."""
    said = f"KV: {facts.num_blocks} blocks, room for {facts.num_blocks * block_size} tokens"
    if facts.num_draft_blocks:
        said += f"; the draft's for {facts.num_draft_blocks * block_size}"
    return said
