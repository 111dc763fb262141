"""The replicas that a gateway knows, a link to each, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.api_types.errors import UnavailableError
from outrider.gateway.routing.engine_link import EngineAddress, EngineLink
from outrider.gateway.routing.missing_replicas import MissingReplicas, short_name
from outrider.gateway.routing.prefixes import Path, PrefixMemory, choose, order_of, path_of
from outrider.links.address import UnixAddress, parse
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from outrider.links.gateway_messages import EngineFacts, EngineStatus, ExplainSpeculationResult
from outrider.links.speculation import SpeculationChange, SpeculationSettings
from outrider.scheduler.types import RequestSpec

logger = logging.getLogger(__name__)

# For first connections, before a request is looked for on the connected replicas only.
SETTLE_S = 2.0
# How long an unreachable replica is dialled once its controller is gone as well. Both may return
# at the same addresses, as after a network interruption of this host.
ORPHAN_S = 60.0
AWAY = "away"
_FIXED = "engine"  # the name of a replica at a fixed address, without a controller

Model: TypeAlias = tuple[object, ...]


def model_of(facts: EngineFacts) -> Model:
    """What two engines must share for a text to continue on the other."""
    settings = facts.settings
    return settings.get("target.model"), settings.get("target.revision"), facts.vocab_size


@dataclass(frozen=True, slots=True)
class Route:
    """What decides which replica a request goes to."""

    model: Model
    path: Path


class ReplicaLink:
    """One replica: its place, as published by a controller, and the link to its engine."""

    def __init__(self, name: str, controller: str, place: ReplicaPlace) -> None:
        self.name = name
        self.controller = controller
        self.place = place
        self.is_orphan = False  # its controller is gone
        self.orphan_until_s: float | None = None  # while it cannot be reached either
        self.link: EngineLink
        self.task: asyncio.Task[None]
        self._moved = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether it takes new requests."""
        return self.link.connected and self.place.state is ReplicaState.SERVING

    @property
    def is_expected(self) -> bool:
        """Whether its first connection is under way and no attempt has failed yet."""
        is_there = self.place.state is not ReplicaState.STARTING and bool(self.place.addresses)
        return is_there and not (self.link.num_connections or self.link.num_failures)

    @property
    def state(self) -> str:
        if self.link.connected or self.place.state is ReplicaState.STARTING:
            return self.place.state.value
        return AWAY if self.link.num_connections else ReplicaState.STARTING.value

    def is_expired(self) -> bool:
        """Whether neither it nor its controller was reached for `ORPHAN_S`; call it before every
        attempt to connect."""
        if not self.is_orphan or not self.link.num_failures:
            self.orphan_until_s = None
            return False
        now_s = time.monotonic()
        if self.orphan_until_s is None:
            self.orphan_until_s = now_s + ORPHAN_S
        return now_s >= self.orphan_until_s

    def move(self, place: ReplicaPlace) -> None:
        self.place = place
        self.is_orphan = False
        self.link.keep_only(place.addresses)
        self._moved.set()

    async def address(self) -> str:
        """Wait until the replica has started and has an address."""
        while self.place.state is ReplicaState.STARTING or not self.place.addresses:
            self._moved.clear()
            await self._moved.wait()
        found = reachable(self.place.addresses)
        return found[self.link.num_failures % len(found)]


def reachable(addresses: Sequence[str]) -> list[str]:
    """The addresses to try in turn: Unix sockets that exist on this host, then TCP. With neither, a
    socket that may still appear."""
    parsed = [(parse(address), address) for address in addresses]
    sockets = [text for place, text in parsed if isinstance(place, UnixAddress)]
    here = [text for text in sockets if os.path.exists(text.partition(":")[2])]
    remote = [text for place, text in parsed if not isinstance(place, UnixAddress)]
    return [*here, *remote] or sockets


