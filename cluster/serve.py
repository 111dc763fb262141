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
from collections.abc import Callable, Iterator

from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.progress import Progress
from outrider.cluster.serving import END_S, Deadline, Launch, Serving, Watchers
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.gateway.exposure import check_exposure
from outrider.gateway.ports import ReservedPorts


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
    warning = check_exposure(config.server)
    if warning is not None:
        watchers.say(Event(Kind.TROUBLE, warning))
    with contextlib.ExitStack() as stack:
        hear_signals = stack.enter_context(_ended_by_signals())
        progress = stack.enter_context(Progress(watchers))
        watchers = progress.watchers
        ports = stack.enter_context(ReservedPorts(config.server))
        config = dataclasses.replace(config, server=ports.config)
        from outrider.engine.preflight import check_models  # torch, slower than all checks so far

        models = check_models(config)
        checked = "model and tokenizer" if models.draft is None else "models and tokenizers"
        watchers.say(Event(Kind.STAGE, f"{checked} checked"))
        deadline = stack.enter_context(Deadline(config.server.drain_s + END_S))
        engine = config.without_secrets()  # of clients, whom no engine meets
        launch = _ray_launch(engine, watchers.say, stack) if use_ray else _local_launch(engine)
        log_level = gateway_log_level or config.log_level
        config = dataclasses.replace(config, log_level=log_level)
        try:
            asyncio.run(Serving(config, launch, watchers, deadline, ports).run())
        finally:
            hear_signals()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Where there is no event loop to hear them, signals end the process as an error would: what
    was begun is undone. To be called again when a loop has let go of them."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # as shells report it

    def hear() -> None:
        for number in numbers:
            signal.signal(number, end)

    before = {number: signal.getsignal(number) for number in numbers}
    hear()
    try:
        yield hear
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
