"""An engine on this host, started anew whenever it is lost: no Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.spawned_engine import SpawnedEngine, spawned_engine
from outrider.config import EngineConfig
from outrider.engine.launch.backoff import Backoff
from outrider.errors import OutriderError
from outrider.gateway.cluster_view import ClusterView
from outrider.gateway.engine_link import EngineAddress

_Tell: TypeAlias = Callable[[Kind, str], None]


class SpawnedLaunch:
    """See `outrider.cluster.serve.Launch`. `cluster.colocate` is settled."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._address: EngineAddress | None = None
        self._engine: SpawnedEngine | None = None
        self._serving = threading.Event()
        self._stopping = threading.Event()
        self._running: asyncio.Task[None] | None = None

    async def locate(self) -> EngineAddress:
        await asyncio.to_thread(self._serving.wait)
        if self._address is None:
            raise ClusterError("the engine has been stopped.")
        return self._address

    async def view(self) -> ClusterView | None:
        """The engine knows all there is to know about its processes."""
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
        if self._engine is not None:
            self._engine.stop()
        if self._running is not None:
            await asyncio.wait({self._running})
        self._address = None
        self._serving.set()  # whoever waits for an engine waits in vain

    def abort(self) -> None:
        """Nothing is to be done: child processes end with the one that started them."""

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
        engine = self._engine = spawned_engine(self._config)
        try:
            if self._stopping.is_set():  # before there was an engine to be told
                return
            engine.start(lambda line: tell(Kind.STAGE, line))
            self._address = EngineAddress(engine.address, engine.secret)
            backoff.started()
            self._serving.set()
            engine.run()
        finally:
            engine.close()


def _quote(error: OutriderError, tell: _Tell) -> str:
    """The first line is the reason; what follows are a process's own words."""
    reason, *lines = str(error).splitlines()
    for line in lines:
        tell(Kind.LOG, line)
    return reason.rstrip(":.")
