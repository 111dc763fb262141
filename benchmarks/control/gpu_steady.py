"""Steady state on one GPU: one engine, arms switched between runs."""

from __future__ import annotations

import time
from typing import Any

from outrider.benchmarks.control.engine import MakeRequest, drain, switch
from outrider.benchmarks.control.simulation import AUTO, DEEPEST, PolicyArm
from outrider.benchmarks.gpu_engine import BenchEngine, EnlargedModels
from outrider.engine.step import StepLoop
from outrider.scheduler.policies import FIXED
from outrider.scheduler.types import SampleId

_GRID = ((1, 0), (1, 5), (16, 0), (16, 3), (16, 5), (64, 0), (64, 1), (64, 2), (64, 3), (128, 0),
         (128, 1), (128, 2), (128, 3), (256, 0), (256, 1), (256, 2))  # fmt: skip


def measure_steady(
    models: EnlargedModels, draft_shape: str, make: MakeRequest, found: dict[str, Any]
) -> None:
    """Into `found`: steady state by batch and depth and of the policy."""
    seats = max(batch for batch, _ in _GRID)
    engine = BenchEngine(models, draft_shape, DEEPEST, seats, max_len=1024)
    for batch in sorted({batch for batch, _ in _GRID}):  # the first of a size may compile
        _steady(engine.loop, make, batch, PolicyArm(FIXED, 3))
    grid, auto = found.setdefault("grid", {}), found.setdefault("auto", {})
    for batch, depth in _GRID:
        grid[f"{batch}x{depth}"] = _steady(engine.loop, make, batch, PolicyArm(FIXED, depth))
    for batch in sorted({batch for batch, _ in _GRID}):
        auto[str(batch)] = _steady(engine.loop, make, batch, AUTO)
    engine.close()


def _steady(loop: StepLoop, make: MakeRequest, batch: int, arm: PolicyArm) -> dict[str, float]:
    """Over the time in which every request is decoding."""
    switch(loop, arm)
    _add(loop, make, batch)
    started: set[SampleId] = set()
    while len(started) < batch:
        started |= {update.sample_id for update in loop.step(time.monotonic()) if update.token_ids}
    stats = loop.scheduler.stats
    tokens, steps, finished = stats.committed_tokens, stats.steps, stats.finished
    start_s = time.perf_counter()
    while stats.finished == finished:
        loop.step(time.monotonic())
    spent_s = time.perf_counter() - start_s
    tokens, steps = stats.committed_tokens - tokens, stats.steps - steps
    drain(loop)
    return {
        "tokens_per_s": tokens / spent_s,
        "ms_per_round": 1e3 * spent_s / steps,
        "tokens_per_row_round": tokens / steps / batch,
    }


def _add(loop: StepLoop, make: MakeRequest, batch: int) -> None:
    """The same requests for every arm."""
    for number in range(batch):
        loop.scheduler.add(make(4 * 10**6 + number))