class ReplicaLinks:
    """Keeps a link to each replica that controllers have published.

    `secret` is shared by all processes of the server. `on_connect` and `on_change` are passed to
    every link; the latter also runs when places change.
    """

    def __init__(
        self,
        secret: str,
        on_connect: Callable[[EngineFacts], Awaitable[None]],
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._secret = secret
        self._on_connect = on_connect
        self._on_change = on_change
        self._replicas: dict[str, ReplicaLink] = {}
        self.missing = MissingReplicas()
        self._memory = PrefixMemory()
        self._numbers, self._handles = itertools.count(1), itertools.count(1)
        self._change = SpeculationChange()
        self._changed = asyncio.Event()
        self._is_draining = False
        self.on_speculation: Callable[[SpeculationChange], None] | None = None

    def __iter__(self) -> Iterator[ReplicaLink]:
        """By name."""
        return iter(sorted(self._replicas.values(), key=lambda each: each.name))

    def short(self, name: str) -> str:
        """The name without its controller's, if that is unique."""
        names = [*self._replicas, *self.missing]
        short = short_name(name)
        is_plain = name in names and list(map(short_name, names)).count(short) == 1
        return short if is_plain else name

    # -- replicas, as controllers publish them ------------------------------------------------

    async def publish_fixed(self, address: str) -> None:
        """Add a replica at a fixed address, without a controller."""
        parse(address)
        place = ReplicaPlace(_FIXED, (address,), ReplicaState.SERVING)
        await self.publish("", (place,))

    async def publish(self, controller: str, places: Iterable[ReplicaPlace]) -> None:
        """Set all replicas of the controller. Requests on those it dropped move to others."""
        named = {qualified(controller, place.name): place for place in places}
        for replica in self:
            if replica.name not in named and replica.controller == controller:
                self._drop(replica)
        for name, place in named.items():
            if name not in self._replicas:
                self._adopt(name, controller, place)
            if (known := self._replicas.get(name)) is not None:
                known.move(place)
            else:
                self._add(ReplicaLink(name, controller, place))
                self.missing.find(name)
        await self._notify_change()

    def _adopt(self, name: str, controller: str, place: ReplicaPlace) -> None:
        """A restarted controller has new names for the same engines: keep the link and its
        requests."""
        for replica in self:
            if replica.is_orphan and set(place.addresses).intersection(replica.place.addresses):
                del self._replicas[replica.name]
                replica.name, replica.controller = name, controller
                self._replicas[name] = replica
                return

    async def forget(self, controller: str) -> None:
        """The controller is gone: its replicas serve on while they can be reached, and are dialled
        for `ORPHAN_S` after that."""
        for replica in self:
            if replica.controller == controller:
                replica.is_orphan = True
                if not replica.place.addresses:  # unreachable without its controller
                    self._lose(replica)
        await self._notify_change()

    def _add(self, replica: ReplicaLink) -> None:
        async def locate() -> EngineAddress:
            if replica.is_expired():
                self._lose(replica)
                raise UnavailableError(f"{replica.name} is gone, and so is its controller.")
            return EngineAddress(await replica.address(), self._secret)

        replica.link = EngineLink(
            locate,
            self._on_connect,
            self._notify_change,
            numbers=self._numbers,
            handles=self._handles,
        )
        replica.link.is_draining = self._is_draining
        replica.link.remember_speculation(self._change)
        replica.link.on_speculation = self._on_speculation_changed
        replica.task = asyncio.create_task(replica.link.run(), name=f"outrider-{replica.name}")
        self._replicas[replica.name] = replica

    def _drop(self, replica: ReplicaLink) -> None:
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
            replica.task.cancel()

    def _lose(self, replica: ReplicaLink) -> None:
        """Drop it; it counts as missing unless it was drained or replaced."""
        names = list(self._replicas)
        later = names[names.index(replica.name) + 1 :] if replica.name in names else names
        is_replaced = short_name(replica.name) in map(short_name, later)
        is_drained = replica.place.state is ReplicaState.DRAINING or self._is_draining
        self._drop(replica)
        if not is_drained and not is_replaced:
            self.missing.lose(replica.name)

    @property
    def num_published(self) -> int:
        """Published replicas that are not draining."""
        return sum(each.place.state is not ReplicaState.DRAINING for each in self)

    @property
    def num_usable(self) -> int:
        return sum(each.is_usable for each in self)

    async def _notify_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        await self._on_change()

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set at the next change; get it before reading what may change."""
        return self._changed

    def drain(self) -> None:
        """No new requests follow: lost links are not logged as errors, nor counted as missing."""
        self._is_draining = True
        for replica in self:
            replica.link.is_draining = True

    async def stop(self) -> None:
        tasks = [replica.task for replica in self]
        for replica in self:
            self._drop(replica)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # -- routing ------------------------------------------------------------------------------

    @property
    def is_any_usable(self) -> bool:
        return bool(self._open())

    def _open(self) -> list[ReplicaLink]:
        """The replicas that take new requests: those that serve, or draining ones while no link to
        their successors is up."""
        serving = [replica for replica in self if replica.is_usable]
        draining = [replica for replica in self if replica.place.state is ReplicaState.DRAINING]
        if serving or len(draining) == len(self._replicas):
            return serving
        return [replica for replica in draining if replica.link.connected]

    def route(self, spec: RequestSpec, facts: EngineFacts) -> Route:
        """The route of a request that was prepared for an engine with these facts."""
        block_size = int(facts.settings["cache.block_size"])
        path = path_of(spec.prompt_ids, block_size, spec.cache_salt)
        return Route(model_of(facts), path)

    def remember(self, route: Route) -> None:
        """Record a request for prefix-aware routing."""
        self._memory.remember(route.path)

    def choose(self, route: Route, exclude: Collection[EngineLink] = ()) -> EngineLink | None:
        """The replica for a request; None while there is none."""
        usable = {
            replica.name: replica.link
            for replica in self._open()
            if replica.link not in exclude and self._has_model(replica, route.model)
        }
        if not usable:
            return None
        key = self._memory.key_of(route.path, len(usable))
        return usable[choose(key, {name: link.load for name, link in usable.items()})]

    def all_have_other_model(self, model: Model) -> bool:
        """Whether all replicas are connected and have another model."""
        connected = [replica for replica in self if replica.link.connected]
        return len(connected) == len(self._replicas) > 0 and not any(
            self._has_model(replica, model) for replica in connected
        )

    async def holders(self, route: Route | None = None) -> list[EngineLink]:
        """The replicas that may hold a detached request, the likeliest first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while (changed := self._changed) and any(each.is_expected for each in self):
                    await changed.wait()
        links = {
            replica.name: replica.link
            for replica in self
            if replica.link.connected and (route is None or self._has_model(replica, route.model))
        }
        if route is None or not links:
            return list(links.values())
        key = self._memory.key_of(route.path, len(links))
        return [links[name] for name in order_of(key, links)]

    def _has_model(self, replica: ReplicaLink, model: Model) -> bool:
        facts = replica.link.facts
        return facts is not None and model_of(facts) == model

    # -- queries to engines -------------------------------------------------------------------

    @property
    def connected(self) -> list[ReplicaLink]:
        """Connected replicas, those that take new requests first."""
        found = [replica for replica in self if replica.link.connected]
        return sorted(found, key=lambda each: not each.is_usable)

    async def statuses(self) -> dict[str, EngineStatus | None]:
        """The status of each replica by name; None of those that do not answer."""
        replicas = list(self)
        found = await asyncio.gather(*(_status_of(each.link) for each in replicas))
        return {replica.name: status for replica, status in zip(replicas, found, strict=True)}

    async def set_speculation(self, change: SpeculationChange) -> SpeculationSettings:
        """Change all engines, and those that start later; returns the first one's settings."""
        links = [replica.link for replica in self._some_connected()]
        found = await asyncio.gather(
            *(link.set_speculation(change) for link in links), return_exceptions=True
        )
        for each in found:
            if isinstance(each, BaseException):
                raise each
        first = found[0]
        assert isinstance(first, SpeculationSettings)
        return first

    async def explain_speculation(self, step: int | None, last: int) -> ExplainSpeculationResult:
        """The step accounts of the first connected engine."""
        return await self._some_connected()[0].link.explain_speculation(step, last)

    def remember_speculation(self, change: SpeculationChange) -> None:
        """Record a change for engines that connect later."""
        self._change = self._change.followed_by(change)
        for replica in self:
            replica.link.remember_speculation(change)

    def _on_speculation_changed(self, change: SpeculationChange) -> None:
        self.remember_speculation(change)
        if self.on_speculation is not None:
            self.on_speculation(change)

    def _some_connected(self) -> list[ReplicaLink]:
        if not (found := self.connected):
            raise UnavailableError("no engine is connected; wait for it to start.")
        return found


def qualified(controller: str, name: str) -> str:
    """A replica's name, unique among all controllers."""
    return f"{controller}/{name}" if controller else name


async def _status_of(link: EngineLink) -> EngineStatus | None:
    try:
        return await link.status()
    except UnavailableError:
        return None
