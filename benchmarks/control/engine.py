"""The matrix on a real engine in this process: arms switched live, in interleaved blocks."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.benchmarks.control.matrix import Share, best_fixed, share
from outrider.benchmarks.control.simulation import ARMS, AUTO, DEEPEST, FIXED_ARMS, PLAIN, PolicyArm
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.catalog.proposers import DRAFT
from outrider.checkpoints.resolve import draft_assets
from outrider.engine.step import StepLoop
from outrider.scheduler.control import StepRecord
from outrider.scheduler.costs import CostTable, LiveCosts, StepCosts
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.policies import FIXED
from outrider.scheduler.request import Request
from outrider.scheduler.types import IN_PROCESS, RequestSpec, SampleId
from outrider.text.tokenizer import load_tokenizer

_TEMPERATURES = {"temperature 1": 1.0, "random tokens": 1.0}
_LONGEST_PROMPT = 256
_MIN_SAMPLES = 3

MakeRequest = Callable[[int], Request]
"""The request with this number, ready to be added."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a cell is measured."""

    rounds: int = 6  # each has every arm once
    block_s: float = 2.0
    settling_s: float = 0.5  # at the start of each block: rows catch up, nothing is counted


@dataclass(frozen=True, slots=True)
class LiveCell:
    """One load and text. Speeds are tokens per second of each block, by arm."""

    name: str
    speeds: dict[str, list[float]]
    ms_per_round: dict[str, list[float]]
    tails: dict[str, list[float]]  # of bursts: the time after the first end, as a share
    best_fixed: str
    of_best_fixed: Share
    of_plain: Share


def live_cell(
    name: str,
    speeds: dict[str, list[float]],
    rounds_ms: dict[str, list[float]],
    tails: dict[str, list[float]],
) -> LiveCell:
    best = best_fixed(speeds, [PLAIN.name, *(each.name for each in FIXED_ARMS)])
    ours = speeds[AUTO.name]
    of_best, of_plain = share(ours, speeds[best]), share(ours, speeds[PLAIN.name])
    return LiveCell(name, speeds, rounds_ms, tails, best, of_best, of_plain)


def line(cell: LiveCell) -> str:
    return (
        f"{cell.name}: {cell.of_best_fixed.value:.3f} [{cell.of_best_fixed.low:.3f}] of "
        f"{cell.best_fixed}, {cell.of_plain.value:.3f} [{cell.of_plain.low:.3f}] of off"
    )


class ClosedLoop:
    """Keeps `clients` requests in an engine: a finished one is replaced by the next."""

    def __init__(self, loop: StepLoop, clients: int, make: MakeRequest, first: int = 0) -> None:
        self.loop = loop
        self.num_tokens = 0  # committed, without the guest's
        self.guest: SampleId | None = None  # an additional request beside them
        self._clients = clients
        self._make = make
        self._numbers = itertools.count(first)
        self._num_added = 0
        self._added: deque[SampleId] = deque(maxlen=2 * clients + 8)

    def step(self) -> None:
        scheduler = self.loop.scheduler
        while scheduler.num_running + scheduler.num_waiting < self._clients:
            request = self._make(next(self._numbers))
            if self._num_added < self._clients:
                request = self._shortened(request)
            self._num_added += 1
            scheduler.add(request)
            self._added.append(request.sample_id)
        for update in self.loop.step(time.monotonic()):
            if update.sample_id != self.guest:
                self.num_tokens += len(update.token_ids)

    def _shortened(self, request: Request) -> Request:
        """One of the first requests, shortened: they start together and must not end together."""
        spec = request.spec
        share = (self._num_added + 1) / self._clients
        num_tokens = max(int(share * (spec.max_len - len(spec.prompt_ids))), 1)
        spec = replace(spec, max_len=len(spec.prompt_ids) + num_tokens)
        return Request(request.sample_id, spec, seed=request.seed, arrival_s=request.arrival_s)

    def run(self, seconds: float) -> tuple[int, int, float]:
        """Tokens, rounds and the measured duration of a run of about `seconds`."""
        stats = self.loop.scheduler.stats
        tokens, steps, start_s = self.num_tokens, stats.steps, time.perf_counter()
        while time.perf_counter() - start_s < seconds:
            self.step()
        spent_s = time.perf_counter() - start_s
        return self.num_tokens - tokens, stats.steps - steps, spent_s

    def end(self) -> None:
        """Cancel the remaining requests."""
        for sample_id in self._added:
            self.loop.scheduler.cancel(sample_id)
        drain(self.loop)


