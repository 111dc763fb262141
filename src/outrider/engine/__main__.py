"""`python -m outrider.engine`: an engine alone, for ranks and gateways that somebody else starts.

Listens, waits until all ranks of the configuration have dialled in, then serves gateways. A draft
that is lost may dial in again; a lost target ends the engine. With cluster.colocate=true it holds
the models itself and waits for nobody.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.config import EngineConfig
from outrider.config.sources import read_assignments, resolve
from outrider.engine.doorway import Doorway
from outrider.engine.launch.child import Starter
from outrider.engine.over_ranks import group_sizes
from outrider.engine.served import build_served
from outrider.engine.service import EngineService
from outrider.errors import OutriderError
from outrider.links.secret import secret_from_environment
from outrider.logs import setup_logging

logger = logging.getLogger("outrider.engine")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.engine", description=__doc__)
    parser.add_argument("--listen", action="append", required=True, metavar="ADDRESS")
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument(
        "--starter-fd",
        type=int,
        metavar="N",
        help="socket to the starting process: it is told how the start goes, and ends this one",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    starter = None
    if given.starter_fd is not None:
        starter = Starter(given.starter_fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the starter's to answer
    try:
        config = resolve(given.config, os.environ, read_assignments(given.set)).config
        setup_logging(config.log_level, role="engine")
        _serve(config, given.listen, starter)
    except KeyboardInterrupt:
        sys.exit(130)
    except OutriderError as error:
        if starter is not None:
            starter.tell_failure(str(error))
        sys.exit(f"error: {error}")


def _serve(config: EngineConfig, addresses: Sequence[str], starter: Starter | None) -> None:
    def report(line: str) -> None:
        logger.info("%s", line)
        if starter is not None:
            starter.tell_stage(line)

    doorway = Doorway(addresses, secret_from_environment(), group_sizes(config))
    awaited = group_sizes(config) or "gateways"
    logger.info("listening on %s for %s", ", ".join(doorway.addresses), awaited)
    engine = build_served(
        config,
        doorway,
        report,
        on_draft_lost=lambda reason: logger.warning("start the draft anew: %s", reason),
        raise_if_dead=lambda: None,
    )
    service = EngineService(engine, doorway)
    logger.info("ready for gateways")
    if starter is not None:
        starter.tell_ready()
    try:
        service.run()
    finally:
        service.close()
        engine.close()


if __name__ == "__main__":
    main()
