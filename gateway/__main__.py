"""`python -m outrider.gateway`: the gRPC server before an engine at a fixed address."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from outrider.errors import OutriderError
from outrider.gateway.engine_link import EngineAddress
from outrider.gateway.server import DEFAULT_ADDRESS, GrpcServer, ServerOptions
from outrider.links.secret import secret_from_environment
from outrider.logs import LEVELS, setup_logging


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.gateway", description=__doc__)
    parser.add_argument("--engine", required=True, help="unix:/path or tcp:host:port")
    parser.add_argument("--listen", default=DEFAULT_ADDRESS, help="host:port; port 0 takes any")
    parser.add_argument("--served-name", help="what clients call the model")
    parser.add_argument("--drain-s", type=float, default=ServerOptions().drain_s)
    parser.add_argument(
        "--engine-away-s",
        type=float,
        help="seconds that streams wait for a lost engine; as long as its settings allow a restart "
        "to take if not given",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    given = parser.parse_args()
    setup_logging(given.log_level, role="gateway")
    options = ServerOptions(
        address=given.listen,
        served_name=given.served_name,
        resubmit_timeout_s=given.engine_away_s,
        drain_s=given.drain_s,
    )
    try:
        asyncio.run(_serve(EngineAddress(given.engine, secret_from_environment()), options))
    except OutriderError as error:
        sys.exit(f"error: {error}")


async def _serve(engine: EngineAddress, options: ServerOptions) -> None:
    async def locate() -> EngineAddress:
        return engine

    server = GrpcServer(locate, options)
    await server.start()
    print(f"listening on {server.address}", flush=True)
    await run_until_signalled(server)


async def run_until_signalled(server: GrpcServer) -> None:
    """The first SIGTERM or SIGINT drains, the second ends at once."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    await signalled.wait()
    signalled.clear()
    stopping = asyncio.create_task(server.stop())
    again = asyncio.create_task(signalled.wait())
    await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await server.stop(drain_s=0.0)
    await stopping
    again.cancel()


if __name__ == "__main__":
    main()
