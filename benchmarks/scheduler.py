"""Scheduler overhead: microseconds per running request and step, for plan and apply.

    python -m outrider.benchmarks.scheduler --policy goodput

Every running request decodes at depth 5, or at the policy's depth with costs where drafting pays;
acceptance cycles through 0 to 5. There are no workers: verdicts are made between the timed calls.
Times are the thread's CPU times, which other processes hardly affect. Each figure is the median
over the steps of a repetition, then the least over the repetitions, since noise only adds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.catalog.proposers import DRAFT, traits
from outrider.errors import OutriderError
from outrider.scheduler.control import DecodeRows, SpeculationControl
from outrider.scheduler.costs import CostTable, StepCosts
from outrider.scheduler.depths import DepthChoice
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.policies import FIXED
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.request import Request
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import (
    IN_PROCESS,
    RequestSpec,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)

DEPTH = 5
BLOCK_SIZE = 16
PROMPT_LEN = 40
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), 1024, 2048, 8192)
COSTS = StepCosts(
    CostTable(_SIZES, tuple(4e-3 + 2e-6 * size for size in _SIZES), is_padded=True),
    CostTable((1, 1024), (1e-4, 1e-3)),
    CostTable((1, 1024), (1e-4, 1e-3)),
)
DEFAULT_RUNNING, DEFAULT_FINISHED, DEFAULT_LAGS = [64, 256, 1000], [0, 100_000], [0, 1]
_FAR_S = 1e9
_END = -1  # a stop id that never occurs


class BenchError(OutriderError):
    """The benchmark did not reach its steady state."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per running request and step."""

    running: int
    finished: int
    lag: int
    plan_us: float
    apply_us: float
    control_us: float = 0.0  # a step: the policy, which is part of the plan

    @property
    def total_us(self) -> float:
        return self.plan_us + self.apply_us


