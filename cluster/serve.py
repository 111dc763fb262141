"""Runs a server: checks the models, starts the processes, serves, and ends everything.

Gateways are separate processes and hold the requests, which thus survive engine and ranks. This
process starts all others and holds no client connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from outrider.cluster.deadline import END_S, Deadline
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.launch import Launch
from outrider.cluster.precompile_kernels import precompile_kernels
from outrider.cluster.serve_callbacks import ServeCallbacks
from outrider.cluster.signals import exit_on_signals, record_signals, restore_signals
from outrider.cluster.start_progress import StartProgress
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.gateway.exposure import check_exposure
from outrider.gateway.ports import ReservedPorts
from outrider.links.address import listen
from outrider.links.secret import SECRET_VARIABLE
from outrider.progress_stages import stage
from outrider.requirements import need, not_installed

if TYPE_CHECKING:
    from outrider.cluster.ray.launch import RayLaunch
    from outrider.cluster.ray.session import RaySession, RaySessions

_RAY_AWAY_S = 24 * 3600  # we detect a lost head ourselves, and wait for it


def serve(
    config: EngineConfig,
    callbacks: ServeCallbacks,
    *,
    use_ray: bool = True,
    gateway_log_level: str | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or SIGHUP unless ignored, as by nohup. No process is left when
    it returns, raises or is killed; ending takes at most `server.drain_s` and `END_S`. Gateways log
    at `gateway_log_level`, by default `log_level`."""
    if not use_ray or config.cluster.address is None:  # else ranks may all be on other hosts
        need("torch", "transformers", "safetensors", "numpy")
    secret = _secret(config)
    warning = check_exposure(config.server) if config.server.processes else None
    if warning is not None:
        callbacks.say(Event(EventKind.TROUBLE, warning))
    with contextlib.ExitStack() as stack:
        handle_signals = stack.enter_context(exit_on_signals())
        progress = stack.enter_context(StartProgress(callbacks))
        callbacks = progress.callbacks
        ports = stack.enter_context(ReservedPorts(config.server))
        config = dataclasses.replace(config, server=ports.config)
        gateway_listener = None
        if config.cluster.listen is not None:
            gateway_listener = stack.enter_context(_open_listener(config.cluster.listen))
        # The slowest steps start first. Ray mostly waits for its own processes.
        stack.enter_context(precompile_kernels(config))
        deadline = stack.enter_context(Deadline(config.server.drain_s + END_S))
        given_up = threading.Event()
        ray = stack.enter_context(_ray_starting(config, given_up, deadline)) if use_ray else None
        from outrider.cluster.serving import ServerSockets, Serving
        from outrider.engine.preflight import check_models

        # Ranks of a cluster that runs already may all be on other hosts.
        has_weights = not use_ray or config.cluster.address is None
        with stage("checking the models"):
            models = check_models(config, has_weights=has_weights)
        config = models.config
        checked = "model and tokenizer" if models.draft is None else "models and tokenizers"
        secret = (_running_secret(config, ray) if ray is not None else None) or secret
        sockets = ServerSockets(ports, secret, gateway_listener)
        received = record_signals()
        try:
            callbacks.say(Event(EventKind.STAGE, f"{checked} checked"))
            engine = config.without_secrets()  # API keys: engines have no clients
            launch: Launch
            if ray is not None:
                launch = _ray_launch(engine, secret, callbacks.say, ray, given_up.set)
            else:
                launch = _local_launch(engine, secret)
            log_level = gateway_log_level or config.log_level
            asyncio.run(
                Serving(config, launch, callbacks, deadline, sockets, log_level).run(received)
            )
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            handle_signals()


def _secret(config: EngineConfig) -> str:
    """The secret shared by all processes of the server: from the environment, or generated."""
    given = os.environ.get(SECRET_VARIABLE, "")
    if config.cluster.listen is not None and not given:
        raise ConfigError(
            f"cluster.listen is {config.cluster.listen!r} but {SECRET_VARIABLE} is not set; set it "
            "to the same text for this server and for the gateways that connect there."
        )
    if config.server.processes == 0 and config.cluster.listen is None:
        raise ConfigError(
            "server.processes is 0 but cluster.listen is not set, so no client could reach it; set "
            "it to an address for gateways, as 0.0.0.0:50060."
        )
    return given or secrets.token_hex(32)


def _open_listener(place: str) -> socket.socket:
    host, colon, port = place.rpartition(":")
    if not host or not colon or not port.isdecimal():
        raise ConfigError(
            f"cluster.listen is {place!r}; it must be a host and a port, as 0.0.0.0:50060."
        )
    return listen(f"tcp:{place}")


def _local_launch(config: EngineConfig, secret: str) -> Launch:
    from outrider.cluster.host_gpus import num_gpus
    from outrider.cluster.local.launch import LocalLaunch

    return LocalLaunch(config, secret, num_gpus())


@contextlib.contextmanager
def _ray_starting(
    config: EngineConfig, given_up: threading.Event, deadline: Deadline
) -> Iterator[RaySessions]:
    """Starts Ray in the background while models are checked and gateways start. Ends the last
    session on exit; `given_up` ends a wait for one."""
    cluster = config.cluster
    if cluster.address is None:
        # Ray reads these at import. It listens on every interface, so only a token keeps other
        # users and hosts out.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    else:
        # Ray exits this process when its head is away for this long, 60 s by default.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_RAY_AWAY_S))
    # Not in a thread: concurrent imports are no faster, and Ray cannot start before its import.
    try:
        with stage("importing Ray"):
            from outrider.cluster.ray.session import RaySessions
    except ModuleNotFoundError as error:
        reason = not_installed(error) or str(error)
        raise ConfigError(f"{reason}; or serve on this host alone with --no-ray.") from error
    from outrider.engine.over_ranks import group_sizes

    # One replica more than configured, for rollouts and scaling.
    num_ranks = sum(group_sizes(config).values()) * (cluster.replicas + 1)
    sessions = RaySessions(cluster.address, num_ranks, given_up)
    sessions.begin(cluster.ray_timeout_s)
    try:
        yield sessions
    finally:
        deadline.begin()
        sessions.close()


def _running_secret(config: EngineConfig, sessions: RaySessions) -> str | None:
    """The secret of replicas left running by an earlier server, unless the environment has one."""
    if config.cluster.address is None or os.environ.get(SECRET_VARIABLE):
        return None
    from outrider.cluster.ray.attach import running_secret
    from outrider.cluster.ray.late_launch import OPEN_S

    try:
        sessions.first(config.cluster.ray_timeout_s + OPEN_S)
    except TimeoutError:
        raise ClusterError("Ray neither accepts nor refuses this server.") from None
    return running_secret()


def _ray_launch(
    config: EngineConfig,
    secret: str,
    say: Say,
    sessions: RaySessions,
    give_up: Callable[[], None],
) -> Launch:
    from outrider.cluster.ray.attach import ControllerAttachment
    from outrider.cluster.ray.late_launch import LateLaunch
    from outrider.cluster.ray.lease import DriverIdentity

    driver = DriverIdentity()
    made: RayLaunch | None = None

    async def make(session: RaySession) -> RayLaunch:
        nonlocal made
        restore_signals()
        say(Event(EventKind.STAGE, session.summary))
        last = config if made is None else made.config
        attaching = ControllerAttachment(last, session, secret, driver, say)
        made = await attaching.attach(is_first=made is None or not made.has_served)
        return made

    return LateLaunch(sessions.open, make, give_up, first_wait_s=config.cluster.ray_timeout_s)
