"""A supervised replica: allocates resources, starts, watches, and restarts the replica when lost.

Independent of where its processes run: a `ReplicaBackend` allocates and creates them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, EventKind, Say
from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.links.cluster_view import ProcessView, ReplicaView
from outrider.links.fleet_messages import ReplicaState
from outrider.restarts import Restarts, engine_back, engine_lost

NOTICE_S = 1.5  # for gateways to learn of a drain, and for the replica to report its load
_IDLE_POLL_S = 0.25

Allocation: TypeAlias = Any
"""The resources of a replica; opaque, released by the backend that allocated them."""


class ReplicaHandle(Protocol):
    """One run of a replica's processes: `start`, `watch` until lost, and `end` in any case."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the engine listens, once started."""

    @property
    def load(self) -> int | None:
        """Running and waiting samples; None if unknown."""

    @property
    def pids(self) -> Mapping[str, Sequence[int]]:
        """Pids of the processes that hold the models, by role."""

    @property
    def draft_restarts(self) -> int: ...

    def processes(self, restarts: int) -> list[ProcessView]:
        """Its processes; `restarts` of the replica count for each."""

    async def start(self) -> None:
        """Returns once it serves. Raises `OutriderError` if it cannot."""

    async def probe(self, timeout_s: float) -> None:
        """Generate one token. Raises `OutriderError` on failure."""

    async def watch(self) -> str:
        """Wait until it is lost; returns the reason."""

    async def end(self) -> None: ...

    def can_change_draft(self, config: EngineConfig) -> bool:
        """Whether the draft can be replaced while the target goes on."""

    async def change_draft(self, config: EngineConfig) -> None:
        """Raises `OutriderError` if the new draft fails to start."""


class ReplicaBackend(Protocol):
    """Allocates resources for replicas and creates them there."""

    async def settle(self, config: EngineConfig) -> EngineConfig:
        """The configuration with machine-dependent settings decided."""

    async def allocate(self, config: EngineConfig, timeout_s: float) -> Allocation:
        """Resources for one replica of a settled configuration. `PlacementError` after
        `timeout_s`."""

    def release(self, allocation: Allocation) -> None: ...

    async def avoid(self, hosts: Collection[str]) -> None:
        """Allocate nothing more on the hosts that have these addresses now."""

    def create(self, config: EngineConfig, allocation: Allocation, say: Say) -> ReplicaHandle: ...


class EndedError(ClusterError):
    """A replica was ended before it first served."""


class ReplicaPhase(StrEnum):
    """The lifecycle of a replica."""

    PLACING = "placing"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    ENDED = "ended"


