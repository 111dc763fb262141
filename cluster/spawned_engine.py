"""One life of an engine on this host, without Ray."""

from __future__ import annotations

import threading
from typing import Protocol

from outrider.cluster.errors import ClusterError
from outrider.config import EngineConfig
from outrider.engine.doorway import Doorway
from outrider.engine.launch.child import EngineChild
from outrider.engine.launch.ranks import SpawnedRanks
from outrider.engine.over_ranks import RemoteEngine, group_sizes
from outrider.engine.rank_group import RankError, Report
from outrider.engine.service import EngineService
from outrider.links.rank_messages import DRAFT


class SpawnedEngine(Protocol):
    """`start`, then `run`, and `close` in any case, all on one thread."""

    address: str
    secret: str

    def start(self, report: Report) -> None:
        """Until it takes gateways. Raises what went wrong."""

    def run(self) -> None:
        """Until `stop`, or until it is lost, which raises."""

    def stop(self) -> None:
        """From any thread: end `start` or `run`."""

    def close(self) -> None:
        """Leave no process behind."""


def spawned_engine(config: EngineConfig) -> SpawnedEngine:
    """A process with both models, or a thread of this one whose ranks are processes."""
    return EngineChild(config) if config.cluster.colocate else EngineOverRanks(config)


class EngineOverRanks:
    """An engine in the calling thread; target and draft are child processes. The draft is minded by
    `SpawnedRanks`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ranks = SpawnedRanks(group_sizes(config), config.target.device)
        self.address = self._ranks.address
        self.secret = self._ranks.secret
        self._doorway = Doorway([self.address], self.secret, group_sizes(config))
        self._engine: RemoteEngine | None = None
        self._service: EngineService | None = None
        self._stopping = threading.Event()

    def start(self, report: Report) -> None:
        ranks = self._ranks
        ranks.start()
        try:
            self._engine = RemoteEngine(
                self._config,
                self._doorway,
                report=report,
                on_draft_lost=lambda _: ranks.kill(DRAFT),
                raise_if_dead=self._raise_if_dead,
            )
        except RankError as error:
            ranks.raise_if_dead(error)
            raise
        ranks.restart_drafts()
        self._service = EngineService(self._engine, self._doorway)

    def run(self) -> None:
        assert self._engine is not None and self._service is not None
        try:
            try:
                if not self._stopping.is_set():
                    self._service.run()
            finally:
                self._service.close()
                self._engine.close()
        except RankError as error:
            self._ranks.raise_if_dead(error)
            raise

    def stop(self) -> None:
        self._stopping.set()
        if self._service is not None:
            self._service.stop()

    def close(self) -> None:
        self._doorway.close()
        self._ranks.close()

    def _raise_if_dead(self) -> None:
        if self._stopping.is_set():
            raise ClusterError("the engine was stopped while it started.")
        self._ranks.raise_if_dead()
