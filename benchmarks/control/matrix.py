"""Every scenario with every arm and several seeds: whether the policy keeps its promises."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.benchmarks.control.scenarios import scenarios
from outrider.benchmarks.control.simulation import ARMS, AUTO, FIXED_ARMS, PLAIN, run
from outrider.loadtest.results.statistics import bootstrap_interval

OF_BEST_FIXED, OF_PLAIN = 0.97, 0.99
"""The policy's least share, in every cell, of the best fixed depth (off included) and of off."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of another arm's speed, paired by seed or block: the mean and its lower bound."""

    value: float
    low: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario's result."""

    name: str
    telling: str  # the cost error's name; results have this key
    lag: int
    speeds: Mapping[str, float]  # by arm, tokens a second
    drafts: Mapping[str, float]  # by arm, drafts a row and round
    best_fixed: str
    of_best_fixed: Share
    of_plain: Share

    @property
    def holds(self) -> bool:
        return self.of_best_fixed.low >= OF_BEST_FIXED and self.of_plain.low >= OF_PLAIN


def share(ours: Sequence[float], theirs: Sequence[float]) -> Share:
    """The geometric mean of paired ratios, with its lower bootstrap bound."""
    logs = np.log(np.asarray(ours) / np.asarray(theirs))
    found = bootstrap_interval(logs, seed=0)
    assert found is not None
    low = found.value if found.low is None else found.low
    return Share(float(np.exp(found.value)), float(np.exp(low)))


def best_fixed(speeds: Mapping[str, Sequence[float]], arms: Iterable[str]) -> str:
    return max(arms, key=lambda arm: statistics.fmean(speeds[arm]))


def measure_cell(task: tuple[int, int]) -> Cell:
    index, num_seeds = task
    scenario = scenarios()[index]
    runs = {arm.name: [run(scenario, arm, seed) for seed in range(num_seeds)] for arm in ARMS}
    speeds = {arm: [each.speed for each in found] for arm, found in runs.items()}
    rates = {arm: statistics.fmean(r.tokens_per_s for r in found) for arm, found in runs.items()}
    drafts = {arm: statistics.fmean(r.drafts_per_row for r in found) for arm, found in runs.items()}
    best = best_fixed(speeds, [PLAIN.name, *(arm.name for arm in FIXED_ARMS)])
    ours = speeds[AUTO.name]
    return Cell(
        scenario.name,
        scenario.cost_error.name,
        scenario.lag,
        rates,
        drafts,
        best,
        share(ours, speeds[best]),
        share(ours, speeds[PLAIN.name]),
    )


def measure_matrix(
    indices: Sequence[int],
    num_seeds: int,
    num_processes: int,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    tasks = [(index, num_seeds) for index in indices]
    found = []
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for cell in pool.imap(measure_cell, tasks):
            on_cell(cell)
            found.append(cell)
    return found
