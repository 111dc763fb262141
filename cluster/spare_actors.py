"""Processes that wait for the place of a rank or an engine: libraries imported, nothing loaded.

They are none of the server's until they take over. What they print until then goes to Ray's own
logs. Nothing of them has looked for a GPU, so that they can be given those of whoever was lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

from outrider.cluster.actors import EngineActor, ProcessPlace, RankActor
from outrider.cluster.errors import ClusterError
from outrider.cluster.gpu_turn import see_gpus
from outrider.cluster.ray_facts import node_memory
from outrider.config import EngineConfig

_SPARE_BYTES = 2**29  # rather more than one takes
_FULLEST = 0.9  # of a node's memory: Ray ends processes from 0.95 on


class SpareRank(RankActor):
    """See `RankActor`, which it is from `take_over` on."""

    def __init__(self, role: str, rank: int, size: int, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # before anything that reads it is imported
        raise_if_full(*node_memory())
        self._gpu_ids: tuple[str, ...] = ()
        self._begin: Callable[[], None] = partial(super().__init__, role, rank, size, environment)

    def warm(self) -> None:
        """Import what takes longest. Whoever takes over meanwhile waits for the rest of it only."""
        import_module("outrider.workers.ranks.start")

    def take_over(self, before: ProcessPlace) -> ProcessPlace:
        """In the place, and with the GPUs, of a process that has ended or is about to."""
        self._gpu_ids = before.gpu_ids
        see_gpus(before.gpu_ids)
        self._begin()
        return self.describe(before)

    def describe(self, before: ProcessPlace | None = None) -> ProcessPlace:
        return dataclasses.replace(super().describe(before), gpu_ids=self._gpu_ids)


class SpareEngine(EngineActor):
    """See `EngineActor`, which it is from `take_over` on."""

    def __init__(self, environment: Mapping[str, str], *, has_models: bool) -> None:
        """`has_models`: it will hold them itself."""
        os.environ.update(environment)  # before anything that reads it is imported
        raise_if_full(*node_memory())
        self._environment = environment
        self._has_models = has_models
        self._gpu_ids: tuple[str, ...] = ()

    async def warm(self) -> None:
        """See `SpareRank.warm`; an engine over ranks has all it needs."""
        if self._has_models:
            await asyncio.to_thread(import_module, "outrider.engine.inline")

    async def take_over(
        self, before: ProcessPlace, config: EngineConfig, secret: str
    ) -> ProcessPlace:
        """See `SpareRank.take_over`."""
        self._gpu_ids = before.gpu_ids
        see_gpus(before.gpu_ids)
        super().__init__(config, secret, self._environment)
        return await self.describe(before)

    async def describe(self, before: ProcessPlace | None = None) -> ProcessPlace:
        return dataclasses.replace(await super().describe(before), gpu_ids=self._gpu_ids)


def raise_if_full(used: int, total: int) -> None:
    """Unless a node with that memory has room for one that waits."""
    if used + _SPARE_BYTES > _FULLEST * total:
        raise ClusterError(
            f"the node has {used / 2**30:.3g} GB of its {total / 2**30:.3g} GB of memory in use, "
            "too much for a process that only waits; nothing has to be done."
        )
