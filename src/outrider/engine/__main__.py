"""`python -m outrider.engine`: an engine alone, for ranks and gateways that somebody else starts.

Listens, waits until all ranks of the configuration have dialled in, then serves gateways. A draft
that is lost may dial in again; a lost target ends the engine. With --spawn-ranks it starts the
ranks itself; with cluster.colocate=true it holds the models and waits for nobody.
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
from outrider.engine.launch.child import Starter
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
        help="socket to the starting process: it is told how the start goes, and ends this one",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="with --starter-fd: load no model before the starting process says so",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    starter = None
    if given.starter_fd is not None:
        starter = Starter(given.starter_fd, given.spawn_ranks)
        for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's are the starter's to answer
            signal.signal(number, signal.SIG_IGN)
    try:
        config = resolve(given.config, os.environ, read_assignments(given.set)).config
        setup_logging(config.log_level, role="engine", json_lines=config.log_format == "json")
        _serve(config, given.listen, given.spawn_ranks, starter, is_standby=given.standby)
    except KeyboardInterrupt:
        sys.exit(130)
    except OutriderError as error:
        if starter is not None:
            starter.tell_failure(str(error))
        sys.exit(f"error: {error}")
    finally:
        if starter is not None:
            starter.clean_up()


def _serve(
    config: EngineConfig,
    addresses: Sequence[str],
    ranks_in: Path | None,
    starter: Starter | None,
    *,
    is_standby: bool,
) -> None:
    def report(line: str) -> None:
        logger.info("%s", line)
        if starter is not None:
            starter.tell_stage(line)

    secret = secret_from_environment()
    ranks, num_addresses = None, len(addresses)
    if ranks_in is not None and group_sizes(config):
        ranks = SpawnedRanks(group_sizes(config), config.target.device, secret, ranks_in)
        addresses = [*addresses, ranks.address]
    host = EngineHost(config, addresses, secret, ranks, is_checked=starter is not None)
    awaited = group_sizes(config) or "gateways"
    logger.info("listening on %s for %s", ", ".join(host.addresses), awaited)
    try:
        host.start(report, starter.wait_go if starter is not None and is_standby else None)
        logger.info("ready for gateways")
        if starter is not None:
            starter.tell_ready(host.stop, host.addresses[:num_addresses])
        host.run()
    finally:
        host.close()


if __name__ == "__main__":
    main()
