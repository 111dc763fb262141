"""The ranks of one role as actors: started and ended together."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import ray
from outrider.checkpoints.environment import model_environment
from outrider.cluster.ray.actors import Endpoint, ProcessPlace, RankActor
from outrider.cluster.ray.placement import RolePlacement
from outrider.cluster.ray.postmortem import End, await_end, read_last_lines, root_cause
from outrider.cluster.ray.spare_actors import SpareRank
from outrider.cluster.ray.spares import ProcessSlot, Spares
from outrider.cluster.tasks import all_of
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_RUN_AND_DESCRIBE = 2


class ActorGroup:
    """Actors of one role on the bundles of its placement group."""

    def __init__(self, placed: RolePlacement, spares: Spares) -> None:
        self.role = placed.need.role
        self.places: list[ProcessPlace] = []
        self.ends: list[End] = []
        self._placed = placed
        self._spares = spares
        self._slots: list[ProcessSlot] = []
        self._actors: dict[int, Any] = {}  # by rank
        self._names = [f"{self.role} rank {rank}" for rank in range(placed.need.num_ranks)]
        self._runs: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> list[int]:
        return [place.pid for place in self.places]

    @property
    def has_failed(self) -> bool:
        return root_cause(self.ends) is not None

    async def describe(self) -> list[ProcessPlace]:
        """Start the processes and wait until all are up. Raises `RayError` if one cannot be."""
        self._slots = [_rank_slot(self._placed, rank) for rank in range(len(self._names))]
        self.places = await all_of(*map(self._fill, self._slots))
        return self.places

    async def _fill(self, slot: ProcessSlot) -> ProcessPlace:
        self._actors[slot.rank], place = await self._spares.fill(slot)
        return place

    def prepare_spares(self) -> None:
        """Call once the ranks serve: starts a standby process for each."""
        self._spares.prepare(self._slots)

    def run(self, engine: Endpoint) -> None:
        """Let the ranks connect to the engine."""
        for rank, name in enumerate(self._names):
            run = self._actors[rank].run.remote(engine)
            self._runs.append(asyncio.create_task(self._note_end(name, run)))

    async def wait_any_ended(self) -> None:
        """Returns at once if none runs."""
        if self._runs:
            await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)

    async def wait_all_ended(self) -> None:
        if self._runs:
            await asyncio.wait(self._runs)

    async def last_lines(self, name: str) -> list[str]:
        place = self.places[self._names.index(name)]
        return await read_last_lines(place.node_id, place.log)

    def kill(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        for run in self._runs:
            run.cancel()

    async def _note_end(self, name: str, run: Any) -> None:
        self.ends.append(await await_end(name, run))


def _rank_slot(placed: RolePlacement, rank: int) -> ProcessSlot:
    need, group = placed.need, placed.group

    def begin(kind: type[RankActor], num_cpus: float, num_gpus: float) -> Any:
        actor: Any = ray.remote(kind)
        return actor.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=_RUN_AND_DESCRIBE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote(need.role, rank, need.num_ranks, model_environment())

    return ProcessSlot(
        need.role,
        rank,
        group,
        partial(begin, RankActor, need.per_rank["CPU"], need.per_rank.get("GPU", 0)),
        partial(begin, SpareRank, 0, 0),
    )
