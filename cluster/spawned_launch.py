"""An engine in a thread of this process, its ranks as child processes: one host, no Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from outrider.cluster.errors import ClusterError
from outrider.cluster.journal import Event, Kind, Say
from outrider.config import EngineConfig
from outrider.engine.backoff import Backoff
from outrider.engine.doorway import Doorway
from outrider.engine.rank_group import RankError
from outrider.engine.remote_build import RemoteEngine, group_sizes
from outrider.engine.service import EngineService
from outrider.engine.spawn import SpawnedRanks
from outrider.errors import OutriderError
from outrider.gateway.cluster_view import ClusterView
from outrider.gateway.engine_link import EngineAddress
from outrider.workers.links.messages import DRAFT

_Tell: TypeAlias = Callable[[Kind, str], None]


class SpawnedLaunch:
    """Starts engine and ranks anew when the target is lost; the draft is minded by
    `SpawnedRanks`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._address: EngineAddress | None = None
        self._service: EngineService | None = None
        self._serving = threading.Event()
        self._stopping = threading.Event()
        self._running: asyncio.Task[None] | None = None

    async def locate(self) -> EngineAddress:
        await asyncio.to_thread(self._serving.wait)
        if self._address is None:
            raise ClusterError("the engine has been stopped.")
        return self._address

    async def view(self) -> ClusterView | None:
        """The engine knows all there is to know about its ranks."""
        return None

    async def keep(self, say: Say) -> None:
        """Until `stop`; raises if it never came to run."""
        loop = asyncio.get_running_loop()

        def tell(kind: Kind, text: str) -> None:
            loop.call_soon_threadsafe(say, Event(kind, text))

        self._running = asyncio.create_task(asyncio.to_thread(self._run, tell))
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        self._stopping.set()
        if self._service is not None:
            self._service.stop()
        if self._running is not None:
            await asyncio.wait({self._running})
        self._address = None
        self._serving.set()  # whoever waits for an engine waits in vain

    def abort(self) -> None:
        """Nothing is to be done: ranks end with the process that started them."""

    # -- on a thread of its own -----------------------------------------------------------------

    def _run(self, tell: _Tell) -> None:
        backoff = Backoff(time.monotonic)
        has_served = False
        while not self._stopping.is_set():
            try:
                self._serve(tell, backoff)
            except OutriderError as error:
                if self._stopping.is_set():
                    return
                has_served = has_served or self._address is not None
                reason = _quote(error, tell)
                if not has_served:
                    raise ClusterError(reason) from error
                pause_s = backoff.next_pause_s()
                tell(Kind.TROUBLE, f"{reason}; all is started anew in {pause_s:g} s")
                self._stopping.wait(pause_s)
            finally:
                self._serving.clear()
                self._address = None

    def _serve(self, tell: _Tell, backoff: Backoff) -> None:
        ranks = SpawnedRanks(group_sizes(self._config), self._config.target.device)
        try:
            doorway = Doorway([ranks.address], ranks.secret, group_sizes(self._config))
            try:
                ranks.start()
                engine = self._build(ranks, doorway, tell)
                ranks.restart_drafts()
                self._address = EngineAddress(ranks.address, ranks.secret)
                backoff.started()
                self._step(engine, doorway)
            except RankError as error:
                ranks.raise_if_dead(error)
                raise
            finally:
                doorway.close()
        finally:
            ranks.close()

    def _build(self, ranks: SpawnedRanks, doorway: Doorway, tell: _Tell) -> RemoteEngine:
        def raise_if_dead() -> None:
            if self._stopping.is_set():
                raise ClusterError("the engine was stopped while it started.")
            ranks.raise_if_dead()

        return RemoteEngine(
            self._config,
            doorway,
            report=lambda line: tell(Kind.STAGE, line),
            on_draft_lost=lambda _: ranks.kill(DRAFT),
            raise_if_dead=raise_if_dead,
        )

    def _step(self, engine: RemoteEngine, doorway: Doorway) -> None:
        """Until `stop`, or until the target is lost."""
        service = self._service = EngineService(engine, doorway)
        self._serving.set()
        try:
            if not self._stopping.is_set():
                service.run()
        finally:
            service.close()
            engine.close()


def _quote(error: OutriderError, tell: _Tell) -> str:
    """The first line is the reason; what follows are a rank's own words."""
    reason, *lines = str(error).splitlines()
    for line in lines:
        tell(Kind.LOG, line)
    return reason.rstrip(":.")
