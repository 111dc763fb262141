"""Replicas on this host without Ray: each is an engine process that starts its own ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Say
from outrider.cluster.local.host_memory import available_bytes, used_bytes
from outrider.cluster.local.replica import LocalAllocation, LocalReplica, local_allocation
from outrider.cluster.replica_set import ReplicaSet
from outrider.cluster.supervised_replica import Allocation
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.config.colocation import settle_colocation
from outrider.engine.over_ranks import group_sizes
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace

NAME = "outrider serve"
MAX_STARTING = 4  # replicas at a time
_POLL_S = 0.1
_GB = 2**30


class LocalBackend:
    """See `outrider.cluster.supervised_replica.ReplicaBackend`. Replicas share CPUs but not GPUs; a
    single replica that needs more GPUs than there are shares them among its ranks."""

    def __init__(self, secret: str, num_gpus: int) -> None:
        self._secret = secret
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._gpu_ids = visible.split(",") if visible else [str(n) for n in range(num_gpus)]
        self._gpu_ids = self._gpu_ids[:num_gpus]
        self._allocations: list[LocalAllocation] = []
        self.handles: list[LocalReplica] = []

    async def settle(self, config: EngineConfig) -> EngineConfig:
        return settle_colocation(config, len(self._gpu_ids))

    async def allocate(self, config: EngineConfig, timeout_s: float) -> Allocation:
        """Waits while `MAX_STARTING` others start: their memory is unknown until they have
        loaded."""
        limit_s = config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while self._num_starting >= MAX_STARTING:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise PlacementError(
                f"{self._num_starting} replicas have been starting for {limit_s:g} s; wait until "
                "they serve, or use fewer."
            ) from None
        self.check_memory(1)
        allocation = self._allocation(config)
        self._allocations.append(allocation)
        return allocation

    @property
    def _num_starting(self) -> int:
        return len(self._allocations) - sum(handle.is_ready for handle in self.handles)

    def check_memory(self, num_further: int) -> None:
        """Raises `PlacementError` unless memory suffices for that many more replicas."""
        running = [handle for handle in self.handles if handle.is_ready]
        available = available_bytes()
        if not running or available is None:  # the memory of a replica is unknown
            return
        largest = max(used_bytes(each.pid for each in handle.processes(0)) for handle in running)
        num_starting = max(self._num_starting, 0)
        if (num_further + num_starting) * largest <= available:
            return
        num_fitting = max(available // largest - num_starting, 0)
        needed_gb, free_gb = num_further * largest / _GB, available / _GB
        raise PlacementError(
            f"{_count(num_further)} more would take {needed_gb:.1f} GB of memory, as much as a "
            f"running one each, and {free_gb:.1f} GB are free, enough for {num_fitting}; use "
            "fewer, or a cluster."
        )

    def _allocation(self, config: EngineConfig) -> LocalAllocation:
        if not self._gpu_ids or config.target.device == "cpu":
            return local_allocation(config, self._secret)
        num_needed = 1 if config.cluster.colocate else sum(group_sizes(config).values())
        taken = {
            gpu for allocation in self._allocations for gpu in allocation.gpu_ids or self._gpu_ids
        }
        free = [gpu for gpu in self._gpu_ids if gpu not in taken]
        if len(free) >= num_needed:
            return local_allocation(config, self._secret, tuple(free[:num_needed]))
        if not self._allocations:
            return local_allocation(config, self._secret)  # its ranks share the GPUs
        raise PlacementError(
            f"a replica needs {num_needed} of this host's {len(self._gpu_ids)} GPUs and "
            f"{len(free)} are free; use fewer replicas, or a cluster."
        )

    def release(self, allocation: Allocation) -> None:
        self._allocations.remove(allocation)
        allocation.engines.close()

    async def avoid(self, hosts: Collection[str]) -> None:
        """Does nothing: there is no other host."""

    def create(self, config: EngineConfig, allocation: Allocation, say: Say) -> LocalReplica:
        handle = LocalReplica(allocation, say)
        self.handles = [*(each for each in self.handles if not each.is_over), handle]
        return handle


class LocalLaunch:
    """See `outrider.cluster.launch.Launch`."""

    def __init__(self, config: EngineConfig, secret: str, num_gpus: int = 0) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._config = config
        self._backend = LocalBackend(secret, num_gpus)
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

    async def run(self, say: Say) -> None:
        """Run until `stop`. Raises if the first start of a replica fails."""
        self._set = ReplicaSet(self._config, self._backend, say)
        self._set.on_change.append(self._notify_change)
        self._keeping = asyncio.create_task(first_of(self._set.run(), self._stopping.wait()))
        await asyncio.shield(self._keeping)

    async def scale(self, num_replicas: int) -> None:
        num_further = num_replicas - len(self._running().replicas)
        if num_further > 0:
            self._backend.check_memory(num_further)
        await self._running().scale(num_replicas)

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._running().roll_out(config, is_draft_only=is_draft_only)

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        """Does nothing: all replicas are on this host."""

    async def stop(self) -> None:
        self._stopping.set()
        if self._keeping is not None:
            await asyncio.wait({self._keeping})

    def abort(self) -> None:
        for handle in self._backend.handles:
            handle.kill()

    def _running(self) -> ReplicaSet:
        if self._set is None:
            raise ClusterError("the replicas have not started yet; try again in a moment.")
        return self._set

    def _notify_change(self) -> None:
        for callback in self.on_change:
            callback()


def _count(num_replicas: int) -> str:
    return "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