class ScriptedTarget:
    """Makes verdicts without a model, with scripted acceptance."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._script = itertools.cycle(range(DEPTH + 1))

    def verdict(self, plan: StepPlan) -> Verdict:
        for init in plan.admitted:
            self._lengths[init.row] = len(init.token_ids)
        return Verdict(plan.epoch, plan.step, tuple(self._row(row) for row in plan.rows))

    def _row(self, planned: RowPlan) -> RowVerdict:
        row, base_len = planned.row, self._lengths[planned.row]
        if not planned.samples:
            return RowVerdict(row, planned.generation, base_len, 0, 0, 0, ())
        accepted = min(next(self._script), planned.depth)
        self._lengths[row] += accepted + 1
        tokens = tuple(range(base_len, base_len + accepted + 1))
        depth = planned.depth
        return RowVerdict(row, planned.generation, base_len, depth, depth, accepted, tokens)


class TimedControl(SpeculationControl):
    """Times its last choice."""

    spent_s = 0.0

    def choose(
        self, step: int, room: int, num_prompt_tokens: int, num_waiting: int, rows: DecodeRows
    ) -> DepthChoice:
        start_s = time.perf_counter()  # reading the CPU time takes longer than a choice
        choice = super().choose(step, room, num_prompt_tokens, num_waiting, rows)
        self.spent_s = time.perf_counter() - start_s
        return choice


def _request(index: int, max_tokens: int) -> Request:
    prompt = range(index * PROMPT_LEN, (index + 1) * PROMPT_LEN)
    spec = RequestSpec(
        tuple(prompt),
        SamplingParams(max_tokens=max_tokens),
        seed=index,
        max_len=PROMPT_LEN + max_tokens,
        stop_ids=(_END,),
        proposer=DRAFT,
        depth=DEPTH,
    )
    sample_id = SampleId(IN_PROCESS, index)
    return Request(sample_id, spec, seed=index, arrival_s=0.0, deadline_s=_FAR_S)


class SchedulerBench:
    """A scheduler whose plan and apply are timed."""

    def __init__(self, running: int, max_tokens: int, lag: int, policy: str = FIXED) -> None:
        blocks_each = -(-(PROMPT_LEN + max_tokens) // BLOCK_SIZE) + 1
        target, draft = (BlockPool(running * blocks_each, BLOCK_SIZE) for _ in range(2))
        budget = running * (PROMPT_LEN + DEPTH + 1)
        control = TimedControl(policy, COSTS, seats=running)
        self.scheduler = Scheduler(
            SchedulerLimits(running, budget, lag),
            target,
            draft,
            traits(has_draft_model=True),
            control,
        )
        self.control = control
        self._running = running
        self._target = ScriptedTarget()
        self._unapplied: deque[Verdict] = deque()
        self._num_added = 0

    def add(self, count: int, max_tokens: int) -> None:
        for index in range(self._num_added, self._num_added + count):
            self.scheduler.add(_request(index, max_tokens))
        self._num_added += count

    def finish(self, count: int) -> None:
        """Serve `count` short requests."""
        for start in range(0, count, self._running):
            self.add(min(self._running, count - start), 1)
            while self.scheduler.has_work:
                self.step()

    def step(self) -> tuple[float, float, float]:
        """Seconds of one plan, one apply and one choice; with a lag the applied verdict is of an
        earlier plan."""
        clock = time.thread_time
        start_s = clock()
        plan = self.scheduler.plan(0.0)
        plan_s = clock() - start_s
        if plan is not None:
            self._unapplied.append(self._target.verdict(plan))
            if len(self._unapplied) <= self.scheduler.limits.lag:
                return plan_s, 0.0, 0.0
        start_s = clock()
        self.scheduler.apply(self._unapplied.popleft())
        self.scheduler.take_updates()
        return plan_s, clock() - start_s, self.control.spent_s


def measure(running: int, finished: int, lag: int, steps: int, policy: str = FIXED) -> Cost:
    """The median step in steady state."""
    max_tokens = (steps + lag + 3) * (DEPTH + 1)
    bench = SchedulerBench(running, max_tokens, lag, policy)
    bench.finish(finished)
    bench.add(running, max_tokens)
    for _ in range(lag + 2):
        bench.step()
    times = [bench.step() for _ in range(steps)]
    if bench.scheduler.num_running != running:
        raise BenchError(f"{bench.scheduler.num_running} of {running} requests are running")
    plan_s, apply_s, control_s = (statistics.median(each) for each in zip(*times, strict=True))
    per_request = 1e6 / running
    return Cost(
        running, finished, lag, plan_s * per_request, apply_s * per_request, 1e6 * control_s
    )


def show(costs: list[Cost]) -> None:
    table = Table(title="microseconds per running request and step")
    for heading in ("running", "finished before", "lag", "plan", "apply", "both", "control a step"):
        table.add_column(heading, justify="right")
    for cost in costs:
        figures = (cost.plan_us, cost.apply_us, cost.total_us, cost.control_us)
        table.add_row(
            str(cost.running),
            f"{cost.finished:,}",
            str(cost.lag),
            *(f"{figure:.2f}" for figure in figures),
        )
    Console().print(table)


def main(
    running: Annotated[
        list[int], typer.Option(help="Requests decoding at once.")
    ] = DEFAULT_RUNNING,
    finished: Annotated[list[int], typer.Option(help="Requests served before.")] = DEFAULT_FINISHED,
    lag: Annotated[list[int], typer.Option(help="Plans in flight beyond one.")] = DEFAULT_LAGS,
    steps: Annotated[int, typer.Option(help="Steps of one repetition.")] = 50,
    policy: Annotated[str, typer.Option(help="The policy that chooses depths.")] = FIXED,
    repetitions: Annotated[int, typer.Option(help="The least of these is shown.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Measure plan and apply in decode steady state."""
    costs = [
        min(
            (measure(*case, steps, policy) for _ in range(repetitions)),
            key=lambda cost: cost.total_us,
        )
        for case in itertools.product(running, finished, lag)
    ]
    show(costs)
    if out is not None:
        out.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
