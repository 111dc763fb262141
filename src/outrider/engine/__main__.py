"""`python -m outrider.engine`: an engine alone, for ranks and gateways that somebody else starts.

Listens, waits until all ranks of the configuration have dialled in, then serves gateways. A draft
that is lost may dial in again; a lost target ends the engine.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from outrider.config_sources import read_assignments, resolve
from outrider.engine.doorway import Doorway
from outrider.engine.remote_build import RemoteEngine, group_sizes
from outrider.engine.service import EngineService
from outrider.errors import OutriderError
from outrider.logs import setup_logging
from outrider.workers.links.secret import secret_from_environment

logger = logging.getLogger("outrider.engine")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.engine", description=__doc__)
    parser.add_argument("--listen", action="append", required=True, metavar="ADDRESS")
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        config = resolve(given.config, os.environ, read_assignments(given.set)).config
        setup_logging(config.log_level, role="engine")
        doorway = Doorway(given.listen, secret_from_environment(), group_sizes(config))
        logger.info("listening on %s for %s", ", ".join(doorway.addresses), group_sizes(config))
        engine = RemoteEngine(
            config,
            doorway,
            report=logger.info,
            on_draft_lost=lambda reason: logger.warning("start the draft anew: %s", reason),
            raise_if_dead=lambda: None,
        )
        service = EngineService(engine, doorway)
        logger.info("ready for gateways")
        try:
            service.run()
        finally:
            service.close()
            engine.close()
    except KeyboardInterrupt:
        sys.exit(130)
    except OutriderError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
