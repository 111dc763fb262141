"""Standby processes for a rank or an engine: libraries imported, nothing loaded.

They do not count as the server's processes until they take over; until then they log to Ray's own
files. CUDA is not initialised, so that they can take the GPUs of a lost process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

from outrider.cluster.errors import ClusterError
from outrider.cluster.ray.actors import EngineActor, ProcessPlace, RankActor
from outrider.cluster.ray.facts import node_memory
from outrider.cluster.ray.gpu_handover import set_visible_gpus
from outrider.config import EngineConfig

_SPARE_BYTES = 2**29  # upper bound of a standby process
_MAX_SHARE = 0.9  # of a node's memory: Ray kills processes from 0.95 on


class SpareRank(RankActor):
    """A standby that becomes a `RankActor` in `take_over`."""

    def __init__(self, role: str, rank: int, size: int, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # before anything that reads it is imported
        check_spare_memory(*node_memory())
        self._gpu_ids: tuple[str, ...] = ()
        self._begin: Callable[[], None] = partial(super().__init__, role, rank, size, environment)

    def warm(self) -> None:
        """Import the slowest libraries. A take-over meanwhile waits only for the rest."""
        import_module("outrider.workers.ranks.start")

    def take_over(self, before: ProcessPlace) -> ProcessPlace:
        """Replace a process that has ended or is about to, and take its GPUs."""
        self._gpu_ids = before.gpu_ids
        set_visible_gpus(before.gpu_ids)
        self._begin()
        return self.describe(before)

    def describe(self, before: ProcessPlace | None = None) -> ProcessPlace:
        return dataclasses.replace(super().describe(before), gpu_ids=self._gpu_ids)


class SpareEngine(EngineActor):
    """A standby that becomes an `EngineActor` in `take_over`."""

    def __init__(self, environment: Mapping[str, str], *, has_models: bool) -> None:
        """`has_models`: whether the engine holds the models itself."""
        os.environ.update(environment)  # before anything that reads it is imported
        check_spare_memory(*node_memory())
        self._environment = environment
        self._has_models = has_models
        self._gpu_ids: tuple[str, ...] = ()

    async def warm(self) -> None:
        """See `SpareRank.warm`; an engine over ranks has nothing slow to import."""
        if self._has_models:
            await asyncio.to_thread(import_module, "outrider.engine.inline")

    async def take_over(
        self, before: ProcessPlace, config: EngineConfig, secret: str
    ) -> ProcessPlace:
        """See `SpareRank.take_over`."""
        self._gpu_ids = before.gpu_ids
        set_visible_gpus(before.gpu_ids)
        super().__init__(config, secret, self._environment)
        return await self.describe(before)

    async def describe(self, before: ProcessPlace | None = None) -> ProcessPlace:
        return dataclasses.replace(await super().describe(before), gpu_ids=self._gpu_ids)


def check_spare_memory(used: int, total: int) -> None:
    """Raises `ClusterError` if the node lacks memory for a standby process."""
    if used + _SPARE_BYTES > _MAX_SHARE * total:
        raise ClusterError(
            f"the node has {used / 2**30:.3g} GB of its {total / 2**30:.3g} GB of memory in use, "
            "too much for a standby process; no action is needed."
        )
