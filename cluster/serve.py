"""A server from beginning to end: models checked, processes started, requests answered, all ended.

Gateways are processes of their own and hold the requests, so these outlive engine and ranks; this
process starts all others and holds no connection of a client.
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
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.kernels_ahead import kernels_ahead
from outrider.cluster.launch import Launch
from outrider.cluster.progress import Progress
from outrider.cluster.signals import ended_by_signals, noted_signals, take_back_signals
from outrider.cluster.watching import Watchers
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.gateway.exposure import check_exposure
from outrider.gateway.ports import ReservedPorts
from outrider.links.address import listen
from outrider.links.secret import SECRET_VARIABLE
from outrider.requirements import need, not_installed
from outrider.stages import stage

if TYPE_CHECKING:
    from outrider.cluster.ray_launch import RayLaunch
    from outrider.cluster.ray_session import RaySession, RaySessions

_RAY_AWAY_S = 24 * 3600  # a lost head is noticed by other means, and waited for


def serve(
    config: EngineConfig,
    watchers: Watchers,
    *,
    use_ray: bool = True,
    gateway_log_level: str | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or SIGHUP unless that is ignored, as nohup has it. No process is
    left when it returns, raises or is killed, and none of these takes longer than `server.drain_s`
    and `END_S`. Gateways log at `log_level` unless told otherwise."""
    if not use_ray or config.cluster.address is None:  # else ranks may all be on other hosts
        need("torch", "transformers", "safetensors", "numpy")
    secret = _secret(config)
    warning = check_exposure(config.server) if config.server.processes else None
    if warning is not None:
        watchers.say(Event(Kind.TROUBLE, warning))
    with contextlib.ExitStack() as stack:
        hear_signals = stack.enter_context(ended_by_signals())
        progress = stack.enter_context(Progress(watchers))
        watchers = progress.watchers
        ports = stack.enter_context(ReservedPorts(config.server))
        config = dataclasses.replace(config, server=ports.config)
        guests = None
        if config.cluster.listen is not None:
            guests = stack.enter_context(_door(config.cluster.listen))
        # What takes longest begins first. Ray itself mostly waits for processes it starts.
        stack.enter_context(kernels_ahead(config))
        deadline = stack.enter_context(Deadline(config.server.drain_s + END_S))
        given_up = threading.Event()
        ray = stack.enter_context(_ray_starting(config, given_up, deadline)) if use_ray else None
        from outrider.cluster.serving import Doors, Serving
        from outrider.engine.preflight import check_models

        # Ranks of a cluster that runs already may all be on other hosts.
        has_weights = not use_ray or config.cluster.address is None
        with stage("checking the models"):
            models = check_models(config, has_weights=has_weights)
        config = models.config
        checked = "model and tokenizer" if models.draft is None else "models and tokenizers"
        secret = (_running_secret(config, ray) if ray is not None else None) or secret
        doors = Doors(ports, secret, guests)
        heard = noted_signals()
        try:
            watchers.say(Event(Kind.STAGE, f"{checked} checked"))
            engine = config.without_secrets()  # of clients, whom no engine meets
            launch: Launch
            if ray is not None:
                launch = _ray_launch(engine, secret, watchers.say, ray, given_up.set)
            else:
                launch = _local_launch(engine, secret)
            log_level = gateway_log_level or config.log_level
            asyncio.run(Serving(config, launch, watchers, deadline, doors, log_level).run(heard))
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            hear_signals()


def _secret(config: EngineConfig) -> str:
    """That every process of the server shares: the environment's, or one made here."""
    given = os.environ.get(SECRET_VARIABLE, "")
    if config.cluster.listen is not None and not given:
        raise ConfigError(
            f"cluster.listen is {config.cluster.listen!r} but {SECRET_VARIABLE} is not set; set it "
            "to the same text for this server and for the gateways that dial in there."
        )
    if config.server.processes == 0 and config.cluster.listen is None:
        raise ConfigError(
            "server.processes is 0 but cluster.listen is not set, so nobody could reach it; set it "
            "to where gateways are to dial in, as 0.0.0.0:50060."
        )
    return given or secrets.token_hex(32)


def _door(place: str) -> socket.socket:
    host, colon, port = place.rpartition(":")
    if not host or not colon or not port.isdecimal():
        raise ConfigError(
            f"cluster.listen is {place!r}; it must be a host and a port, as 0.0.0.0:50060."
        )
    return listen(f"tcp:{place}")


def _local_launch(config: EngineConfig, secret: str) -> Launch:
    from outrider.cluster.host_gpus import num_gpus
    from outrider.cluster.local_launch import LocalLaunch

    return LocalLaunch(config, secret, num_gpus())


@contextlib.contextmanager
def _ray_starting(
    config: EngineConfig, given_up: threading.Event, deadline: Deadline
) -> Iterator[RaySessions]:
    """Ray, which starts while models are checked and gateways start: all take seconds. The last
    session ends with this. One that is `given_up` is not waited for."""
    cluster = config.cluster
    if cluster.address is None:
        # Ray reads these once, when it is imported. It listens on every interface, so only a
        # token keeps other users and hosts out.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    else:
        # Ray's library ends this process when the head was away for so long, 60 s unless set.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_RAY_AWAY_S))
    # Not in the thread: two that import at once take as long as one after the other, and nothing
    # of Ray starts before it is imported.
    try:
        with stage("importing Ray"):
            from outrider.cluster.ray_session import RaySessions
    except ModuleNotFoundError as error:
        said = not_installed(error) or str(error)
        raise ConfigError(f"{said}; or serve on this host alone with --no-ray.") from error
    from outrider.engine.over_ranks import group_sizes

    # Room for one more than there are: replicas are replaced and added while they serve.
    num_ranks = sum(group_sizes(config).values()) * (cluster.replicas + 1)
    sessions = RaySessions(cluster.address, num_ranks, given_up)
    sessions.begin(cluster.ray_timeout_s)
    try:
        yield sessions
    finally:
        deadline.begin()
        sessions.close()


def _running_secret(config: EngineConfig, sessions: RaySessions) -> str | None:
    """That of replicas that an earlier server has left running, unless the environment has one."""
    if config.cluster.address is None or os.environ.get(SECRET_VARIABLE):
        return None
    from outrider.cluster.attach import running_secret
    from outrider.cluster.late_launch import OPEN_S

    try:
        sessions.first(config.cluster.ray_timeout_s + OPEN_S)
    except TimeoutError:
        raise ClusterError("Ray does not let this server in, and does not refuse it.") from None
    return running_secret()


def _ray_launch(
    config: EngineConfig,
    secret: str,
    say: Say,
    sessions: RaySessions,
    give_up: Callable[[], None],
) -> Launch:
    from outrider.cluster.attach import Attaching
    from outrider.cluster.late_launch import LateLaunch
    from outrider.cluster.lease import Driver

    driver = Driver()
    made: RayLaunch | None = None

    async def make(session: RaySession) -> RayLaunch:
        nonlocal made
        take_back_signals()
        say(Event(Kind.STAGE, session.summary))
        last = config if made is None else made.config
        attaching = Attaching(last, session, secret, driver, say)
        made = await attaching.attach(is_first=made is None or not made.has_served)
        return made

    return LateLaunch(sessions.open, make, give_up, first_wait_s=config.cluster.ray_timeout_s)
