"""Requests that arrive at once and run to their ends, on a real engine: arms in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from outrider.benchmarks.control.engine import (
    Blocks,
    ClosedLoop,
    LiveCell,
    MakeRequest,
    live_cell,
    measure_live,
    switch,
)
from outrider.benchmarks.control.simulation import ARMS, AUTO, PolicyArm
from outrider.engine.step import StepLoop

_LEAST_REQUESTS = 4  # of a block: smaller bursts are repeated
_FIRST_OF_CLOSED_LOOPS = 10**7  # beyond the numbers of bursts


class Burst(NamedTuple):
    """One, or the sum of a block's."""

    tokens: int
    steps: int
    seconds: float
    tail_s: float  # from the first end to the last


def measure_cell(
    loop: StepLoop, clients: int, text: str, make: MakeRequest, blocks: Blocks, *, is_burst: bool
) -> LiveCell:
    """One load and text: requests at once to their ends, or replaced as they end."""
    if is_burst:
        return measure_bursts(loop, f"{clients} at once, {text}", clients, make, blocks.rounds)
    closed = ClosedLoop(loop, clients, make, first=_FIRST_OF_CLOSED_LOOPS)
    cell = measure_live(f"{clients} clients, {text}", closed, blocks)
    closed.end()
    return cell


def measure_bursts(
    loop: StepLoop,
    name: str,
    clients: int,
    make: MakeRequest,
    repeats: int,
    arms: Sequence[PolicyArm] = ARMS,
) -> LiveCell:
    """Every repeat has every arm once, shuffled, all with the same requests."""
    blocks: dict[str, list[Burst]] = {arm.name: [] for arm in arms}
    rng = random.Random(clients)
    switch(loop, AUTO)
    _run_block(loop, clients, make, 0)  # costs and acceptance are learned
    for number in range(1, repeats + 1):
        for arm in rng.sample(list(arms), len(arms)):
            switch(loop, arm)
            blocks[arm.name].append(_run_block(loop, clients, make, number))
    speeds = {arm: [each.tokens / each.seconds for each in found] for arm, found in blocks.items()}
    rounds_ms = {
        arm: [1e3 * each.seconds / each.steps for each in found] for arm, found in blocks.items()
    }
    tails = {arm: [each.tail_s / each.seconds for each in found] for arm, found in blocks.items()}
    return live_cell(name, speeds, rounds_ms, tails)


def _run_block(loop: StepLoop, clients: int, make: MakeRequest, number: int) -> Burst:
    firsts = range(0, max(_LEAST_REQUESTS, clients), clients)
    runs = [_run(loop, clients, make, 10**4 * number + first) for first in firsts]
    return Burst(
        sum(run.tokens for run in runs),
        sum(run.steps for run in runs),
        sum(run.seconds for run in runs),
        sum(run.tail_s for run in runs),
    )


def _run(loop: StepLoop, clients: int, make: MakeRequest, first: int) -> Burst:
    scheduler, stats = loop.scheduler, loop.scheduler.stats
    requests = [make(first + index) for index in range(clients)]
    tokens, steps, finished = stats.committed_tokens, stats.steps, stats.finished
    start_s = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    first_end_s = 0.0
    while scheduler.has_work:
        loop.step(time.monotonic())
        if not first_end_s and stats.finished > finished:
            first_end_s = time.perf_counter()
    end_s = time.perf_counter()
    return Burst(
        stats.committed_tokens - tokens, stats.steps - steps, end_s - start_s, end_s - first_end_s
    )
