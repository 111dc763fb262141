"""`python -m outrider.engine`: a standalone engine, for ranks and gateways started elsewhere.

Listens, waits until all ranks of the configuration are connected, then serves gateways. A lost
draft may reconnect; a lost target ends the engine. With --spawn-ranks it starts the ranks itself;
with cluster.colocate=true it loads the models itself and needs no ranks.
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
from outrider.engine.hosting import EngineHost
from outrider.engine.launch.child import ParentLink
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.over_ranks import group_sizes
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
        "--spawn-ranks",
        type=Path,
        metavar="FOLDER",
        help="start the ranks as processes of this one, their logs and socket in FOLDER",
    )
    parser.add_argument(
        "--starter-fd",
        type=int,
        metavar="N",
        help="socket to the parent process, which gets the start's progress and ends this process",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="with --starter-fd: load no model before the parent process says so",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    parent = None
    if given.starter_fd is not None:
        parent = ParentLink(given.starter_fd, given.spawn_ranks)
        for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal: the parent handles them
            signal.signal(number, signal.SIG_IGN)
    try:
        config = resolve(given.config, os.environ, read_assignments(given.set)).config
        setup_logging(config.log_level, role="engine", json_lines=config.log_format == "json")
        _serve(config, given.listen, given.spawn_ranks, parent, is_standby=given.standby)
    except KeyboardInterrupt:
        sys.exit(130)
    except OutriderError as error:
        if parent is not None:
            parent.report_failure(str(error))
        sys.exit(f"error: {error}")
    finally:
        if parent is not None:
            parent.clean_up()


def _serve(
    config: EngineConfig,
    addresses: Sequence[str],
    ranks_in: Path | None,
    parent: ParentLink | None,
    *,
    is_standby: bool,
) -> None:
    def report(line: str) -> None:
        logger.info("%s", line)
        if parent is not None:
            parent.report_stage(line)

    secret = secret_from_environment()
    ranks, num_addresses = None, len(addresses)
    if ranks_in is not None and group_sizes(config):
        ranks = SpawnedRanks(group_sizes(config), config.target.device, secret, ranks_in)
        addresses = [*addresses, ranks.address]
    host = EngineHost(config, addresses, secret, ranks, is_checked=parent is not None)
    awaited = group_sizes(config) or "gateways"
    logger.info("listening on %s for %s", ", ".join(host.addresses), awaited)
    try:
        host.start(report, parent.wait_go if parent is not None and is_standby else None)
        logger.info("ready for gateways")
        if parent is not None:
            parent.report_ready(host.stop, host.addresses[:num_addresses])
        host.run()
    finally:
        host.close()


if __name__ == "__main__":
    main()
