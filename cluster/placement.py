"""Room for the ranks of each role: one placement group a role, one bundle a rank.

Target and draft never share a bundle: they are other processes, on other GPUs, and come and go
independently. An engine that holds both (`cluster.colocate`) has one bundle for itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util import placement_group, remove_placement_group

from outrider.cluster.errors import PlacementError
from outrider.cluster.ray_facts import Resources, cluster_resources, free_resources
from outrider.config import EngineConfig
from outrider.engine.over_ranks import group_sizes
from outrider.errors import ConfigError
from outrider.links.rank_messages import Role

ENGINE = "engine"
STRATEGY = "PACK"
_POLL_S = 1


@dataclass(frozen=True, slots=True)
class Need:
    """What the ranks of one role take, or an engine that holds the models."""

    role: str
    num_ranks: int
    per_rank: Resources

    @property
    def total(self) -> Resources:
        return {name: self.num_ranks * amount for name, amount in self.per_rank.items()}


@dataclass(frozen=True, slots=True)
class Placed:
    """The room a role was given."""

    need: Need
    group: Any  # a placement group


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
    cpu, gpu = {"CPU": 1.0}, {"GPU": 1.0, "CPU": 1.0}
    if config.cluster.colocate:
        one = gpu if devices[Role.TARGET] == "cuda" else cpu
        num_models = 1 if config.draft.model is None else 2
        return [Need(ENGINE, 1, one | {"CPU": float(num_models)})]
    return [
        Need(role, size, gpu if devices[role] == "cuda" else cpu)
        for role, size in group_sizes(config).items()
    ]


async def place(needs: Sequence[Need], timeout_s: float, *, can_grow: bool) -> dict[str, Placed]:
    """Room for every role, or for none: `PlacementError` says which one has none.

    A cluster that cannot grow is not waited for if it is too small.
    """
    has = await asyncio.to_thread(cluster_resources)
    if not can_grow and (misfit := first_misfit(needs, has)) is not None:
        free = await asyncio.to_thread(free_resources)
        raise PlacementError(no_room(misfit, has, free))
    placed = {need.role: Placed(need, _reserve(need)) for need in needs}
    try:
        deadline_s = time.monotonic() + timeout_s
        for each in placed.values():
            if not await _is_ready(each.group, deadline_s):
                has = await asyncio.to_thread(cluster_resources)
                free = await asyncio.to_thread(free_resources)
                raise PlacementError(no_room(each.need, has, free, timeout_s))
    except BaseException:
        release(placed)
        raise
    return placed


def release(placed: Mapping[str, Placed]) -> None:
    for each in placed.values():
        remove_placement_group(each.group)


def _reserve(need: Need) -> Any:
    bundles = [dict(need.per_rank) for _ in range(need.num_ranks)]
    return placement_group(bundles, strategy=STRATEGY, name=f"outrider-{need.role}")


async def _is_ready(group: Any, deadline_s: float) -> bool:
    while not await asyncio.to_thread(group.wait, _POLL_S):
        if time.monotonic() > deadline_s:
            return False
    return True


def first_misfit(needs: Sequence[Need], has: Resources) -> Need | None:
    """The first role for which a whole cluster is too small once those before it are placed."""
    left = dict(has)
    for need in needs:
        for name, amount in need.total.items():
            left[name] = left.get(name, 0.0) - amount
            if left[name] < 0:
                return need
    return None


def no_room(need: Need, has: Resources, free: Resources, waited_s: float | None = None) -> str:
    """One sentence: who needs what, what there is, what to change."""
    what = "its process with the models" if need.role == ENGINE else "1 rank"
    wanted = f"{need.role}: {what} needs {_amounts(need.per_rank)}"
    if need.num_ranks > 1:
        each, total = _amounts(need.per_rank), _amounts(need.total)
        wanted = f"{need.role}: {need.num_ranks} ranks need {each} each, {total} in all"
    there = " and ".join(
        f"{_amount(name, has.get(name, 0.0))} ({free.get(name, 0.0):g} free)"
        for name in need.per_rank
    )
    waited = "" if waited_s is None else f" after {waited_s:g} s"
    remedies = [f"lower {need.role}.tensor_parallel"] if need.num_ranks > 1 else []
    if "GPU" in need.per_rank:
        remedies.append(f"set {Role.TARGET if need.role == ENGINE else need.role}.device to cpu")
    remedies.append("use a larger cluster")
    return f"{wanted}, but the cluster has {there}{waited}; {_either(remedies)}."


def _either(remedies: Sequence[str]) -> str:
    if len(remedies) == 1:
        return remedies[0]
    return f"{', '.join(remedies[:-1])} or {remedies[-1]}"


def _amounts(resources: Resources) -> str:
    return " and ".join(_amount(name, amount) for name, amount in resources.items())


def _amount(name: str, amount: float) -> str:
    return f"{amount:g} {name}" if amount == 1 else f"{amount:g} {name}s"
