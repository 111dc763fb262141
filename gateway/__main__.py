"""`python -m outrider.gateway`: HTTP and gRPC before an engine at a fixed address, or before the
one that a keeper knows of."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time

import uvloop

from outrider.config import EngineConfig, ServerConfig
from outrider.config.sources import read_assignments, resolve
from outrider.errors import OutriderError
from outrider.gateway.engine_link import EngineAddress
from outrider.gateway.front import Front
from outrider.gateway.keeper_link import KeeperLink
from outrider.gateway.metrics_page import FOLDER_VARIABLE
from outrider.links.address import UnixAddress, parse
from outrider.links.frames import LinkError
from outrider.links.secret import secret_from_environment
from outrider.logs import LEVELS, setup_logging

_POLL_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.gateway", description=__doc__)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--engine", help="unix:/path or tcp:host:port")
    place.add_argument("--keeper", help="likewise; it says all the rest")
    parser.add_argument("--index", type=int, default=0, help="which gateway of the keeper's it is")
    parser.add_argument("--config", help="configuration file (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument(
        "--engine-away-s",
        type=float,
        help="seconds that streams wait for a lost engine; as long as its settings allow a restart "
        "to take if not given",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    given = parser.parse_args()
    setup_logging(given.log_level, role="gateway", rank=given.index)
    try:
        secret = secret_from_environment()
        if given.keeper is not None:
            serving = _serve_for(given.keeper, secret, given.index)
        else:
            config = resolve(given.config, os.environ, read_assignments(given.set)).config
            engine = EngineAddress(given.engine, secret)
            serving = _serve(engine, config.server, given.engine_away_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serving)
    except OutriderError as error:
        sys.exit(f"error: {error}")


# -- by hand ----------------------------------------------------------------------------------


async def _serve(engine: EngineAddress, config: ServerConfig, engine_away_s: float | None) -> None:
    async def locate() -> EngineAddress:
        return engine

    front = Front(locate, config, resubmit_timeout_s=engine_away_s)
    signals = _Signals()
    await front.start()
    print(f"listening on {front.http_address} (HTTP) and {front.grpc_address}", flush=True)
    await signals.next()
    await _stop(front, config.drain_s, signals)


# -- for a keeper -----------------------------------------------------------------------------


async def _serve_for(address: str, secret: str, index: int) -> None:
    keeper = await KeeperLink.open(address, secret, index)
    config = EngineConfig.from_settings(keeper.welcome.settings)
    is_json = config.log_format == "json"
    setup_logging(config.log_level, role="gateway", rank=index, json_lines=is_json)
    front = Front(keeper.locate, config.server, keeper.view, broadcast=keeper, shares_ports=True)
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
    while len(gateway.in_hand) and gateway.link.connected and time.monotonic() < deadline_s:
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


if __name__ == "__main__":
    main()
