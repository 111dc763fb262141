"""What a run does: arms, loads, prompts and limits, checked before anything is started."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.bench.load.asks import Prompt
from outrider.bench.load.clients.shifts import Asking, Load, Shift
from outrider.bench.load.servers.server import ServerSpec
from outrider.bench.load.targets.base import TargetSpec
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: a server, and what its requests ask besides."""

    name: str
    server: ServerSpec
    target: TargetSpec  # its `url` is the server's, once that is known


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a shift and its requests take."""

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
            raise ConfigError(f"requests is {self.max_requests}; ask for at least 1.")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything but the servers' addresses."""

    arms: tuple[Arm, ...]
    loads: tuple[Load, ...]
    pool: Sequence[Prompt] = field(repr=False)
    prompts: str  # as they were asked for
    is_natural: bool
    remarks: tuple[str, ...]  # on the prompts, for the report
    asking: Asking
    timing: Timing
    blocks: int = 1
    # Prompts of one arm are never sent by another: for arms that share a server's prefix cache.
    is_disjoint: bool = False
    repeats_order: bool = False  # every block sends the same prompts in the same order
    keeps_answers: bool = False
    client_processes: int | None = None  # None: one, and more as soon as one cannot keep up
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
        """Each once, in the order of the arms."""
        return list({arm.server.name: arm.server for arm in self.arms}.values())

    def order(self) -> list[tuple[int, Load, Arm]]:
        """All shifts: in every block each load is given to all arms in turn, and who begins
        changes from block to block, so that a machine that drifts favours nobody."""
        return [
            (block, load, arm)
            for block in range(self.blocks)
            for load in self.loads
            for arm in _rotated(self.arms, block)
        ]

    def shift(self, arm: Arm, load: Load, block: int, url: str, origin_s: float) -> Shift:
        """Told to the clients, who are told its start when all are ready."""
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
            prompts=self._places(arm, load, block),
            asking=self.asking.under(load),
            max_requests=timing.max_requests,
            max_in_flight=self.max_in_flight,
            max_outstanding=self.max_outstanding,
            keeps_answers=self.keeps_answers,
        )

    def _places(self, arm: Arm, load: Load, block: int) -> tuple[int, ...]:
        """The prompts of a shift in its order: the same for all arms, unless they must differ."""
        places = list(range(*load.places))
        if load.kind == "trace":
            return tuple(places)  # the n-th arrival is the n-th row
        if self.is_disjoint:
            # Drawn once for all loads and blocks, and shuffled first: readers deal out categories
            # in turns, and every arm must have its part of each.
            random.Random(f"{self.asking.seed}").shuffle(places)
            places = places[self.arms.index(arm) :: len(self.arms)]
        turn = 0 if self.repeats_order else block
        random.Random(f"{self.asking.seed}/{load.name}/{turn}").shuffle(places)
        return tuple(places)


def _rotated(arms: Sequence[Arm], block: int) -> list[Arm]:
    first = block % len(arms)
    return [*arms[first:], *arms[:first]]
