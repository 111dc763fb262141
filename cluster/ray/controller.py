"""The controller: places the models, starts their processes, and replaces lost ones.

A detached, named actor. It owns every process and placement group of a server, so they end with
it. If it dies, Ray restarts it, and it starts as many replicas with the same settings. Gateways
hold the requests and receive the new engines' addresses.

One server process (the driver) directs it at a time, by a lease. If the driver is lost, the next
server adopts the controller with its replicas. Without a driver for `ORPHAN_S` it ends.
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
from outrider.cluster.events import Bookmark, Event, EventKind, Journal, Pages
from outrider.cluster.operations import DONE, FAILED, UNDER_WAY
from outrider.cluster.ray.adoption import Changes, changes_between
from outrider.cluster.ray.backend import RayBackend
from outrider.cluster.ray.lease import DriverIdentity, Lease
from outrider.cluster.replica_set import ReplicaSet
from outrider.cluster.supervised_replica import ReplicaPhase
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.errors import ConfigError, OutriderError
from outrider.links.cluster_view import ClusterView, OperationView
from outrider.links.fleet_messages import ReplicaPlace

logger = logging.getLogger(__name__)

NAME = "outrider-controller"
NAMESPACE = "outrider"
ORPHAN_S = 600.0  # for a supervisor to restart the server, even after several crashes
ADOPTION_S = 10.0  # for a server to send a restarted controller the last settings


@dataclass(frozen=True, slots=True)
class News:
    """New events and the present state."""

    pages: Pages
    places: tuple[ReplicaPlace, ...]
    config: EngineConfig  # of the next replica, with the number of replicas


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a driver that claims the lease of a running controller."""

    is_granted: bool
    before: str = ""  # the last lease holder
    bookmark: Bookmark = field(default_factory=Bookmark)  # events before it are history
    secret: str = field(default="", repr=False)
    refusal: str = ""  # why the replicas cannot be adopted with the driver's settings
    change: str = ""  # what a rollout changes to reach these settings


class Controller:
    """`run` serves until `shutdown`; all other methods may be called meanwhile."""

    def __init__(
        self,
        config: EngineConfig,
        secret: str,
        server_node_id: str,
        environment: Mapping[str, str],
        *,
        can_grow: bool,
        is_first: bool = True,
    ) -> None:
        """Unless it `is_first`, such replicas have served before."""
        os.environ.update(environment)  # inherited by all processes it starts
        self._is_successor = ray.get_runtime_context().was_current_actor_reconstructed
        self._journal = Journal()
        backend = RayBackend(secret, self._journal.say, server_node_id, can_grow=can_grow)
        self._backend, self._secret = backend, secret
        is_first = is_first and not self._is_successor
        self._set = ReplicaSet(config, backend, self._journal.say, is_first=is_first)
        self._set.on_change.append(self._journal.wake)
        self._adopted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._driver_config = config  # that the driver started with, before any operation
        self._lease = Lease()
        self._operating = asyncio.Lock()
        self._operation: OperationView | None = None
        self._running: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None

    # -- remote methods -----------------------------------------------------------------------

    async def run(self) -> None:
        """Start everything and keep it running, or wait for an earlier call. Raises if the first
        start fails."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)
        if not self._stopping.is_set():
            leave: Any = ray.actor.exit_actor
            leave()

    async def _run(self) -> None:
        try:
            if self._is_successor:
                lost = "the controller was lost; all replicas are restarted"
                self._journal.say(Event(EventKind.TROUBLE, lost))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ADOPTION_S):
                        await self._adopted.wait()
            await first_of(self._set.run(), self._stopping.wait(), self._orphaned())
        finally:
            self._ended.set()

    async def secret(self) -> str:
        """The secret of the replicas' links, for a driver without one of its own."""
        return self._secret

    async def claim(self, driver: DriverIdentity, node_id: str, config: EngineConfig) -> Claim:
        """Take the lease for a driver on that node, unless another holds it. Replicas are brought
        to `config` by a rollout where that is possible while they serve."""
        holder = self._lease.holder
        before = "" if holder is None else holder.name
        if not self._lease.claim(driver):
            return Claim(is_granted=False, before=before)
        self._backend.server_node_id = node_id
        if self._is_successor and not self._adopted.is_set():
            self._driver_config = config
            await self.adopt(config)
        change, refusal = Changes({}, None), ""
        if holder is None or holder.id != driver.id:  # its own operations stand
            try:
                change = changes_between(self._driver_config, config)
            except ConfigError as error:
                refusal = str(error)
        if change.what:
            self._changing = asyncio.create_task(self._change(change, config))
        bookmark = self._journal.bookmark
        return Claim(True, before, bookmark, self._secret, refusal, change.what)

    async def _change(self, change: Changes, config: EngineConfig) -> None:
        """As an operator's scale and rollout would. A failure is rolled back and reported."""
        self._driver_config = config
        try:
            if change.num_replicas is not None:
                await self.scale(change.num_replicas)
            if change.settings:
                settings = self._set.config.to_settings() | dict(change.settings)
                await self.roll_out(EngineConfig.from_settings(settings), change.is_draft_only)
        except OutriderError as error:
            self._journal.say(Event(EventKind.TROUBLE, f"failed: {change.what}: {error}"))
        else:
            self._journal.say(Event(EventKind.REPAIR, f"done: {change.what}"))

    async def adopt(self, config: EngineConfig) -> None:
        """Give a restarted controller the last settings, before it starts replicas."""
        if not self._adopted.is_set():
            self._set.config = config
            self._adopted.set()

    async def news(self, driver: DriverIdentity, bookmark: Bookmark, timeout_s: float) -> News:
        """Long-polls for events after the bookmark. Each poll renews the driver's lease."""
        self._lease.renew(driver)
        pages = await self._journal.read(bookmark, timeout_s)
        return News(pages, self._set.places, self._set.config)

    async def scale(self, num_replicas: int) -> None:
        await self._operate(f"scale to {num_replicas}", lambda: self._set.scale(num_replicas))

    async def roll_out(self, config: EngineConfig, is_draft_only: bool) -> None:
        await self._operate(
            "roll out other settings",
            lambda: self._set.roll_out(config, is_draft_only=is_draft_only),
        )

    async def _operate(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run operations one after the other. An operation outlives the driver that began it."""
        async with self._operating:
            self._operation = OperationView(what, UNDER_WAY, "")
            try:
                await work()
            except BaseException as error:
                self._operation = OperationView(what, FAILED, str(error))
                raise
            self._operation = OperationView(what, DONE, "")

    async def leave(self, hosts: tuple[str, ...], limit_s: float) -> None:
        await self._set.leave(hosts, limit_s)

    async def view(self) -> ClusterView:
        found = self._set
        phase = ReplicaPhase.ENDED if self._ended.is_set() else found.phase
        return ClusterView(
            f"Ray actor {NAME}",
            phase.value,
            found.restarts,
            found.draft_restarts,
            found.processes(),
            found.view(),
            self._operation,
            num_configured=found.num_configured,
        )

    async def shutdown(self, driver: DriverIdentity) -> None:
        """End every process; returns once they have ended."""
        self._lease.renew(driver)
        self._stopping.set()
        await self._ended.wait()

    async def _orphaned(self) -> None:
        while self._lease.age_s < ORPHAN_S:
            await asyncio.sleep(1.0)
        logger.warning("no server has polled for %g s: the replicas end", ORPHAN_S)
