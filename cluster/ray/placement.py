"""Places the ranks of each role: one placement group per role, one bundle per rank.

Target and draft never share a bundle: they are separate processes on separate GPUs with separate
lifecycles. An engine that holds both (`cluster.colocate`) has one bundle.

`outrider.cluster.ray.node_assignment` chooses the nodes by free resources and labels; each bundle
is then pinned to its node. Ray does not move a pinned bundle if its node is lost: `renew` and
`place_again` do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.ray.capacity import PASS_BYTES, least_gpu_bytes
from outrider.cluster.ray.facts import Node, live_node_ids, live_nodes
from outrider.cluster.ray.node_assignment import Need, NodeAssignment, as_if_empty, assign_nodes
from outrider.cluster.ray.placement_errors import ENGINE as ENGINE
from outrider.cluster.ray.placement_errors import gpus_too_small, insufficient_resources
from outrider.config import EngineConfig
from outrider.engine.over_ranks import group_sizes
from outrider.errors import ConfigError
from outrider.links.rank_messages import Role
from ray.util import placement_group, placement_group_table, remove_placement_group

_POLL_S = 1
_TAKE_S = 5.0  # to reserve what was found free; then another process took it
_NODE_ID = "ray.io/node-id"


@dataclass(slots=True)
class RolePlacement:
    """The room a role has at present."""

    need: Need
    group: Any  # a placement group
    node_ids: tuple[str, ...]  # by rank; empty while a lost placement is not replaced

    def is_within(self, alive: Set[str]) -> bool:
        """Whether it exists and all its nodes are alive."""
        return bool(self.node_ids) and set(self.node_ids) <= alive


def settle_devices(config: EngineConfig, has_gpus: bool) -> EngineConfig:
    """The configuration with device "auto" decided: ranks see only the GPUs Ray gives them."""
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
    """The needs of each role, for a configuration with settled devices."""
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
) -> dict[str, RolePlacement]:
    """Place every role, or none: `PlacementError` names the role that does not fit.

    A second role goes to the nodes of the first if it fits there, a single role to those in `near`,
    and none to those in `avoid`, which are about to end. Does not wait for a cluster that is too
    small and cannot grow.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        nodes = await _nodes_but(avoid)
        for need in needs:
            if (refusal := gpus_too_small(need, nodes)) is not None:
                raise PlacementError(refusal)
        assignments = assign_nodes(needs, nodes, near)
        if assignments is not None:
            take_by_s = min(deadline_s, time.monotonic() + _TAKE_S)
            placed = await _reserve_all(
                [_pinned(assignment) for assignment in assignments], take_by_s
            )
            if placed is not None:
                return placed
        elif assign_nodes(needs, as_if_empty(nodes), near) is None:
            if not can_grow:
                raise PlacementError(_refusal(needs, as_if_empty(nodes), nodes))
            # Unpinned: the pending demand tells an autoscaler which nodes to add.
            requests = [_anywhere(need, nodes) for need in needs]
            placed = await _reserve_all(requests, deadline_s)
            if placed is not None and not any(avoid & set(e.node_ids) for e in placed.values()):
                return placed
            release(placed or {})
        if time.monotonic() >= deadline_s:
            nodes = await _nodes_but(avoid)
            raise PlacementError(_refusal(needs, nodes, nodes, timeout_s))
        await asyncio.sleep(_POLL_S)


async def _nodes_but(avoid: Set[str]) -> list[Node]:
    return [each for each in await asyncio.to_thread(live_nodes) if each.id not in avoid]


def release(placed: Mapping[str, RolePlacement]) -> None:
    for each in placed.values():
        remove_placement_group(each.group)


@dataclass(frozen=True, slots=True)
class _GroupRequest:
    """A placement group to request from Ray."""

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


def _pinned(assignment: NodeAssignment) -> _GroupRequest:
    strategy = "STRICT_PACK" if assignment.is_one_node else "PACK"
    return _GroupRequest(
        assignment.need, strategy, [{_NODE_ID: node_id} for node_id in assignment.node_ids]
    )


def _anywhere(need: Need, nodes: Sequence[Node]) -> _GroupRequest:
    """Unpinned; on one node if any is large enough."""
    assignments = assign_nodes([need], as_if_empty(nodes))
    is_one_node = assignments is not None and assignments[0].is_one_node
    selectors = [dict(need.labels) for _ in range(need.num_ranks)]
    return _GroupRequest(need, "STRICT_PACK" if is_one_node else "PACK", selectors)


async def _reserve_all(
    requests: Sequence[_GroupRequest], deadline_s: float
) -> dict[str, RolePlacement] | None:
    """Reserve all groups by the deadline; else None, and nothing stays reserved."""
    placed = {each.need.role: RolePlacement(each.need, each.reserve(), ()) for each in requests}
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


def _refusal(
    needs: Sequence[Need],
    searched: Sequence[Node],
    nodes: Sequence[Node],
    waited_s: float | None = None,
) -> str:
    """The error for the first need that does not fit, alone or beside those before it."""
    alone = range(1, len(needs) + 1)
    number = next(
        (each for each in alone if assign_nodes(needs[:each], searched) is None), alone[-1]
    )
    return insufficient_resources(needs[number - 1], nodes, waited_s, needs[: number - 1])


# -- nodes that are lost --------------------------------------------------------------------------


async def renew(
    placed: Mapping[str, RolePlacement], timeout_s: float, *, can_grow: bool
) -> list[str]:
    """Before a replica restarts in an existing placement: replace what was on lost nodes. Returns
    the roles concerned."""
    alive = await asyncio.to_thread(live_node_ids)
    lost = [role for role, each in placed.items() if not each.is_within(alive)]
    if lost == [Role.DRAFT]:
        await place_again(placed, Role.DRAFT, timeout_s, can_grow=can_grow)
    elif lost:  # place all: the draft belongs near its target
        release(placed)
        for each in placed.values():
            each.node_ids = ()
        needs = [each.need for each in placed.values()]
        found = await place(needs, timeout_s, can_grow=can_grow)
        for role, each in found.items():
            placed[role].group, placed[role].node_ids = each.group, each.node_ids
    return lost


async def place_again(
    placed: Mapping[str, RolePlacement],
    role: str,
    timeout_s: float,
    *,
    can_grow: bool,
    need: Need | None = None,
) -> None:
    """Replace the placement of one role, near the others; for a new `need` if given."""
    placement = placed[role]
    near = [node for other, each in placed.items() if other != role for node in each.node_ids]
    remove_placement_group(placement.group)
    placement.node_ids = ()
    new_need = need or placement.need
    found = (await place([new_need], timeout_s, can_grow=can_grow, near=near))[role]
    placement.need, placement.group = new_need, found.group
    placement.node_ids = found.node_ids


async def raise_if_lost(placed: Iterable[RolePlacement]) -> None:
    """Raise `ClusterError` once one of their nodes is lost: pending actors there never start."""
    placements = list(placed)
    while True:
        alive = await asyncio.to_thread(live_node_ids)
        for each in placements:
            if not each.is_within(alive):
                raise ClusterError(f"a node with resources of the {each.need.role} was lost")
        await asyncio.sleep(_POLL_S)