class SupervisedReplica:
    """`begin`, wait until `ready`, and `end`. Calls `on_change` on every change."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        backend: ReplicaBackend,
        say: Say,
        on_change: Callable[[], None],
        *,
        may_fail: bool = True,
    ) -> None:
        """Unless it `may_fail`, a failed first start is retried for ever."""
        self.name = name
        self.config = config
        self._settled = config  # after `begin`
        self.phase = ReplicaPhase.PLACING
        self.restarts = 0
        self.is_withdrawn = False  # no longer published
        self.others_serve: Callable[[], bool] = lambda: False
        self._backend = backend
        self._say = say
        self._on_change = on_change
        self._restarts = Restarts(is_first=may_fail)
        self._handle: ReplicaHandle | None = None
        self._past_draft_restarts = 0  # of earlier runs
        self._placing_since_s: float | None = None
        self._placement_s: float | None = None
        self._start_s: float | None = None
        self._serves = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- state --------------------------------------------------------------------------------

    @property
    def state(self) -> ReplicaState:
        if self.phase is ReplicaPhase.SERVING:
            return ReplicaState.SERVING
        return (
            ReplicaState.DRAINING if self.phase is ReplicaPhase.DRAINING else ReplicaState.STARTING
        )

    @property
    def handle(self) -> ReplicaHandle | None:
        """The running processes, while it serves or drains."""
        return None if self.state is ReplicaState.STARTING else self._handle

    @property
    def draft_restarts(self) -> int:
        return self._past_draft_restarts + (
            0 if self._handle is None else self._handle.draft_restarts
        )

    def view(self) -> ReplicaView:
        placement_s = self._placement_s
        if self._placing_since_s is not None:
            placement_s = time.monotonic() - self._placing_since_s
        return ReplicaView(
            self.name,
            self.phase.value,
            self.restarts,
            self.draft_restarts,
            placement_s,
            self._start_s,
        )

    def processes(self) -> list[ProcessView]:
        return [] if self._handle is None else self._handle.processes(self.restarts)

    # -- lifecycle ----------------------------------------------------------------------------

    def begin(
        self, placing: asyncio.Lock, allocation: Allocation | None = None
    ) -> asyncio.Task[None]:
        """Start on a given allocation, or allocate under the lock `placing`."""
        self._task = asyncio.create_task(self._run(placing, allocation))
        return self._task

    async def ready(self) -> None:
        """Wait until it serves. Raises the cause of a failure; has no timeout of its own."""
        assert self._task is not None
        serves = asyncio.create_task(self._serves.wait())
        try:
            await asyncio.wait((serves, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serves.cancel()
        if not self._serves.is_set():
            if self._task.cancelled():
                raise EndedError("it was ended while it started.")
            self._task.result()

    async def drain(self, limit_s: float) -> None:
        """Stop new requests and wait up to `limit_s` for running ones."""
        if self.phase is not ReplicaPhase.SERVING:
            return
        self._enter(ReplicaPhase.DRAINING)
        now_s = time.monotonic()
        noticed_s, deadline_s = now_s + min(NOTICE_S, limit_s), now_s + limit_s
        while self.state is ReplicaState.DRAINING and time.monotonic() < deadline_s:
            if (
                time.monotonic() >= noticed_s
                and self._handle is not None
                and self._handle.load == 0
            ):
                return
            await asyncio.sleep(min(_IDLE_POLL_S, limit_s))

    async def end(self) -> None:
        """Returns once its processes have ended and its resources are released."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def change_draft(self, config: EngineConfig) -> bool:
        """False if the replica must be replaced instead. Raises if the new draft fails to start."""
        settled = await self._backend.settle(config)
        handle = self._handle
        if (
            self.phase is not ReplicaPhase.SERVING
            or handle is None
            or not handle.can_change_draft(settled)
        ):
            return False
        await handle.change_draft(settled)
        self.config, self._settled = config, settled
        return True

    async def _run(self, placing: asyncio.Lock, allocation: Allocation | None) -> None:
        try:
            self._settled = await self._backend.settle(self.config)
            if allocation is None:
                allocation = await self._allocate_timed(placing)
            try:
                await self._supervise(allocation)
            finally:
                self._backend.release(allocation)
        finally:
            self._handle = None
            self._enter(ReplicaPhase.ENDED)

    async def _allocate_timed(self, placing: asyncio.Lock) -> Allocation:
        self._placing_since_s = time.monotonic()
        try:
            return await self._allocate(placing)
        finally:
            self._placement_s = time.monotonic() - self._placing_since_s
            self._placing_since_s = None

    async def _allocate(self, placing: asyncio.Lock) -> Allocation:
        while True:
            try:
                async with placing:  # two at once could each get half of the resources
                    limit_s = self._settled.cluster.placement_timeout_s
                    return await self._backend.allocate(self._settled, limit_s)
            except PlacementError as error:
                if self._restarts.is_first:
                    raise
                await self._pause(str(error), self._restarts.lost())

    async def _supervise(self, allocation: Allocation) -> None:
        while True:
            reason, pause_s = await self._run_once(allocation)
            if self.phase is ReplicaPhase.DRAINING:
                return
            self._enter(ReplicaPhase.RESTARTING)
            await self._pause(reason, pause_s)
            self.restarts += 1

    async def _pause(self, reason: str, pause_s: float) -> None:
        lost = engine_lost(reason, pause_s, do_others_serve=self.others_serve())
        self._say(Event(EventKind.TROUBLE, lost))
        await asyncio.sleep(pause_s)

    async def _run_once(self, allocation: Allocation) -> tuple[str, float]:
        """Run until lost; returns the reason and the pause. Raises if the first start fails."""
        is_first = self._restarts.is_first
        say = self._say if is_first else self._say_news
        self._enter(ReplicaPhase.STARTING if is_first else ReplicaPhase.RESTARTING)
        handle: ReplicaHandle | None = None
        try:
            began_s = time.monotonic()
            handle = self._handle = self._backend.create(self._settled, allocation, say)
            await handle.start()
            await handle.probe(self._settled.cluster.start_timeout_s)
            self._start_s = time.monotonic() - began_s
            away_s = self._restarts.runs()
            if not is_first:
                self._say(Event(EventKind.REPAIR, engine_back(away_s, handle.pids)))
            self._serves.set()
            self._enter(ReplicaPhase.SERVING)
            reason = await handle.watch()
        except (OutriderError, OSError) as error:
            # OSError: the system may be out of processes, files or memory for now.
            reason = str(error)
            if self._restarts.is_first:
                if isinstance(error, OutriderError):
                    raise
                raise ClusterError(f"the engine cannot be started: {reason}.") from error
        finally:
            if self.phase is ReplicaPhase.SERVING:
                self._enter(
                    ReplicaPhase.RESTARTING
                )  # gateways must not connect to a replica that ends
            if handle is not None:
                # Also if cancelled: these processes would leak otherwise.
                await _uncancelled(handle.end())
                self._past_draft_restarts += handle.draft_restarts
            self._handle = None
        return reason, self._restarts.lost()

    def _enter(self, phase: ReplicaPhase) -> None:
        """Enter a phase; DRAINING is only left for ENDED."""
        if phase is not self.phase and (
            self.phase is not ReplicaPhase.DRAINING or phase is ReplicaPhase.ENDED
        ):
            self.phase = phase
        self._on_change()

    def _say_news(self, event: Event) -> None:
        """Drop the stages of a restart, but not those of a lost draft while the replica serves."""
        if event.kind is not EventKind.STAGE or self.phase is ReplicaPhase.SERVING:
            self._say(event)


async def _uncancelled(work: Any) -> None:
    """Finish the work even if cancelled; then raise the cancellation."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError
