"""Room in a Ray cluster for replicas, and the replicas in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ray.exceptions import RayError

from outrider.cluster.actors import Endpoint
from outrider.cluster.errors import PlacementError
from outrider.cluster.events import Event, Kind, Say, stage_reporter
from outrider.cluster.kept_replica import Room
from outrider.cluster.placement import ENGINE, Placed, needs_of, place, release, settle_devices
from outrider.cluster.probe import probe
from outrider.cluster.ray_facts import cluster_resources, live_nodes
from outrider.cluster.replica import ProcessStatus, Replica
from outrider.cluster.spares import Spares
from outrider.config import EngineConfig
from outrider.config.colocation import settle_colocation
from outrider.gateway.replicas import reachable
from outrider.links.cluster_view import ProcessView
from outrider.stages import stage


@dataclass(frozen=True, slots=True)
class RayRoom:
    """What one replica has: room by role, and who waits there to take over."""

    placed: Mapping[str, Placed]
    spares: Spares


class RayRooms:
    """See `outrider.cluster.kept_replica.Rooms`: a placement group for each role. Places are told
    as seen from the node of `asker_node_id`."""

    def __init__(self, secret: str, say: Say, asker_node_id: str, *, can_grow: bool) -> None:
        self._secret = secret
        self._say = say
        self.asker_node_id = asker_node_id
        self._can_grow = can_grow
        self._avoided: frozenset[str] = frozenset()  # nodes by id

    async def settle(self, config: EngineConfig) -> EngineConfig:
        has = await asyncio.to_thread(cluster_resources)
        num_gpus = int(has.get("GPU", 0))
        return settle_colocation(settle_devices(config, has_gpus=num_gpus > 0), num_gpus)

    async def find(self, config: EngineConfig, timeout_s: float) -> RayRoom:
        try:
            with stage_reporter(self._say), stage("waiting for room in the Ray cluster"):
                placed = await place(
                    needs_of(config), timeout_s, can_grow=self._can_grow, avoid=self._avoided
                )
        except RayError as error:
            raise PlacementError(f"no room could be reserved: {error}") from error
        self._say(Event(Kind.STAGE, f"placed: {placing(placed)}"))
        return RayRoom(placed, Spares(are_wanted=config.cluster.standby))

    def give_back(self, room: Room) -> None:
        room.spares.close()
        release(room.placed)

    async def avoid(self, hosts: Collection[str]) -> None:
        """By their ids: the address of a pod may be another's later."""
        nodes = await asyncio.to_thread(live_nodes)
        ids = {node.id for node in nodes if node.id in self._avoided or node.ip in hosts}
        self._avoided = frozenset(ids)

    def life(self, config: EngineConfig, room: Room, say: Say) -> RayLife:
        replica = Replica(config, self._secret, room.placed, room.spares, say)
        return RayLife(replica, lambda: self.asker_node_id, self._secret)


class RayLife:
    """See `outrider.cluster.kept_replica.Life`."""

    def __init__(self, replica: Replica, asker_node_id: Callable[[], str], secret: str) -> None:
        self._replica = replica
        self._secret = secret
        self._asker_node_id = asker_node_id

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
        if addresses := reachable(self.addresses):  # else no gateway is where this process is
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
    """For processes on that node; those elsewhere have to do with the last of them."""
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


def placing(placed: Mapping[str, Placed]) -> str:
    """In words: who was placed on what."""
    parts = []
    for role, each in placed.items():
        need = each.need
        kind = "GPU" if "GPU" in need.per_rank else "CPU"
        count = round(need.total[kind])
        who = "engine with its models" if role == ENGINE else role
        parts.append(f"{who} on {count} {kind}{'s' * (count > 1)}")
    return ", ".join(parts)
