"""The plan of a run: arms, loads, prompts and limits, validated before anything starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import ConfigError
from outrider.loadtest.clients.shifts import LoadSpec, RequestOptions, Shift
from outrider.loadtest.requests import Prompt
from outrider.loadtest.servers.server import ServerSpec
from outrider.loadtest.targets.base import TargetSpec


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One variant of a comparison: a server and the extras of its requests."""

    name: str
    server: ServerSpec
    target: TargetSpec  # its `url` is set to the server's once that is known


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a shift and limits of its requests."""

    measured_s: float = 30.0
    warm_up_s: float = 3.0
    cool_down_s: float = 2.0
    timeout_s: float = 120.0
    drain_s: float = 60.0
    max_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("measured_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}; it must be above 0.")
        for name in ("warm_up_s", "cool_down_s", "drain_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}; it must be at least 0.")
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"requests is {self.max_requests}; give at least 1.")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that defines a run except the servers' addresses."""

    arms: tuple[ArmSpec, ...]
    loads: tuple[LoadSpec, ...]
    pool: Sequence[Prompt] = field(repr=False)
    prompts: str  # the datasets as specified
    is_natural: bool
    remarks: tuple[str, ...]  # on the prompts, for the report
    request_options: RequestOptions
    timing: Timing
    blocks: int = 1
    # Arms send disjoint prompts, for arms that share a server's prefix cache.
    is_disjoint: bool = False
    repeats_order: bool = False  # every block sends the same prompts in the same order
    keeps_answers: bool = False
    client_processes: int | None = None  # None: one, doubled while the client is the bottleneck
    max_in_flight: int | None = None
    max_outstanding: int = 20_000

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError("there is no arm; name one, as in --arm ours=localhost:50051.")
        names = [arm.name for arm in self.arms]
        if unfit := [name for name in names if not name.isprintable()]:
            raise ConfigError(f"an arm is named {unfit[0]!r}; use printable characters.")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"arm {min(twice)!r} is named twice; give every arm its own name.")
        if not self.loads:
            raise ConfigError("there is no load; give --rate, --clients or --trace.")
        if self.blocks < 1:
            raise ConfigError(f"blocks is {self.blocks}; it must be at least 1.")
        if len(self.pool) < len(self.arms if self.is_disjoint else ((),)):
            raise ConfigError(
                f"{self.prompts!r} has {len(self.pool)} prompts, too few for "
                f"{len(self.arms)} arms with prompts of their own."
            )

    @property
    def servers(self) -> list[ServerSpec]:
        """The distinct servers, in the order of the arms."""
        return list({arm.server.name: arm.server for arm in self.arms}.values())

    def order(self) -> list[tuple[int, LoadSpec, ArmSpec]]:
        """All shifts: in every block each load runs on all arms in turn. The first arm rotates
        from block to block, so that drift of the machine favours no arm."""
        return [
            (block, load, arm)
            for block in range(self.blocks)
            for load in self.loads
            for arm in _rotated(self.arms, block)
        ]

    def shift(self, arm: ArmSpec, load: LoadSpec, block: int, url: str, origin_s: float) -> Shift:
        """The shift sent to the clients; its start follows when all of them are ready."""
        timing = self.timing
        return Shift(
            arm=arm.name,
            target=arm.target.at(url),
            load=load,
            block=block,
            origin_s=origin_s,
            start_s=0.0,
            warm_up_s=timing.warm_up_s,
            measured_s=timing.measured_s,
            cool_down_s=timing.cool_down_s,
            timeout_s=timing.timeout_s,
            drain_s=timing.drain_s,
            prompts=self._prompt_indices(arm, load, block),
            request_options=self.request_options.under(load),
            max_requests=timing.max_requests,
            max_in_flight=self.max_in_flight,
            max_outstanding=self.max_outstanding,
            keeps_answers=self.keeps_answers,
        )

    def _prompt_indices(self, arm: ArmSpec, load: LoadSpec, block: int) -> tuple[int, ...]:
        """Prompt indices of a shift in sending order: equal for all arms unless disjoint."""
        indices = list(range(*load.prompt_range))
        if load.kind == "trace":
            return tuple(indices)  # the n-th arrival is the n-th row
        if self.is_disjoint:
            # One split for all loads and blocks, after a shuffle: datasets interleave categories,
            # and every arm must get its share of each.
            random.Random(f"{self.request_options.seed}").shuffle(indices)
            indices = indices[self.arms.index(arm) :: len(self.arms)]
        turn = 0 if self.repeats_order else block
        random.Random(f"{self.request_options.seed}/{load.name}/{turn}").shuffle(indices)
        return tuple(indices)


def _rotated(arms: Sequence[ArmSpec], block: int) -> list[ArmSpec]:
    first = block % len(arms)
    return [*arms[first:], *arms[:first]]
