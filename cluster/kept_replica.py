"""One replica by name: given room, started, watched, and started anew whenever it is lost.

The same wherever its processes are: what differs is who has room for them and makes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, Kind, Say
from outrider.config import EngineConfig
from outrider.engine.launch.restarts import Restarts, engine_back, engine_lost
from outrider.errors import OutriderError
from outrider.links.cluster_view import ProcessView, ReplicaView
from outrider.links.fleet_messages import ReplicaState

HEARD_S = 1.5  # until gateways know that a replica drains, and it has told what it has in hand
_IDLE_POLL_S = 0.25

Room: TypeAlias = Any
"""What a replica was given to run in; whoever gave it takes it back."""


class Life(Protocol):
    """One engine with its models: `start`, then `watch` until it is lost, and `end` in any case."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, once it was started."""

    @property
    def load(self) -> int | None:
        """Samples that run or wait; None if it has not said."""

    @property
    def pids(self) -> Mapping[str, Sequence[int]]:
        """Of the processes that hold the models, by role."""

    @property
    def draft_restarts(self) -> int: ...

    def processes(self, restarts: int) -> list[ProcessView]:
        """`restarts` of the replica count for all of it."""

    async def start(self) -> None:
        """Until it serves. Raises `OutriderError` if it cannot."""

    async def probe(self, timeout_s: float) -> None:
        """Have it generate a token. Raises `OutriderError` if it does not."""

    async def watch(self) -> str:
        """Until it is lost; why."""

    async def end(self) -> None: ...

    def can_change_draft(self, config: EngineConfig) -> bool:
        """Whether another draft can take the place of its own while the target goes on."""

    async def change_draft(self, config: EngineConfig) -> None:
        """Raises `OutriderError` if the new one does not come to run."""


class Rooms(Protocol):
    """Who has room for replicas, and makes them there."""

    async def settle(self, config: EngineConfig) -> EngineConfig:
        """With what depends on the machines decided."""

    async def find(self, config: EngineConfig, timeout_s: float) -> Room:
        """Room for one replica of a settled configuration. `PlacementError` if there is none by
        then."""

    def give_back(self, room: Room) -> None: ...

    async def avoid(self, hosts: Collection[str]) -> None:
        """Find no room any more on hosts that are known by these addresses now."""

    def life(self, config: EngineConfig, room: Room, say: Say) -> Life: ...


class EndedError(ClusterError):
    """A replica was ended before it ever served."""


class Phase(StrEnum):
    """How far a replica has got."""

    PLACING = "placing"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    ENDED = "ended"


