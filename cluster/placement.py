"""Room for the ranks of each role: one placement group a role, one bundle a rank.

Target and draft never share a bundle: they are other processes, on other GPUs, and come and go
independently. An engine that holds both (`cluster.colocate`) has one bundle for itself.

Which nodes they go to is decided here, by what is free and by labels (`outrider.cluster.rooms`),
and each bundle is then asked for on its node. Ray would not move such a bundle when its node is
lost: `renew` and `place_anew` do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ray.util import placement_group, placement_group_table, remove_placement_group

from outrider.cluster.capacity import PASS_BYTES, least_gpu_bytes
from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.no_room import ENGINE as ENGINE
from outrider.cluster.no_room import no_room, too_small
from outrider.cluster.ray_facts import Node, live_node_ids, live_nodes
from outrider.cluster.rooms import Need, Room, as_if_empty, find_rooms
from outrider.config import EngineConfig
from outrider.engine.over_ranks import group_sizes
from outrider.errors import ConfigError
from outrider.links.rank_messages import Role

_POLL_S = 1
_TAKE_S = 5.0  # for what was found free to be ours; then somebody else was quicker
_NODE_ID = "ray.io/node-id"


@dataclass(slots=True)
class Placed:
    """The room a role has at present."""

    need: Need
    group: Any  # a placement group
    node_ids: tuple[str, ...]  # by rank; none if it has lost it and was not given another yet

    def is_within(self, alive: Set[str]) -> bool:
        """Whether it is there, on nodes that are."""
        return bool(self.node_ids) and set(self.node_ids) <= alive


def settle_devices(config: EngineConfig, has_gpus: bool) -> EngineConfig:
    """The configuration with "auto" decided: a rank sees only what it was given."""
    devices = {Role.TARGET: config.target.device, Role.DRAFT: config.draft.device}
    for role, device in devices.items():
        if device.startswith("cuda:"):
            raise ConfigError(
                f"{role}.device is {device!r} but Ray chooses the GPUs of a cluster; set it to "
                "cuda."
            )
    if devices[Role.TARGET] == "auto":
        devices[Role.TARGET] = "cuda" if has_gpus else "cpu"
    if devices[Role.DRAFT] == "auto":
        devices[Role.DRAFT] = devices[Role.TARGET]
    return dataclasses.replace(
        config,
        target=dataclasses.replace(config.target, device=devices[Role.TARGET]),
        draft=dataclasses.replace(config.draft, device=devices[Role.DRAFT]),
    )


def needs_of(config: EngineConfig) -> list[Need]:
    """For a configuration whose devices are settled."""
    devices: dict[str, str] = {
        Role.TARGET: config.target.device,
        Role.DRAFT: config.draft.device,
    }
    labels = {
        Role.TARGET: _labels("target", config.cluster.target_labels),
        Role.DRAFT: _labels("draft", config.cluster.draft_labels),
    }
    cpu, gpu = {"CPU": 1.0}, {"GPU": 1.0, "CPU": 1.0}
    if config.cluster.colocate:
        has_gpu = devices[Role.TARGET] == "cuda"
        num_models = 1 if config.draft.model is None else 2
        bundle = (gpu if has_gpu else cpu) | {"CPU": float(num_models)}
        least = _least_of_both(config) if has_gpu else None
        return [Need(ENGINE, 1, bundle, labels[Role.TARGET], least, _names(config, ENGINE))]
    needs = []
    for role, size in group_sizes(config).items():
        has_gpu = devices[role] == "cuda"
        least = least_gpu_bytes(config, role) if has_gpu else None
        bundle = gpu if has_gpu else cpu
        needs.append(Need(role, size, bundle, labels[Role(role)], least, _names(config, role)))
    return needs


def _labels(role: str, given: Sequence[str]) -> dict[str, str]:
    found = dict(each.partition("=")[::2] for each in given)
    for key, value in found.items():
        if not key or not value or not set(value).isdisjoint("!()"):
            raise ConfigError(
                f"cluster.{role}_labels has {f'{key}={value}'!r}; each must be the name of a label "
                "and its one value, as zone=a."
            )
    return found


def _least_of_both(config: EngineConfig) -> int | None:
    target = least_gpu_bytes(config, Role.TARGET)
    draft = 0 if config.draft.model is None else least_gpu_bytes(config, Role.DRAFT)
    return None if target is None or draft is None else target + draft - PASS_BYTES


def _names(config: EngineConfig, role: str) -> str:
    if role == ENGINE:
        return " and ".join(filter(None, (config.target.model, config.draft.model)))
    return (config.target.model if role == Role.TARGET else config.draft.model) or ""


# -- reserving ------------------------------------------------------------------------------------


async def place(
    needs: Sequence[Need],
    timeout_s: float,
    *,
    can_grow: bool,
    near: Collection[str] = (),
    avoid: Set[str] = frozenset(),
) -> dict[str, Placed]:
    """Room for every role, or for none: `PlacementError` says which one has none.

    A second role is put on the nodes of the first if it fits there, a lonely one on those that
    are `near`, and none on those to `avoid`, which are about to end. A cluster that cannot grow is
    not waited for if it is too small.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        nodes = await _nodes_but(avoid)
        for need in needs:
            if (refusal := too_small(need, nodes)) is not None:
                raise PlacementError(refusal)
        rooms = find_rooms(needs, nodes, near)
        if rooms is not None:
            take_by_s = min(deadline_s, time.monotonic() + _TAKE_S)
            placed = await _reserve_all([_pinned(room) for room in rooms], take_by_s)
            if placed is not None:
                return placed
        elif find_rooms(needs, as_if_empty(nodes), near) is None:
            if not can_grow:
                raise PlacementError(_no_room(needs, as_if_empty(nodes), nodes))
            # Not on nodes by name: whoever adds nodes to this cluster sees what is missing.
            asked = [_anywhere(need, nodes) for need in needs]
            placed = await _reserve_all(asked, deadline_s)
            if placed is not None and not any(avoid & set(e.node_ids) for e in placed.values()):
                return placed
            release(placed or {})
        if time.monotonic() >= deadline_s:
            nodes = await _nodes_but(avoid)
            raise PlacementError(_no_room(needs, nodes, nodes, timeout_s))
        await asyncio.sleep(_POLL_S)


