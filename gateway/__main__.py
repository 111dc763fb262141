"""`python -m outrider.gateway`: HTTP and gRPC for one engine at a fixed address, for the replicas
of controllers, or started by a controller. `outrider gateway` has the first two."""

from __future__ import annotations

import argparse
import os
import sys

from outrider.config.sources import read_assignments, resolve
from outrider.errors import OutriderError
from outrider.gateway.entrypoints import run, serve, serve_for
from outrider.log_stream import guard_stderr
from outrider.logs import LEVELS, setup_logging


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.gateway", description=__doc__)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--engine", help="unix:/path or tcp:host:port")
    place.add_argument("--controllers", help="host:port, with commas between several")
    place.add_argument("--keeper", help="as --engine; the settings come from it")
    parser.add_argument(
        "--index", type=int, default=0, help="number of this gateway at its controller"
    )
    parser.add_argument("--config", help="configuration file (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument(
        "--engine-away-s",
        type=float,
        help="seconds that streams wait for a lost engine; default: the engine's restart timeout",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    given = parser.parse_args()
    guard_stderr()
    setup_logging(given.log_level, role="gateway", rank=given.index)
    try:
        if given.keeper is not None:
            run(serve_for(given.keeper, given.index))
            return
        assignments = list(given.set)
        if given.controllers is not None:
            assignments.append(f"server.controllers={given.controllers}")
        config = resolve(given.config, os.environ, read_assignments(assignments)).config
        run(serve(config.server, given.engine, given.engine_away_s))
    except OutriderError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
