"""One replica on this host: an engine as a child process, which starts its own ranks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.probe import probe
from outrider.cluster.tasks import in_own_thread
from outrider.config import EngineConfig
from outrider.engine.launch.child import EngineLine
from outrider.engine.rank_group import Report
from outrider.errors import OutriderError
from outrider.gateway.engine_link import EngineAddress, EngineLink
from outrider.gateway.errors import UnavailableError
from outrider.links.cluster_view import ProcessView
from outrider.links.gateway_messages import EngineFacts, EngineStatus, ProcessState

_STATUS_S = 0.5  # between questions to the engine
_ENGINE = "engine"


@dataclass(frozen=True, slots=True, eq=False)
class LocalRoom:
    """For one replica: GPUs of this host for it alone, None is whatever it finds; and its engines,
    the next one waiting beside the present."""

    gpu_ids: tuple[str, ...] | None
    engines: EngineLine


def local_room(
    config: EngineConfig, secret: str, gpu_ids: tuple[str, ...] | None = None
) -> LocalRoom:
    listen = config.cluster.listen
    # Gateways elsewhere reach its host at the address at which they reach this process.
    tcp = None if listen is None else f"tcp:{listen.rpartition(':')[0]}:0"
    return LocalRoom(gpu_ids, EngineLine(config, secret, listen=tcp, gpu_ids=gpu_ids))


class LocalLife:
    """See `outrider.cluster.kept_replica.Life`."""

    def __init__(self, room: LocalRoom, say: Say) -> None:
        self._engines = room.engines
        self._engine = room.engines.take()
        self._say = say
        self._link = EngineLink(self._locate, _accept, _take_note)
        self._link.is_draining = True  # that it is lost is told by whoever keeps it
        self._threads: list[asyncio.Future[None]] = []
        self._asking: asyncio.Task[None] | None = None
        self._status: EngineStatus | None = None
        self._is_over = False

    # -- what is known ------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._engine.addresses

    @property
    def load(self) -> int | None:
        return None if self._status is None else self._status.running + self._status.waiting

    @property
    def pids(self) -> Mapping[str, Sequence[int]]:
        return {_ENGINE: [self._engine.pid]}

    @property
    def draft_restarts(self) -> int:
        return 0 if self._status is None else self._status.draft_losses

    @property
    def is_ready(self) -> bool:
        """It has loaded its models, and serves."""
        return self._asking is not None and not self._is_over

    def processes(self, restarts: int) -> list[ProcessView]:
        host, status = socket.gethostname(), self._status
        state = ProcessState.STARTING if self._asking is None else ProcessState.READY
        found = [ProcessView(_ENGINE, 0, self._engine.pid, host, (), restarts, state)]
        for rank in () if status is None else status.ranks:
            own = restarts + (self.draft_restarts if rank.role == "draft" else 0)
            found.append(
                ProcessView(rank.role, rank.rank, rank.pid, rank.host, (), own, rank.state)
            )
        return found

    # -- its life -----------------------------------------------------------------------------

    async def start(self) -> None:
        report = self._reporter()
        await self._in_thread(self._engine.start, report)
        self._engines.prepare()
        self._asking = asyncio.create_task(self._keep_status())

    async def probe(self, timeout_s: float) -> None:
        await probe(self._engine.addresses[0], self._engine.secret, timeout_s)

    async def watch(self) -> str:
        try:
            await self._in_thread(self._engine.run, self._reporter())
        except OutriderError as error:
            return _quote(error, self._say)
        return "the engine has ended"

    async def end(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._engine.stop()
        if self._threads:
            # A child that does not end is killed. Why it ended is told to whoever watches.
            await asyncio.gather(*self._threads, return_exceptions=True)
        await asyncio.to_thread(self._engine.close)
        self._is_over = True

    @property
    def is_over(self) -> bool:
        """Nothing of it is left."""
        return self._is_over

    def kill(self) -> None:
        self._engine.kill()

    def can_change_draft(self, config: EngineConfig) -> bool:
        return False  # the engine has started its ranks, and knows no others

    async def change_draft(self, config: EngineConfig) -> None:
        raise ClusterError("a draft on this host changes with its engine only.")

    async def _in_thread(self, work: Callable[[Report], None], report: Report) -> None:
        done = in_own_thread(lambda: work(report), "engine watch")
        self._threads.append(done)
        try:
            await asyncio.shield(done)
        except OutriderError as error:
            raise ClusterError(_quote(error, self._say)) from error

    def _reporter(self) -> Report:
        """For a thread that has lines to tell."""
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            loop.call_soon_threadsafe(self._say, Event(Kind.STAGE, line))

        return report

    # -- how it is ----------------------------------------------------------------------------

    async def _locate(self) -> EngineAddress:
        return EngineAddress(self._engine.addresses[0], self._engine.secret)

    async def _keep_status(self) -> None:
        linking = asyncio.create_task(self._link.run())
        try:
            while True:
                try:
                    self._status = await self._link.status()
                except UnavailableError:
                    self._status = None
                await asyncio.sleep(_STATUS_S)
        finally:
            linking.cancel()


async def _accept(facts: EngineFacts) -> None:
    """Whatever the engine is."""


async def _take_note() -> None:
    """It is asked how it is all the time."""


def _quote(error: OutriderError, say: Say) -> str:
    """The first line is the reason; what follows are a process's own words."""
    reason, *lines = str(error).splitlines()
    for line in lines:
        say(Event(Kind.LOG, line))
    return reason.rstrip(":.")
