"""The real scheduler, planner, control and policies over a simulated pair, on a virtual clock."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from outrider.benchmarks.control.machines import EXACT, CostError, Machine
from outrider.benchmarks.control.pair import SimulatedPair
from outrider.benchmarks.control.texts import LengthRanges, Text, TextKind, make_text
from outrider.catalog.proposers import DRAFT, traits
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.policies import FIXED, GOODPUT, OFF
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.request import Request
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import IN_PROCESS, RequestSpec, SampleId, Verdict

DEEPEST = 5
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class PolicyArm:
    """A policy that scenarios are served with."""

    policy: str
    depth: int = DEEPEST

    @property
    def name(self) -> str:
        return f"fixed {self.depth}" if self.policy == FIXED else self.policy


AUTO, PLAIN = PolicyArm(GOODPUT), PolicyArm(OFF)
FIXED_ARMS = tuple(PolicyArm(FIXED, depth) for depth in (1, 2, 3, 5))
ARMS = (PLAIN, *FIXED_ARMS, AUTO)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load on a machine."""

    machine: Machine
    texts: TextKind
    clients: int  # concurrent; in an open loop: seats
    num_tokens: int  # committed until the end; the first quarter is warm-up
    rate: float | None = None  # arrivals per second of an open loop
    lag: int = 1
    cost_error: CostError = EXACT
    lengths: LengthRanges = field(default_factory=LengthRanges)
    num_blocks: int | None = None  # of the target's pool; None: enough for all
    is_burst: bool = False
    """`clients` requests at once to their ends, twice: the second time counts."""
    stays_mixed: bool = False  # a finished request is replaced by one of the same parity

    @property
    def name(self) -> str:
        load = f"{self.clients} clients" if self.rate is None else f"{self.rate:.3g}/s"
        if self.is_burst:
            load = f"{self.clients} at once"
        return f"{self.machine.name}, {load}, {self.texts.name}"


