"""An engine on this host, in a process of its own, started anew whenever it is lost: no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, Kind, Say
from outrider.config import EngineConfig
from outrider.engine.launch.child import EngineChild
from outrider.engine.launch.restarts import Restarts, engine_back, engine_lost
from outrider.engine.rank_group import Report
from outrider.errors import OutriderError
from outrider.gateway.engine_link import EngineAddress
from outrider.links.cluster_view import ClusterView


class LocalLaunch:
    """See `outrider.cluster.serving.Launch`. `cluster.colocate` is settled."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._secret = secrets.token_hex(32)  # tokens of clients hold across restarts
        self._address: EngineAddress | None = None
        self._engine: EngineChild | None = None
        self._located = asyncio.Event()  # where it is, or that it is nowhere any more
        self._stopping = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def locate(self) -> EngineAddress:
        await self._located.wait()
        if self._address is None:
            raise ClusterError("the engine has been stopped.")
        return self._address

    async def view(self) -> ClusterView | None:
        """The engine knows all there is to know about its processes."""
        return None

    async def keep(self, say: Say) -> None:
        """Until `stop`; raises if it never came to run."""
        self._keeping = asyncio.create_task(self._keep(say))
        await asyncio.shield(self._keeping)

    async def stop(self) -> None:
        self._stopping.set()
        if self._engine is not None:
            self._engine.stop()
        if self._keeping is not None:
            await asyncio.wait({self._keeping})  # a child that does not end is killed
        self._located.set()  # whoever waits for an engine waits in vain

    def abort(self) -> None:
        if self._engine is not None:
            self._engine.kill()

    async def _keep(self, say: Say) -> None:
        restarts = Restarts()
        while not self._stopping.is_set():
            try:
                await self._serve(say, restarts)
            except OutriderError as error:
                if self._stopping.is_set():
                    return
                reason = _quote(error, say)
                if restarts.is_first:
                    raise ClusterError(reason) from error
                pause_s = restarts.lost()
                say(Event(Kind.TROUBLE, engine_lost(reason, pause_s)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
            finally:
                self._located.clear()
                self._address = None

    async def _serve(self, say: Say, restarts: Restarts) -> None:
        engine = self._engine = EngineChild(self._config, self._secret)
        report = _report_to(say)
        try:
            await asyncio.to_thread(engine.start, report)
            self._address = EngineAddress(engine.address, engine.secret)
            is_first, away_s = restarts.is_first, restarts.runs()
            if not is_first:
                say(Event(Kind.REPAIR, engine_back(away_s, {"engine": [engine.pid]})))
            self._located.set()
            await asyncio.to_thread(engine.run, report)
        finally:
            await asyncio.to_thread(engine.close)


def _report_to(say: Say) -> Report:
    """For a thread that has lines to tell."""
    loop = asyncio.get_running_loop()

    def report(line: str) -> None:
        loop.call_soon_threadsafe(say, Event(Kind.STAGE, line))

    return report


def _quote(error: OutriderError, say: Say) -> str:
    """The first line is the reason; what follows are a process's own words."""
    reason, *lines = str(error).splitlines()
    for line in lines:
        say(Event(Kind.LOG, line))
    return reason.rstrip(":.")
