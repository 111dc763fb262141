"""One replica on this host: an engine child process, which starts its own ranks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.api_types.errors import UnavailableError
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.probe import probe
from outrider.cluster.tasks import in_own_thread
from outrider.config import EngineConfig
from outrider.engine.launch.child import StandbyEngines
from outrider.engine.rank_group import Report
from outrider.errors import OutriderError
from outrider.gateway.routing.engine_link import EngineAddress, EngineLink
from outrider.links.cluster_view import ProcessView
from outrider.links.gateway_messages import EngineFacts, EngineStatus, ProcessState

_STATUS_S = 0.5  # between polls of the engine's status
_ENGINE = "engine"


@dataclass(frozen=True, slots=True, eq=False)
class LocalAllocation:
    """The resources of one replica: GPUs of its own (None: whatever it finds), and its engines, of
    which the next waits on standby."""

    gpu_ids: tuple[str, ...] | None
    engines: StandbyEngines


def local_allocation(
    config: EngineConfig, secret: str, gpu_ids: tuple[str, ...] | None = None
) -> LocalAllocation:
    listen = config.cluster.listen
    # Remote gateways reach the engine at the host address of this process.
    tcp = None if listen is None else f"tcp:{listen.rpartition(':')[0]}:0"
    return LocalAllocation(gpu_ids, StandbyEngines(config, secret, listen=tcp, gpu_ids=gpu_ids))


class LocalReplica:
    """See `outrider.cluster.supervised_replica.ReplicaHandle`."""

    def __init__(self, allocation: LocalAllocation, say: Say) -> None:
        self._engines = allocation.engines
        self._engine = allocation.engines.take()
        self._say = say
        self._link = EngineLink(self._locate, _accept, _take_note)
        self._link.is_draining = True  # its supervisor reports losses
        self._threads: list[asyncio.Future[None]] = []
        self._asking: asyncio.Task[None] | None = None
        self._status: EngineStatus | None = None
        self._is_over = False

    # -- state --------------------------------------------------------------------------------

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
        """Whether it has loaded its models and serves."""
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

    # -- lifecycle ----------------------------------------------------------------------------

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
            # A child that does not end is killed. `watch` returns why it ended.
            await asyncio.gather(*self._threads, return_exceptions=True)
        await asyncio.to_thread(self._engine.close)
        self._is_over = True

    @property
    def is_over(self) -> bool:
        """Whether all its processes have ended."""
        return self._is_over

    def kill(self) -> None:
        self._engine.kill()

    def can_change_draft(self, config: EngineConfig) -> bool:
        return False  # the engine's ranks are fixed at its start

    async def change_draft(self, config: EngineConfig) -> None:
        raise ClusterError("without Ray a draft changes only with its engine.")

    async def _in_thread(self, work: Callable[[Report], None], report: Report) -> None:
        done = in_own_thread(lambda: work(report), "engine watch")
        self._threads.append(done)
        try:
            await asyncio.shield(done)
        except OutriderError as error:
            raise ClusterError(_quote(error, self._say)) from error

    def _reporter(self) -> Report:
        """Reports the lines of a thread as events on this loop."""
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            loop.call_soon_threadsafe(self._say, Event(EventKind.STAGE, line))

        return report

    # -- status -------------------------------------------------------------------------------

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
    """Accepts any engine."""


async def _take_note() -> None:
    """The status is polled anyway."""


def _quote(error: OutriderError, say: Say) -> str:
    """Returns the reason, the first line; reports the process's output that follows."""
    reason, *lines = str(error).splitlines()
    for line in lines:
        say(Event(EventKind.LOG, line))
    return reason.rstrip(":.")
