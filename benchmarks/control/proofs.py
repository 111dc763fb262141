"""Proofs beyond the matrix, on the same virtual clock: swinging load, changing texts, batches of
easy and hard requests, and too little KV memory."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from outrider.benchmarks.control.machines import H200
from outrider.benchmarks.control.matrix import share
from outrider.benchmarks.control.simulation import (
    AUTO,
    BLOCK_SIZE,
    FIXED_ARMS,
    PLAIN,
    PolicyArm,
    Scenario,
    Simulation,
    run,
)
from outrider.benchmarks.control.texts import (
    SPEC_BENCH,
    Floats,
    LengthRanges,
    TextKind,
    drift_between,
)

_VERY_LONG = LengthRanges(prompt=(30, 100), output=(800, 1600))
_LONG = LengthRanges(prompt=(30, 100), output=(200, 600))


@dataclass(frozen=True, slots=True)
class Proof:
    """A value that must reach its goal, or with `is_most` must not exceed it."""

    name: str
    value: float
    goal: float
    is_most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.goal if self.is_most else self.value >= self.goal


def _by_halves(rng: np.random.Generator, request: int, size: int) -> Floats:
    """Every other request has all its drafts accepted, the others none."""
    return np.full(size, float(request % 2))


def mixed_batch(clients: int, seeds: int) -> Proof:
    """A finished request is replaced by one of the same kind: the batch stays half and half."""
    kind = TextKind("half and half", _by_halves)
    scenario = Scenario(H200, kind, clients, 200 * clients, lengths=_VERY_LONG, stays_mixed=True)
    return Proof(f"mixed batch of {clients}", _of_best_fixed(scenario, seeds), 1.35)


def drift(seeds: int) -> Proof:
    """64 clients whose requests alternate between easy and hard periods."""
    kind = TextKind("changing", drift_between(48))
    scenario = Scenario(H200, kind, 64, 500 * 64, lengths=LengthRanges(output=(60, 160)))
    return Proof("drift", _of_best_fixed(scenario, seeds), 1.05)


def _of_best_fixed(scenario: Scenario, seeds: int) -> float:
    def speeds(arm: PolicyArm) -> list[float]:
        return [run(scenario, arm, seed).speed for seed in range(seeds)]

    best = max((speeds(arm) for arm in (PLAIN, *FIXED_ARMS)), key=statistics.fmean)
    return share(speeds(AUTO), best).low


def crossing(seeds: int) -> list[Proof]:
    """Load swings between 16 clients, where drafting pays, and 256, where it does not."""
    swings = [swing for seed in range(seeds) for swing in _swings(seed)]
    back, steady, longest_s = zip(*swings, strict=True)
    return [
        Proof("crossing: acceptance back over steady", share(back, steady).low, 0.95),
        Proof("crossing: longest step, s", max(longest_s), 0.1, is_most=True),
    ]


def _swings(seed: int) -> Iterator[tuple[float, float, float]]:
    """After each, the acceptance, that of later rounds, and the longest step so far."""
    scenario = Scenario(H200, SPEC_BENCH, 256, 10**9, lengths=_LONG)
    simulation = Simulation(scenario, AUTO, seed)
    longest_s = 0.0
    for _ in range(3):
        _rounds(simulation, 16, lambda now: now.scheduler.num_running > 16, 3000)
        longest_s = max(longest_s, _longest_step(simulation, 50))
        back = _acceptance(simulation, 200)
        _rounds(simulation, 16, lambda now: True, 200)
        steady = _acceptance(simulation, 400)
        _rounds(simulation, 256, lambda now: True, 150)
        yield back, steady, longest_s


def _rounds(
    simulation: Simulation, clients: int, condition: Callable[[Simulation], bool], max_rounds: int
) -> None:
    simulation.target_clients = clients
    for _ in range(max_rounds):
        if not condition(simulation):
            return
        simulation.step()


def _longest_step(simulation: Simulation, rounds: int) -> float:
    longest_s = 0.0
    for _ in range(rounds):
        before_s = simulation.now_s
        simulation.step()
        longest_s = max(longest_s, simulation.now_s - before_s)
    return longest_s


def _acceptance(simulation: Simulation, rounds: int) -> float:
    """Tokens per row and round."""
    stats, rows = simulation.scheduler.stats, 0
    tokens = stats.committed_tokens
    for _ in range(rounds):
        simulation.step()
        rows += simulation.scheduler.num_running
    return (stats.committed_tokens - tokens) / rows


def full_memory(seed: int = 0) -> list[Proof]:
    """KV blocks for half of the clients: requests are preempted, but not repeatedly."""
    clients = 64
    fits = clients // 2
    blocks = fits * -(-sum(_LONG.output) // 2 // BLOCK_SIZE)
    tokens = 400 * clients
    full = Scenario(H200, SPEC_BENCH, clients, tokens, lengths=_LONG, num_blocks=blocks)
    alone = dataclasses.replace(full, clients=fits, num_blocks=None)
    found, reference = run(full, AUTO, seed), run(alone, AUTO, seed)
    preempted = found.num_preemptions * sum(_LONG.output) / 2 / tokens
    return [
        Proof("full memory: of what fits", found.speed / reference.speed, 0.9),
        Proof("full memory: preemptions a request", preempted, 1.0, is_most=True),
    ]


def all_proofs(seeds: int) -> list[Proof]:
    return [
        mixed_batch(64, seeds),
        mixed_batch(128, seeds),
        drift(seeds),
        *crossing(seeds),
        *full_memory(),
    ]
