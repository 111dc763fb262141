"""The controller: places the models, starts their processes, and replaces what is lost.

A detached actor, known by name. It owns every process and placement group of a server, so they
end with it; Ray restarts it if it dies, and it then starts the others anew, as many and with such
settings as there were. Requests are held by the gateways, which hear of the new engines.

One server's process directs it at a time. When that one is lost, the next one adopts it with all
that runs; without any for `ORPHAN_S` it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from outrider.cluster.adoption import Changes, changes_between
from outrider.cluster.events import Bookmark, Event, Journal, Kind, Pages
from outrider.cluster.kept_replica import Phase
from outrider.cluster.lease import Driver, Lease
from outrider.cluster.orders import DONE, FAILED, UNDER_WAY
from outrider.cluster.ray_rooms import RayRooms
from outrider.cluster.replica_set import ReplicaSet
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.errors import ConfigError, OutriderError
from outrider.links.cluster_view import ClusterView, OrderView
from outrider.links.fleet_messages import ReplicaPlace

logger = logging.getLogger(__name__)

NAME = "outrider-controller"
NAMESPACE = "outrider"
ORPHAN_S = 600.0  # for a supervisor to have the next server run, after crashes in a row as well
ADOPTION_S = 10.0  # for a server to tell a successor what held last


@dataclass(frozen=True, slots=True)
class News:
    """What was said, and what holds now."""

    pages: Pages
    places: tuple[ReplicaPlace, ...]
    config: EngineConfig  # of the next replica, with their number


@dataclass(frozen=True, slots=True)
class Claim:
    """What a driver learns that wants to direct a controller which runs already."""

    is_granted: bool
    before: str = ""  # the driver that directed it last
    bookmark: Bookmark = field(default_factory=Bookmark)  # what was said before is history
    secret: str = field(default="", repr=False)
    refusal: str = ""  # why these replicas cannot be adopted with the driver's settings
    change: str = ""  # what is changed about them, so that they have these settings


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
        is_first: bool = True,
    ) -> None:
        """Unless it `is_first`, replicas like these have served before."""
        os.environ.update(environment)  # which it hands on to all it starts
        self._is_successor = ray.get_runtime_context().was_current_actor_reconstructed
        self._journal = Journal()
        rooms = RayRooms(secret, self._journal.say, asker_node_id, can_grow=can_grow)
        self._rooms, self._secret = rooms, secret
        is_first = is_first and not self._is_successor
        self._set = ReplicaSet(config, rooms, self._journal.say, is_first=is_first)
        self._set.on_change.append(self._journal.wake)
        self._adopted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._given = config  # that the driver began with, before any orders
        self._lease = Lease()
        self._ordering = asyncio.Lock()
        self._order: OrderView | None = None
        self._running: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None

    # -- asked from outside -------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything and keep it running, or wait for what was begun; raises if it never
        came to run."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)
        if not self._stopping.is_set():
            leave: Any = ray.actor.exit_actor
            leave()

    async def _run(self) -> None:
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

    async def secret(self) -> str:
        """That of the replicas' links, for a driver that was given none."""
        return self._secret

    async def claim(self, driver: Driver, node_id: str, wanted: EngineConfig) -> Claim:
        """Direct it from now on, from that node, unless another driver does; replicas come to have
        the `wanted` settings where that is possible while they serve."""
        holder = self._lease.holder
        before = "" if holder is None else holder.name
        if not self._lease.claim(driver):
            return Claim(is_granted=False, before=before)
        self._rooms.asker_node_id = node_id
        if self._is_successor and not self._adopted.is_set():
            self._given = wanted
            await self.adopt(wanted)
        change, refusal = Changes({}, None), ""
        if holder is None or holder.id != driver.id:  # else it wants what it has ordered
            try:
                change = changes_between(self._given, wanted)
            except ConfigError as error:
                refusal = str(error)
        if change.what:
            self._changing = asyncio.create_task(self._change(change, wanted))
        bookmark = self._journal.bookmark
        return Claim(True, before, bookmark, self._secret, refusal, change.what)

    async def _change(self, change: Changes, wanted: EngineConfig) -> None:
        """As an order would; a failure leaves the replicas as they were, and is reported."""
        self._given = wanted
        try:
            if change.num_replicas is not None:
                await self.scale(change.num_replicas)
            if change.settings:
                settings = self._set.config.to_settings() | dict(change.settings)
                await self.roll_out(EngineConfig.from_settings(settings), change.is_draft_only)
        except OutriderError as error:
            self._journal.say(Event(Kind.TROUBLE, f"not done ({change.what}): {error}"))
        else:
            self._journal.say(Event(Kind.REPAIR, f"done: {change.what}"))

    async def adopt(self, config: EngineConfig) -> None:
        """To a successor that has not begun: what held last."""
        if not self._adopted.is_set():
            self._set.config = config
            self._adopted.set()

    async def news(self, driver: Driver, bookmark: Bookmark, timeout_s: float) -> News:
        """Lines after the bookmark, waited for. The driver keeps asking: that renews its lease."""
        self._lease.renew(driver)
        pages = await self._journal.read(bookmark, timeout_s)
        return News(pages, self._set.places, self._set.config)

    async def scale(self, num_replicas: int) -> None:
        await self._ordered(f"scale to {num_replicas}", lambda: self._set.scale(num_replicas))

    async def roll_out(self, config: EngineConfig, is_draft_only: bool) -> None:
        await self._ordered(
            "roll out other settings",
            lambda: self._set.roll_out(config, is_draft_only=is_draft_only),
        )

    async def _ordered(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One after the other: what a driver has ordered goes on when that one is lost."""
        async with self._ordering:
            self._order = OrderView(what, UNDER_WAY, "")
            try:
                await work()
            except BaseException as error:
                self._order = OrderView(what, FAILED, str(error))
                raise
            self._order = OrderView(what, DONE, "")

    async def leave(self, hosts: tuple[str, ...], limit_s: float) -> None:
        await self._set.leave(hosts, limit_s)

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
            self._order,
            num_configured=found.num_configured,
        )

    async def shutdown(self, driver: Driver) -> None:
        """End every process; returns when they have."""
        self._lease.renew(driver)
        self._stopping.set()
        await self._ended.wait()

    async def _orphaned(self) -> None:
        while self._lease.age_s < ORPHAN_S:
            await asyncio.sleep(1.0)
        logger.warning("no server has asked for news for %g s: the replicas end", ORPHAN_S)