def drain(loop: StepLoop) -> None:
    """Step until no request is left."""
    while loop.scheduler.has_work:
        loop.step(time.monotonic())


def switch(loop: StepLoop, arm: PolicyArm) -> None:
    control = loop.scheduler.control
    control.set_policy(arm.policy)
    control.max_depth = arm.depth


def measure_live(
    name: str, closed: ClosedLoop, blocks: Blocks, arms: Sequence[PolicyArm] = ARMS, seed: int = 0
) -> LiveCell:
    """Run blocks of all arms, shuffled in every round."""
    speeds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    rounds_ms: dict[str, list[float]] = {arm.name: [] for arm in arms}
    rng = random.Random(seed)
    switch(closed.loop, AUTO)
    closed.run(blocks.block_s)  # warm-up: costs and acceptance are learned
    for _ in range(blocks.rounds):
        for arm in rng.sample(list(arms), len(arms)):
            switch(closed.loop, arm)
            closed.run(blocks.settling_s)
            tokens, rounds, spent_s = closed.run(blocks.block_s - blocks.settling_s)
            speeds[arm.name].append(tokens / spent_s)
            rounds_ms[arm.name].append(1e3 * spent_s / max(rounds, 1))
    return live_cell(name, speeds, rounds_ms, {})


# -- the bundled pair on this CPU -----------------------------------------------------------


TEXTS = ("spec-bench", "temperature 1", "random tokens")


def request_maker(text: str, vocab_size: int, num_tokens: int) -> MakeRequest:
    """Requests of one kind of text, one after the other."""
    tokenizer = load_tokenizer(draft_assets())
    questions = select_questions(read_questions(), 12)
    prompts = [encode_question(each, tokenizer)[:_LONGEST_PROMPT] for each in questions]

    def make(number: int) -> Request:
        rng = random.Random(number)
        prompt = prompts[number % len(prompts)]
        if text == "random tokens":
            prompt = [rng.randrange(vocab_size) for _ in prompt]
        params = SamplingParams(
            temperature=0.0 if text == "spec-bench" else _TEMPERATURES[text],
            seed=number,
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        spec = RequestSpec(
            tuple(prompt),
            params,
            seed=number,
            max_len=len(prompt) + num_tokens,
            proposer=DRAFT,
            depth=DEEPEST,
        )
        sample_id = SampleId(IN_PROCESS, number)
        return Request(sample_id, spec, seed=number, arrival_s=time.monotonic())

    return make


def measured_costs(loop: StepLoop, make: MakeRequest, seats: int, seconds: float) -> StepCosts:
    """Step costs, measured by running some depths at some loads, for engines that have not timed
    their passes."""
    sizes: dict[int, list[float]] = {}
    first: dict[int, list[float]] = {}
    loads = [clients for clients in (1, 2, 4, 8, 16, 32, 64, 128, 256) if clients <= seats]
    for clients, depth in itertools.product(loads, (0, 1, 3)):
        switch(loop, PolicyArm(FIXED, depth))
        closed = ClosedLoop(loop, clients, make, first=10**6 * (1 + depth) + 1000 * clients)
        closed.run(seconds / 3)
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            draft_s, verify_s = loop.draft_s, loop.verify_s
            closed.step()
            record = _last_record(loop)
            if record is None or record.num_prompt_tokens or record.num_caught_up:
                continue
            sizes.setdefault(record.num_tokens, []).append(loop.verify_s - verify_s)
            if record.num_drafts and record.num_rows:
                passes = record.num_drafts / record.num_rows
                first.setdefault(record.num_rows, []).append((loop.draft_s - draft_s) / passes)
        closed.end()
    draft = _table(first)
    return StepCosts(_table(sizes), draft, draft, prefill_s=draft.at(seats) / max(seats, 4) / 4)


def _last_record(loop: StepLoop) -> StepRecord | None:
    for record in reversed(loop.scheduler.control.records):
        if record.committed is not None:
            return record
    return None


def _table(samples: dict[int, list[float]]) -> CostTable:
    sizes = sorted(size for size, found in samples.items() if len(found) >= _MIN_SAMPLES)
    minimum, seconds = 0.0, []
    for size in sizes:
        minimum = max(minimum, statistics.median(samples[size]))
        seconds.append(minimum)
    return CostTable(tuple(sizes), tuple(seconds))


def ensure_costs(loop: StepLoop, make: MakeRequest, seats: int, seconds: float) -> None:
    """Measure the controller's costs, unless the engine has timed its passes."""
    control = loop.scheduler.control
    if not control.is_measured:
        measured = measured_costs(loop, make, seats, seconds)
        control.costs, control.is_measured = LiveCosts(measured), True
