"""The controller: places the models, starts their processes, and replaces what is lost.

A detached actor, known by name. It owns every process and placement group of a server, so they
end with it; Ray restarts it if it dies, and it then starts the others anew. Requests are held by
the gateways, which find the new engine here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray

from outrider.cluster.actors import Endpoint
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Event, Journal, Kind, Pages
from outrider.cluster.placement import ENGINE, Placed, needs_of, place, release, settle_devices
from outrider.cluster.ray_facts import cluster_resources
from outrider.cluster.replica import ProcessStatus, Replica
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.config.colocation import settle_colocation
from outrider.engine.launch.restarts import Restarts, engine_back, engine_lost
from outrider.links.gateway_messages import EngineStatus

logger = logging.getLogger(__name__)

NAME = "outrider-controller"
NAMESPACE = "outrider"
ORPHAN_S = 60.0  # without a gateway that asks for news, nobody needs the models


class ServerState(StrEnum):
    """How far a server has got."""

    PLACING = "placing"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A server as its controller knows it."""

    state: ServerState
    processes: tuple[ProcessStatus, ...]
    restarts: int  # of engine and target
    draft_restarts: int
    engine: EngineStatus | None


class Controller:
    """`run` serves until `shutdown`; everything else may be asked meanwhile."""

    def __init__(self, config: EngineConfig, *, can_grow: bool) -> None:
        self._config = config
        self._can_grow = can_grow
        self._is_successor = ray.get_runtime_context().was_current_actor_reconstructed
        self._secret = secrets.token_hex(32)
        self._journal = Journal()
        self._replica: Replica | None = None
        self._serving = asyncio.Event()
        self._state = ServerState.PLACING
        self._restarts = 0
        self._draft_restarts = 0  # of replicas that are gone
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._asked_s = time.monotonic()

    # -- asked from outside -------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything and keep it running. Raises if it never came to run."""
        try:
            await first_of(self._supervise(), self._stopping.wait(), self._orphaned())
        finally:
            self._state = ServerState.ENDED
            self._ended.set()
        if not self._stopping.is_set():
            leave: Any = ray.actor.exit_actor
            leave()

    async def news(self, bookmark: Bookmark, timeout_s: float) -> Pages:
        """Lines after the bookmark, waited for. Whoever serves keeps asking."""
        self._asked_s = time.monotonic()
        return await self._journal.read(bookmark, timeout_s)

    async def endpoint(self) -> Endpoint:
        """Where the engine is, as soon as it is."""
        await self._serving.wait()
        assert self._replica is not None and self._replica.endpoint is not None
        return self._replica.endpoint

    async def status(self) -> ClusterStatus:
        replica = self._replica
        return ClusterStatus(
            self._state,
            () if replica is None else tuple(replica.processes(self._restarts)),
            self._restarts,
            self._draft_restarts + (0 if replica is None else replica.draft_restarts),
            None if replica is None else replica.status,
        )

    async def shutdown(self) -> None:
        """End every process; returns when they have."""
        self._stopping.set()
        await self._ended.wait()

    # -- at work ------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        has = await asyncio.to_thread(cluster_resources)
        num_gpus = int(has.get("GPU", 0))
        config = settle_devices(self._config, has_gpus=num_gpus > 0)
        config = settle_colocation(config, num_gpus)
        needs = needs_of(config)
        placed = await place(needs, config.cluster.placement_timeout_s, can_grow=self._can_grow)
        try:
            if self._is_successor:
                self._tell(Kind.TROUBLE, "the controller was lost; all is started anew")
            else:
                self._tell(Kind.STAGE, f"placed: {_placing(placed)}")
            await self._keep_replica(config, placed)
        finally:
            release(placed)

    async def _keep_replica(self, config: EngineConfig, placed: Mapping[str, Placed]) -> None:
        restarts = Restarts(is_first=not self._is_successor)
        while True:
            is_first = restarts.is_first
            say = self._journal.say if is_first else self._say_trouble
            replica = self._replica = Replica(config, self._secret, placed, say)
            self._state = ServerState.STARTING if is_first else ServerState.RESTARTING
            try:
                await replica.start()
                away_s = restarts.runs()
                if not is_first:
                    self._tell(Kind.REPAIR, engine_back(away_s, replica.pids))
                self._state = ServerState.SERVING
                self._serving.set()
                reason = await replica.watch()
                pause_s = restarts.lost()
            except ClusterError as error:
                if restarts.is_first:
                    raise
                reason, pause_s = str(error), restarts.lost()
            finally:
                self._serving.clear()
                await replica.end()
            self._tell(Kind.TROUBLE, engine_lost(reason, pause_s))
            await asyncio.sleep(pause_s)
            self._restarts += 1
            self._draft_restarts += replica.draft_restarts

    async def _orphaned(self) -> None:
        while time.monotonic() - self._asked_s < ORPHAN_S:
            await asyncio.sleep(1.0)
        logger.warning("nobody has asked for news for %g s: this server ends", ORPHAN_S)

    def _tell(self, kind: Kind, text: str) -> None:
        self._journal.say(Event(kind, text))

    def _say_trouble(self, event: Event) -> None:
        """Of a start that repeats an earlier one only trouble is news."""
        if event.kind is not Kind.STAGE:
            self._journal.say(event)


def _placing(placed: Mapping[str, Placed]) -> str:
    parts = []
    for role, each in placed.items():
        need = each.need
        kind = "GPU" if "GPU" in need.per_rank else "CPU"
        count = round(need.total[kind])
        who = "engine with its models" if role == ENGINE else role
        parts.append(f"{who} on {count} {kind}{'s' * (count > 1)}")
    return ", ".join(parts)
