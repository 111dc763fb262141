"""Allocates resources for replicas in a Ray cluster, and creates replicas there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from outrider.cluster.errors import PlacementError
from outrider.cluster.events import Event, EventKind, Say, stage_reporter
from outrider.cluster.probe import probe
from outrider.cluster.ray.actors import Endpoint
from outrider.cluster.ray.facts import cluster_resources, live_nodes
from outrider.cluster.ray.placement import (
    ENGINE,
    RolePlacement,
    needs_of,
    place,
    release,
    settle_devices,
)
from outrider.cluster.ray.replica import ProcessStatus, ReplicaProcesses
from outrider.cluster.ray.spares import Spares
from outrider.cluster.supervised_replica import Allocation
from outrider.config import EngineConfig
from outrider.config.colocation import settle_colocation
from outrider.gateway.routing.replicas import reachable
from outrider.links.cluster_view import ProcessView
from outrider.progress_stages import stage
from ray.exceptions import RayError


@dataclass(frozen=True, slots=True)
class RayAllocation:
    """What one replica has: room by role, and who waits there to take over."""

    placed: Mapping[str, RolePlacement]
    spares: Spares


class RayBackend:
    """See `outrider.cluster.supervised_replica.ReplicaBackend`: one placement group per role.
    Addresses are as seen from the node of `server_node_id`."""

    def __init__(self, secret: str, say: Say, server_node_id: str, *, can_grow: bool) -> None:
        self._secret = secret
        self._say = say
        self.server_node_id = server_node_id
        self._can_grow = can_grow
        self._avoided: frozenset[str] = frozenset()  # nodes by id

    async def settle(self, config: EngineConfig) -> EngineConfig:
        has = await asyncio.to_thread(cluster_resources)
        num_gpus = int(has.get("GPU", 0))
        return settle_colocation(settle_devices(config, has_gpus=num_gpus > 0), num_gpus)

    async def allocate(self, config: EngineConfig, timeout_s: float) -> RayAllocation:
        try:
            with stage_reporter(self._say), stage("waiting for resources in the Ray cluster"):
                placed = await place(
                    needs_of(config), timeout_s, can_grow=self._can_grow, avoid=self._avoided
                )
        except RayError as error:
            raise PlacementError(f"no resources could be reserved: {error}") from error
        self._say(Event(EventKind.STAGE, f"placed: {placing(placed)}"))
        return RayAllocation(placed, Spares(enabled=config.cluster.standby))

    def release(self, allocation: Allocation) -> None:
        allocation.spares.close()
        release(allocation.placed)

    async def avoid(self, hosts: Collection[str]) -> None:
        """Records node ids: another pod may get the address later."""
        nodes = await asyncio.to_thread(live_nodes)
        ids = {node.id for node in nodes if node.id in self._avoided or node.ip in hosts}
        self._avoided = frozenset(ids)

    def create(self, config: EngineConfig, allocation: Allocation, say: Say) -> RayReplica:
        replica = ReplicaProcesses(config, self._secret, allocation.placed, allocation.spares, say)
        return RayReplica(replica, lambda: self.server_node_id, self._secret)


class RayReplica:
    """See `outrider.cluster.supervised_replica.ReplicaHandle`."""

    def __init__(
        self, replica: ReplicaProcesses, server_node_id: Callable[[], str], secret: str
    ) -> None:
        self._replica = replica
        self._secret = secret
        self._asker_node_id = server_node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        endpoint = self._replica.endpoint
        return () if endpoint is None else addresses_from(endpoint, self._asker_node_id())

    @property
    def load(self) -> int | None:
        status = self._replica.status
        return None if status is None else status.running + status.waiting

    @property
    def pids(self) -> Mapping[str, Sequence[int]]:
        return self._replica.pids

    @property
    def draft_restarts(self) -> int:
        return self._replica.draft_restarts

    def processes(self, restarts: int) -> list[ProcessView]:
        return [_process(each) for each in self._replica.processes(restarts)]

    async def start(self) -> None:
        await self._replica.start()

    async def probe(self, timeout_s: float) -> None:
        if addresses := reachable(
            self.addresses
        ):  # none if the engine is unreachable from this node
            await probe(addresses[0], self._secret, timeout_s)

    async def watch(self) -> str:
        return await self._replica.watch()

    async def end(self) -> None:
        await self._replica.end()

    def can_change_draft(self, config: EngineConfig) -> bool:
        return self._replica.can_change_draft(config)

    async def change_draft(self, config: EngineConfig) -> None:
        await self._replica.change_draft(config)


def addresses_from(endpoint: Endpoint, node_id: str) -> tuple[str, ...]:
    """Addresses for processes on that node. Other nodes can use only the TCP address, the last."""
    near = (endpoint.unix,) if endpoint.node_id == node_id else ()
    return near if endpoint.tcp is None else (*near, endpoint.tcp)


def _process(status: ProcessStatus) -> ProcessView:
    place = status.place
    return ProcessView(
        status.role,
        status.rank,
        place.pid,
        place.node_ip,
        place.gpu_ids,
        status.restarts,
        status.state,
    )


def placing(placed: Mapping[str, RolePlacement]) -> str:
    """The placement in words."""
    parts = []
    for role, each in placed.items():
        need = each.need
        kind = "GPU" if "GPU" in need.per_rank else "CPU"
        count = round(need.total[kind])
        who = "engine with its models" if role == ENGINE else role
        parts.append(f"{who} on {count} {kind}{'s' * (count > 1)}")
    return ", ".join(parts)