async def _nodes_but(avoid: Set[str]) -> list[Node]:
    return [each for each in await asyncio.to_thread(live_nodes) if each.id not in avoid]


def release(placed: Mapping[str, Placed]) -> None:
    for each in placed.values():
        remove_placement_group(each.group)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A placement group to be asked for."""

    need: Need
    strategy: str
    selectors: list[dict[str, str]]

    def reserve(self) -> Any:
        bundles = [dict(self.need.per_rank) for _ in range(self.need.num_ranks)]
        return placement_group(
            bundles,
            strategy=self.strategy,
            name=f"outrider-{self.need.role}-{secrets.token_hex(4)}",
            bundle_label_selector=self.selectors,
        )


def _pinned(room: Room) -> _Wanted:
    strategy = "STRICT_PACK" if room.is_one_node else "PACK"
    return _Wanted(room.need, strategy, [{_NODE_ID: node_id} for node_id in room.node_ids])


def _anywhere(need: Need, nodes: Sequence[Node]) -> _Wanted:
    """On one node if there are such large ones."""
    rooms = find_rooms([need], as_if_empty(nodes))
    is_one_node = rooms is not None and rooms[0].is_one_node
    selectors = [dict(need.labels) for _ in range(need.num_ranks)]
    return _Wanted(need, "STRICT_PACK" if is_one_node else "PACK", selectors)


async def _reserve_all(wanted: Sequence[_Wanted], deadline_s: float) -> dict[str, Placed] | None:
    """None, and nothing is held, unless all of it is there by then."""
    placed = {each.need.role: Placed(each.need, each.reserve(), ()) for each in wanted}
    try:
        for each in placed.values():
            if not await _is_ready(each.group, deadline_s):
                release(placed)
                return None
            each.node_ids = await asyncio.to_thread(_nodes_of, each.group)
    except BaseException:
        release(placed)
        raise
    return placed


async def _is_ready(group: Any, deadline_s: float) -> bool:
    while not await asyncio.to_thread(group.wait, _POLL_S):
        if time.monotonic() > deadline_s:
            return False
    return True


def _nodes_of(group: Any) -> tuple[str, ...]:
    found: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return tuple(found[index] for index in sorted(found))


def _no_room(
    needs: Sequence[Need],
    searched: Sequence[Node],
    nodes: Sequence[Node],
    waited_s: float | None = None,
) -> str:
    """Of the first that has no room where it was searched for, or none beside those before it."""
    alone = range(1, len(needs) + 1)
    number = next((each for each in alone if find_rooms(needs[:each], searched) is None), alone[-1])
    return no_room(needs[number - 1], nodes, waited_s, needs[: number - 1])


# -- nodes that are lost --------------------------------------------------------------------------


async def renew(placed: Mapping[str, Placed], timeout_s: float, *, can_grow: bool) -> list[str]:
    """Before a replica is started in room that another had: place anew what was on nodes that are
    gone. Which roles were."""
    alive = await asyncio.to_thread(live_node_ids)
    lost = [role for role, each in placed.items() if not each.is_within(alive)]
    if lost == [Role.DRAFT]:
        await place_anew(placed, Role.DRAFT, timeout_s, can_grow=can_grow)
    elif lost:  # the draft is to be near its target again
        release(placed)
        for each in placed.values():
            each.node_ids = ()
        needs = [each.need for each in placed.values()]
        found = await place(needs, timeout_s, can_grow=can_grow)
        for role, each in found.items():
            placed[role].group, placed[role].node_ids = each.group, each.node_ids
    return lost


async def place_anew(
    placed: Mapping[str, Placed],
    role: str,
    timeout_s: float,
    *,
    can_grow: bool,
    need: Need | None = None,
) -> None:
    """Give one role other room, for what it needs now or for another `need`: near the target."""
    mine = placed[role]
    near = [node for other, each in placed.items() if other != role for node in each.node_ids]
    remove_placement_group(mine.group)
    mine.node_ids = ()
    wanted = need or mine.need
    found = (await place([wanted], timeout_s, can_grow=can_grow, near=near))[role]
    mine.need, mine.group, mine.node_ids = wanted, found.group, found.node_ids


async def raise_if_lost(placed: Iterable[Placed]) -> None:
    """Wait until a node of theirs is gone, and raise `ClusterError`: what Ray was asked to start
    there never starts."""
    rooms = list(placed)
    while True:
        alive = await asyncio.to_thread(live_node_ids)
        for each in rooms:
            if not each.is_within(alive):
                raise ClusterError(f"a node was lost, with room for the {each.need.role} on it")
        await asyncio.sleep(_POLL_S)
