"""The ranks of one role as actors: started together, ended together, told from their successors."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.cluster.actors import Endpoint, ProcessPlace, RankActor
from outrider.cluster.placement import Placed
from outrider.cluster.postmortem import End, await_end, read_last_lines, root_cause
from outrider.workers.weights.environment import model_environment

_RUN_AND_DESCRIBE = 2


class ActorGroup:
    """Actors of one role on the bundles of its placement group."""

    def __init__(self, placed: Placed) -> None:
        self.role = placed.need.role
        self.places: list[ProcessPlace] = []
        self.ends: list[End] = []
        self._placed = placed
        self._actors: list[Any] = []
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
        self._actors = [_start_rank(self._placed, rank) for rank in range(len(self._names))]
        self.places = list(await asyncio.gather(*(a.describe.remote() for a in self._actors)))
        return self.places

    def run(self, engine: Endpoint) -> None:
        """Let the ranks dial in to the engine."""
        for name, actor in zip(self._names, self._actors, strict=True):
            run = actor.run.remote(engine)
            self._runs.append(asyncio.create_task(self._note_end(name, run)))

    async def wait_any_ended(self) -> None:
        """At once if none runs."""
        if self._runs:
            await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)

    async def wait_all_ended(self) -> None:
        if self._runs:
            await asyncio.wait(self._runs)

    async def last_lines(self, name: str) -> list[str]:
        place = self.places[self._names.index(name)]
        return await read_last_lines(place.node_id, place.log)

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        for run in self._runs:
            run.cancel()

    async def _note_end(self, name: str, run: Any) -> None:
        self.ends.append(await await_end(name, run))


def _start_rank(placed: Placed, rank: int) -> Any:
    need = placed.need
    actor: Any = ray.remote(RankActor)
    return actor.options(
        num_cpus=need.per_rank["CPU"],
        num_gpus=need.per_rank.get("GPU", 0),
        max_concurrency=_RUN_AND_DESCRIBE,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placed.group, placement_group_bundle_index=rank
        ),
    ).remote(need.role, rank, need.num_ranks, model_environment())
