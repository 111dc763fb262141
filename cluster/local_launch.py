"""Replicas on this host, each an engine in a process of its own that starts its ranks: no Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Say
from outrider.cluster.host_memory import available_bytes, used_bytes
from outrider.cluster.kept_replica import Room
from outrider.cluster.local_life import LocalLife, LocalRoom, local_room
from outrider.cluster.replica_set import ReplicaSet
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.config.colocation import settle_colocation
from outrider.engine.over_ranks import group_sizes
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace

NAME = "outrider serve"
MAX_STARTING = 4  # replicas, at a time
_POLL_S = 0.1
_GB = 2**30


class LocalRooms:
    """See `outrider.cluster.kept_replica.Rooms`. CPUs are shared by all who ask; GPUs are not, but
    for a single replica that needs more than there are."""

    def __init__(self, secret: str, num_gpus: int) -> None:
        self._secret = secret
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._gpu_ids = visible.split(",") if visible else [str(n) for n in range(num_gpus)]
        self._gpu_ids = self._gpu_ids[:num_gpus]
        self._given: list[LocalRoom] = []
        self.lives: list[LocalLife] = []

    async def settle(self, config: EngineConfig) -> EngineConfig:
        return settle_colocation(config, len(self._gpu_ids))

    async def find(self, config: EngineConfig, timeout_s: float) -> Room:
        """Waits while many others start: what those take is not known before they have loaded."""
        limit_s = config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while self._num_starting >= MAX_STARTING:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise PlacementError(
                f"{self._num_starting} replicas have been starting for {limit_s:g} s; wait until "
                "they serve, or have fewer."
            ) from None
        self.check_memory(1)
        room = self._room(config)
        self._given.append(room)
        return room

    @property
    def _num_starting(self) -> int:
        return len(self._given) - sum(life.is_ready for life in self.lives)

    def check_memory(self, num_further: int) -> None:
        """Raises `PlacementError` unless there is memory for so many more of what runs already."""
        running = [life for life in self.lives if life.is_ready]
        available = available_bytes()
        if not running or available is None:  # what one takes is not known
            return
        largest = max(used_bytes(each.pid for each in life.processes(0)) for life in running)
        num_starting = max(self._num_starting, 0)
        if (num_further + num_starting) * largest <= available:
            return
        num_fitting = max(available // largest - num_starting, 0)
        needed_gb, free_gb = num_further * largest / _GB, available / _GB
        raise PlacementError(
            f"{_count(num_further)} more would take {needed_gb:.1f} GB of memory, by what one that "
            f"runs takes, and {free_gb:.1f} GB are free, enough for {num_fitting}; have fewer, or "
            "use a cluster."
        )

    def _room(self, config: EngineConfig) -> LocalRoom:
        if not self._gpu_ids or config.target.device == "cpu":
            return local_room(config, self._secret)
        num_needed = 1 if config.cluster.colocate else sum(group_sizes(config).values())
        taken = {gpu for room in self._given for gpu in room.gpu_ids or self._gpu_ids}
        free = [gpu for gpu in self._gpu_ids if gpu not in taken]
        if len(free) >= num_needed:
            return local_room(config, self._secret, tuple(free[:num_needed]))
        if not self._given:
            return local_room(config, self._secret)  # its ranks share what there is
        raise PlacementError(
            f"a replica needs {num_needed} of this host's {len(self._gpu_ids)} GPUs and "
            f"{len(free)} are free; have fewer replicas, or use a cluster."
        )

    def give_back(self, room: Room) -> None:
        self._given.remove(room)
        room.engines.close()

    async def avoid(self, hosts: Collection[str]) -> None:
        """There is no other host."""

    def life(self, config: EngineConfig, room: Room, say: Say) -> LocalLife:
        life = LocalLife(room, say)
        self.lives = [*(each for each in self.lives if not each.is_over), life]
        return life


class LocalLaunch:
    """See `outrider.cluster.launch.Launch`."""

    def __init__(self, config: EngineConfig, secret: str, num_gpus: int = 0) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._config = config
        self._rooms = LocalRooms(secret, num_gpus)
        self._set: ReplicaSet | None = None
        self._stopping = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        return () if self._set is None else self._set.places

    @property
    def config(self) -> EngineConfig | None:
        return None if self._set is None else self._set.config

    async def view(self) -> ClusterView | None:
        found = self._set
        if found is None:
            return None
        return ClusterView(
            NAME,
            found.phase.value,
            found.restarts,
            found.draft_restarts,
            found.processes(),
            found.view(),
            num_configured=found.num_configured,
        )

    async def keep(self, say: Say) -> None:
        """Until `stop`; raises if one never came to run."""
        self._set = ReplicaSet(self._config, self._rooms, say)
        self._set.on_change.append(self._tell_change)
        self._keeping = asyncio.create_task(first_of(self._set.run(), self._stopping.wait()))
        await asyncio.shield(self._keeping)

    async def scale(self, num_replicas: int) -> None:
        num_further = num_replicas - len(self._running().replicas)
        if num_further > 0:
            self._rooms.check_memory(num_further)
        await self._running().scale(num_replicas)

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._running().roll_out(config, is_draft_only=is_draft_only)

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        """All are on this host, which ends with this process."""

    async def stop(self) -> None:
        self._stopping.set()
        if self._keeping is not None:
            await asyncio.wait({self._keeping})

    def abort(self) -> None:
        for life in self._rooms.lives:
            life.kill()

    def _running(self) -> ReplicaSet:
        if self._set is None:
            raise ClusterError("the replicas are not started yet; try again in a moment.")
        return self._set

    def _tell_change(self) -> None:
        for hear in self.on_change:
            hear()


def _count(num_replicas: int) -> str:
    return "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
