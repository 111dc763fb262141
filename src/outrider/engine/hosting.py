"""An engine as a process hosts it: the door is opened, the engine built, gateways are served."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.engine.doorway import Doorway
from outrider.engine.over_ranks import group_sizes
from outrider.engine.rank_group import RankError, Report
from outrider.engine.served import ServedEngine, build_served
from outrider.engine.service import EngineService
from outrider.errors import OutriderError
from outrider.links.gateway_messages import EngineStatus
from outrider.links.rank_messages import DRAFT

if TYPE_CHECKING:
    from outrider.engine.launch.ranks import SpawnedRanks  # torch, which not every host needs

logger = logging.getLogger(__name__)


class EngineStoppedError(OutriderError):
    """It was told to stop before it came to run."""


class EngineHost:
    """One life of an engine. Listens from the beginning; `start`, `run`, and `close` in any case,
    all on one thread.

    `ranks` are those this process keeps itself; without them somebody else starts ranks, and
    starts a lost draft anew.
    """

    def __init__(
        self,
        config: EngineConfig,
        addresses: Sequence[str],
        secret: str,
        ranks: SpawnedRanks | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._engine: ServedEngine | None = None
        self._service: EngineService | None = None
        self._stopping = threading.Event()
        self._doorway = Doorway(addresses, secret, group_sizes(config))
        self.addresses = self._doorway.addresses

    def start(self, report: Report) -> None:
        """Until it takes gateways. Raises what went wrong."""
        if self._ranks is not None:
            self._ranks.start()
        with self._ranks_blamed():
            engine = build_served(
                self._config,
                self._doorway,
                report,
                on_draft_lost=lambda reason: self._on_draft_lost(reason, report),
                raise_if_dead=self._raise_if_dead,
            )
        if self._ranks is not None:
            self._ranks.restart_drafts()
        self._service = EngineService(engine, self._doorway)
        self._engine = engine

    def run(self) -> None:
        """Until `stop`, or until it is lost, which raises."""
        assert self._service is not None
        with self._ranks_blamed():
            if not self._stopping.is_set():
                self._service.run()

    def stop(self) -> None:
        """From any thread: end `run` after the step under way, or `start` while ranks are
        awaited."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()

    def close(self) -> None:
        """Hang up on gateways and ranks, and leave no rank of its own behind."""
        with ExitStack() as stack:  # the last is closed first
            for part in (self._ranks, self._doorway, self._engine, self._service):
                if part is not None:
                    stack.callback(part.close)

    def status(self) -> EngineStatus | None:
        """None before it takes gateways."""
        return None if self._engine is None else self._engine.status()

    @contextmanager
    def _ranks_blamed(self) -> Iterator[None]:
        """A rank's own last lines say more than that the engine misses it."""
        try:
            yield
        except RankError as error:
            if self._ranks is not None:
                self._ranks.raise_if_dead(error)
            raise

    def _on_draft_lost(self, reason: str, report: Report) -> None:
        if self._ranks is None:
            logger.warning("the draft is lost and must be started anew: %s", reason)
            return
        report(f"draft lost, decoding goes on without it: {reason}")
        self._ranks.kill(DRAFT)

    def _raise_if_dead(self) -> None:
        if self._stopping.is_set():
            raise EngineStoppedError("the engine was stopped while it started.")
        if self._ranks is not None:
            self._ranks.raise_if_dead()
