"""The controller: places the models, starts their processes, and replaces what is lost.

A detached actor, known by name. It owns every process and placement group of a server, so they
end with it; Ray restarts it if it dies, and it then starts the others anew, as many and with such
settings as there were. Requests are held by the gateways, which hear of the new engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from outrider.cluster.events import Bookmark, Event, Journal, Kind, Pages
from outrider.cluster.kept_replica import Phase
from outrider.cluster.ray_rooms import RayRooms
from outrider.cluster.replica_set import ReplicaSet
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace

logger = logging.getLogger(__name__)

NAME = "outrider-controller"
NAMESPACE = "outrider"
ORPHAN_S = 60.0  # without a server that asks for news, nobody needs the models
ADOPTION_S = 10.0  # for a server to tell a successor what held last


@dataclass(frozen=True, slots=True)
class News:
    """What was said, and what holds now."""

    pages: Pages
    places: tuple[ReplicaPlace, ...]
    config: EngineConfig  # of the next replica, with their number


class Controller:
    """`run` serves until `shutdown`; everything else may be asked meanwhile."""

    def __init__(
        self,
        config: EngineConfig,
        secret: str,
        asker_node_id: str,
        environment: Mapping[str, str],
        *,
        can_grow: bool,
    ) -> None:
        os.environ.update(environment)  # which it hands on to all it starts
        self._is_successor = ray.get_runtime_context().was_current_actor_reconstructed
        self._journal = Journal()
        rooms = RayRooms(secret, self._journal.say, asker_node_id, can_grow=can_grow)
        self._set = ReplicaSet(config, rooms, self._journal.say, is_first=not self._is_successor)
        self._set.on_change.append(self._journal.wake)
        self._adopted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._asked_s = time.monotonic()

    # -- asked from outside -------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything and keep it running. Raises if it never came to run."""
        try:
            if self._is_successor:
                lost = "the controller was lost; all is started anew"
                self._journal.say(Event(Kind.TROUBLE, lost))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ADOPTION_S):
                        await self._adopted.wait()
            await first_of(self._set.run(), self._stopping.wait(), self._orphaned())
        finally:
            self._ended.set()
        if not self._stopping.is_set():
            leave: Any = ray.actor.exit_actor
            leave()

    async def adopt(self, config: EngineConfig) -> None:
        """To a successor that has not begun: what held last."""
        if not self._adopted.is_set():
            self._set.config = config
            self._adopted.set()

    async def news(self, bookmark: Bookmark, timeout_s: float) -> News:
        """Lines after the bookmark, waited for. Whoever serves keeps asking."""
        self._asked_s = time.monotonic()
        pages = await self._journal.read(bookmark, timeout_s)
        return News(pages, self._set.places, self._set.config)

    async def scale(self, num_replicas: int) -> None:
        await self._set.scale(num_replicas)

    async def roll_out(self, config: EngineConfig, is_draft_only: bool) -> None:
        await self._set.roll_out(config, is_draft_only=is_draft_only)

    async def view(self) -> ClusterView:
        found = self._set
        phase = Phase.ENDED if self._ended.is_set() else found.phase
        return ClusterView(
            f"Ray actor {NAME}",
            phase.value,
            found.restarts,
            found.draft_restarts,
            found.processes(),
            found.view(),
            num_configured=found.num_configured,
        )

    async def shutdown(self) -> None:
        """End every process; returns when they have."""
        self._stopping.set()
        await self._ended.wait()

    async def _orphaned(self) -> None:
        while time.monotonic() - self._asked_s < ORPHAN_S:
            await asyncio.sleep(1.0)
        logger.warning("nobody has asked for news for %g s: this server ends", ORPHAN_S)