class KeptReplica:
    """`begin` it, wait until it is `ready`, and `end` it. Whoever made it hears of every change."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        rooms: Rooms,
        say: Say,
        on_change: Callable[[], None],
        *,
        may_fail: bool = True,
    ) -> None:
        """Unless it `may_fail`, a start that fails is tried again for ever."""
        self.name = name
        self.config = config
        self._settled = config  # once it was begun
        self.phase = Phase.PLACING
        self.restarts = 0
        self.is_leaving = False  # nobody is to know of it any more
        self.others_serve: Callable[[], bool] = lambda: False
        self._rooms = rooms
        self._say = say
        self._on_change = on_change
        self._restarts = Restarts(is_first=may_fail)
        self._life: Life | None = None
        self._past_draft_restarts = 0  # of lives that are over
        self._placing_since_s: float | None = None
        self._placement_s: float | None = None
        self._start_s: float | None = None
        self._serves = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- what is known ------------------------------------------------------------------------

    @property
    def state(self) -> ReplicaState:
        if self.phase is Phase.SERVING:
            return ReplicaState.SERVING
        return ReplicaState.DRAINING if self.phase is Phase.DRAINING else ReplicaState.STARTING

    @property
    def life(self) -> Life | None:
        """While it serves, or drains."""
        return None if self.state is ReplicaState.STARTING else self._life

    @property
    def draft_restarts(self) -> int:
        return self._past_draft_restarts + (0 if self._life is None else self._life.draft_restarts)

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
        return [] if self._life is None else self._life.processes(self.restarts)

    # -- its life -----------------------------------------------------------------------------

    def begin(self, placing: asyncio.Lock, room: Room | None = None) -> asyncio.Task[None]:
        """In a room that was found already, or one that is looked for while nobody else does."""
        self._task = asyncio.create_task(self._run(placing, room))
        return self._task

    async def ready(self) -> None:
        """Until it serves; raises why it does not. Whoever keeps it minds the time."""
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
        """Have it finish what it has in hand, for so long; nothing new is given to it."""
        if self.phase is not Phase.SERVING:
            return
        self._enter(Phase.DRAINING)
        now_s = time.monotonic()
        heard_s, deadline_s = now_s + min(HEARD_S, limit_s), now_s + limit_s
        while self.state is ReplicaState.DRAINING and time.monotonic() < deadline_s:
            if time.monotonic() >= heard_s and self._life is not None and self._life.load == 0:
                return
            await asyncio.sleep(min(_IDLE_POLL_S, limit_s))

    async def end(self) -> None:
        """Its processes have ended and its room is free when this returns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def change_draft(self, config: EngineConfig) -> bool:
        """False if that is not possible here, and the replica must be replaced; raises if the new
        draft does not come to run."""
        settled = await self._rooms.settle(config)
        life = self._life
        if self.phase is not Phase.SERVING or life is None or not life.can_change_draft(settled):
            return False
        await life.change_draft(settled)
        self.config, self._settled = config, settled
        return True

    async def _run(self, placing: asyncio.Lock, room: Room | None) -> None:
        try:
            self._settled = await self._rooms.settle(self.config)
            if room is None:
                room = await self._find_room_timed(placing)
            try:
                await self._keep(room)
            finally:
                self._rooms.give_back(room)
        finally:
            self._life = None
            self._enter(Phase.ENDED)

    async def _find_room_timed(self, placing: asyncio.Lock) -> Room:
        self._placing_since_s = time.monotonic()
        try:
            return await self._find_room(placing)
        finally:
            self._placement_s = time.monotonic() - self._placing_since_s
            self._placing_since_s = None

    async def _find_room(self, placing: asyncio.Lock) -> Room:
        while True:
            try:
                async with placing:  # two at once could each get half of what both need
                    limit_s = self._settled.cluster.placement_timeout_s
                    return await self._rooms.find(self._settled, limit_s)
            except PlacementError as error:
                if self._restarts.is_first:
                    raise
                await self._pause(str(error), self._restarts.lost())

    async def _keep(self, room: Room) -> None:
        while True:
            reason, pause_s = await self._live(room)
            if self.phase is Phase.DRAINING:
                return
            self._enter(Phase.RESTARTING)
            await self._pause(reason, pause_s)
            self.restarts += 1

    async def _pause(self, reason: str, pause_s: float) -> None:
        lost = engine_lost(reason, pause_s, do_others_serve=self.others_serve())
        self._say(Event(Kind.TROUBLE, lost))
        await asyncio.sleep(pause_s)

    async def _live(self, room: Room) -> tuple[str, float]:
        """Once: why it was lost, and the pause to make. Raises if its first start fails."""
        is_first = self._restarts.is_first
        say = self._say if is_first else self._say_news
        self._enter(Phase.STARTING if is_first else Phase.RESTARTING)
        life: Life | None = None
        try:
            began_s = time.monotonic()
            life = self._life = self._rooms.life(self._settled, room, say)
            await life.start()
            await life.probe(self._settled.cluster.start_timeout_s)
            self._start_s = time.monotonic() - began_s
            away_s = self._restarts.runs()
            if not is_first:
                self._say(Event(Kind.REPAIR, engine_back(away_s, life.pids)))
            self._serves.set()
            self._enter(Phase.SERVING)
            reason = await life.watch()
        except (OutriderError, OSError) as error:
            # The system may have no more processes, files or memory to give for now.
            reason = str(error)
            if self._restarts.is_first:
                if isinstance(error, OutriderError):
                    raise
                raise ClusterError(f"the engine cannot be started: {reason}.") from error
        finally:
            if self.phase is Phase.SERVING:
                self._enter(Phase.RESTARTING)  # nobody is to dial what is about to end
            if life is not None:
                # Also while this is cancelled: what is not ended here is ended by nobody.
                await _to_the_end(life.end())
                self._past_draft_restarts += life.draft_restarts
            self._life = None
        return reason, self._restarts.lost()

    def _enter(self, phase: Phase) -> None:
        """A replica that drains stays so to its end."""
        if phase is not self.phase and (self.phase is not Phase.DRAINING or phase is Phase.ENDED):
            self.phase = phase
        self._on_change()

    def _say_news(self, event: Event) -> None:
        """The stages of a start that repeats an earlier one are none, those of a draft that is lost
        while the replica serves are."""
        if event.kind is not Kind.STAGE or self.phase is Phase.SERVING:
            self._say(event)


async def _to_the_end(work: Any) -> None:
    """Whatever is cancelled meanwhile, which is told afterwards."""
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