class Simulation:
    """One arm at one scenario, step by step. `now_s` is the time of the last verdict applied."""

    def __init__(self, scenario: Scenario, arm: PolicyArm, seed: int) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.residences: list[float] = []
        self.target_clients = scenario.clients  # of a closed loop; may change at any time
        self._seed = seed
        self._texts: dict[SampleId, Text] = {}
        self._arrived_s: dict[SampleId, float] = {}
        self._count = 0
        self._ended: deque[int] = deque(maxlen=scenario.clients)
        self._device_free_s = 0.0
        self._pending: deque[tuple[float, Verdict]] = deque()
        rng = np.random.default_rng((seed, 1))
        machine = scenario.machine
        self.control = SpeculationControl(
            arm.policy,
            scenario.cost_error.estimate(machine.costs, rng),
            seats=scenario.clients,
            step_limit_s=machine.step_limit_s,
            can_select=machine.costs.verify.is_padded,  # as on a GPU; the pair never stops early
        )
        self.control.max_depth = arm.depth
        longest = scenario.lengths.prompt[1] + scenario.lengths.output[1]
        enough = scenario.clients * (-(-longest // BLOCK_SIZE) + 1)
        num_blocks = scenario.num_blocks or enough
        self.scheduler = Scheduler(
            SchedulerLimits(scenario.clients, max(machine.budget, scenario.clients), scenario.lag),
            BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=False),
            BlockPool(enough, BLOCK_SIZE, prefix_caching=False),
            traits(has_draft_model=True),
            self.control,
        )
        self._pair = SimulatedPair(machine.costs, scenario.cost_error, self._texts, rng)
        self._arrivals: deque[float] = deque()
        if scenario.rate is not None:
            self._arrivals.extend(self._draw_arrivals())

    def _draw_arrivals(self) -> list[float]:
        scenario = self.scenario
        assert scenario.rate is not None
        mean_output = sum(scenario.lengths.output) / 2
        count = max(int(scenario.num_tokens / mean_output), 8)
        gaps = np.random.default_rng((self._seed, 2)).exponential(1 / scenario.rate, count)
        return [float(each) for each in np.cumsum(gaps)]

    @property
    def is_over(self) -> bool:
        if self.scenario.is_burst:
            return self._count == 2 * self.scenario.clients and not self.scheduler.has_work
        if self.scenario.rate is not None:
            return not self._arrivals and not self.scheduler.has_work
        return self.scheduler.stats.committed_tokens >= self.scenario.num_tokens

    @property
    def is_warm(self) -> bool:
        """Whether measuring may begin."""
        if self.scenario.is_burst:
            return self._count > 0 and not self.scheduler.has_work
        return self.scheduler.stats.committed_tokens >= self.scenario.num_tokens // 4

    def add(self, arrival_s: float, *, share: float = 1.0) -> None:
        """Add the next request; `share` shortens its output: the first must not end together."""
        scenario = self.scenario
        index = self._count
        if scenario.stays_mixed and self._ended:
            index = 2 * (self._count // 2 + scenario.clients) + self._ended.popleft() % 2
            while SampleId(IN_PROCESS, index) in self._texts:
                index += 2
        text = make_text(scenario.texts, scenario.lengths, self._seed, index)
        sample_id = SampleId(IN_PROCESS, index)
        self._count += 1
        self._texts[sample_id] = text
        self._arrived_s[sample_id] = arrival_s
        num_tokens = max(int(text.output_len * share), 1)
        spec = RequestSpec(
            (0,) * text.prompt_len,
            SamplingParams(max_tokens=num_tokens),
            seed=0,
            max_len=text.prompt_len + num_tokens,
            proposer=DRAFT,
            depth=DEEPEST,
        )
        self.scheduler.add(Request(sample_id, spec, seed=0, arrival_s=arrival_s))

    def fill(self) -> None:
        """Add the requests that have arrived by now."""
        if self.scenario.rate is not None:
            while self._arrivals and self._arrivals[0] <= self.now_s:
                self.add(self._arrivals.popleft())
            return
        clients = self.target_clients
        if self.scenario.is_burst:
            if not self.scheduler.has_work:
                for _ in range(clients):
                    self.add(self.now_s)
            return
        while self.scheduler.num_running + self.scheduler.num_waiting < clients:
            is_first = self._count < self.scenario.clients
            self.add(self.now_s, share=min((self._count + 1) / clients, 1.0) if is_first else 1.0)

    def step(self) -> Verdict | None:
        """Run one plan, and apply one verdict if one is due."""
        self.fill()
        scheduler = self.scheduler
        plan = scheduler.plan(self.now_s)
        if plan is not None:
            verdict = self._pair.run(plan)
            start_s = max(self._device_free_s, self.now_s)
            self._device_free_s = start_s + self._pair.seconds
            self._pending.append((self._device_free_s, verdict))
        if self._pending and (plan is None or len(self._pending) > self.scenario.lag):
            end_s, verdict = self._pending.popleft()
            self.now_s = max(self.now_s, end_s)
            scheduler.apply(verdict)
            self._note_ends()
            return verdict
        if plan is None and self._arrivals:
            self.now_s = max(self.now_s, self._arrivals[0])
        return None

    def _note_ends(self) -> None:
        for update in self.scheduler.take_updates():
            if update.finish_reason is not None:
                del self._texts[update.sample_id]
                self._ended.append(update.sample_id.handle)
                self.residences.append(self.now_s - self._arrived_s.pop(update.sample_id))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One arm's result. `speed` is what is compared: tokens per second in a closed loop; in an open
    loop, where all arms serve the same requests, the inverse of the mean time in the system."""

    speed: float
    tokens_per_s: float
    acceptance: float
    drafts_per_row: float
    num_steps: int
    num_preemptions: int


def run(
    scenario: Scenario, arm: PolicyArm, seed: int, watch: Callable[[Simulation], None] | None = None
) -> SimulationResult:
    simulation = Simulation(scenario, arm, seed)
    stats = simulation.scheduler.stats
    start: tuple[int, float] | None = None
    while not simulation.is_over:
        if start is None and simulation.is_warm:
            start = stats.committed_tokens, simulation.now_s
        simulation.step()
        if watch is not None:
            watch(simulation)
    assert start is not None, "the scenario ended during warm-up"
    spent_s = simulation.now_s - start[1]
    rate = (stats.committed_tokens - start[0]) / spent_s
    is_open = scenario.rate is not None
    return SimulationResult(
        1 / statistics.fmean(simulation.residences) if is_open else rate,
        rate,
        stats.accepted_tokens / max(stats.verified_tokens, 1),
        stats.drafted_tokens / max(stats.committed_tokens - stats.accepted_tokens, 1),
        stats.steps,
        simulation.scheduler.num_preemptions,
    )
