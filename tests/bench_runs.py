"""Made-up runs of the load harness: folders as `outrider bench serve` leaves them, seeded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.loadtest.records import (
    CountedBy,
    RequestOutcome,
    RequestRecord,
    RequestSpeculation,
    ShiftPhase,
    write_records,
)
from outrider.loadtest.runs import (
    ArmFacts,
    CellFacts,
    RunFacts,
    RunFolder,
    ServerSample,
    ShiftRecord,
    append,
)

CATEGORIES = {"code": 0.85, "chat": 0.62, "maths": 0.74}  # a draft's chance in each


@dataclass(frozen=True)
class MadeArm:
    name: str
    depth: int = 0  # drafts a round
    step_s: float = 0.030  # of one pass of the target alone
    url: str = "grpc://127.0.0.1:50051"


ARMS = (MadeArm("off"), MadeArm("depth 2", 2), MadeArm("depth 4", 4))


@dataclass(frozen=True)
class MadeRun:
    """What to make; the defaults give what a small comparison leaves."""

    arms: tuple[MadeArm, ...] = ARMS
    loads: tuple[float, ...] = (1, 2, 4, 8)
    kind: str = "rate"
    blocks: int = 4
    shift_s: float = 10.0
    output_tokens: int = 40
    seed: int = 7
    warm_up_s: float = 3.0
    failing: float = 0.01  # share of requests
    error: tuple[str, str] = ("http 429", "too many requests")
    has_samples: bool = True
    is_natural: bool = True
    counted_by: CountedBy = CountedBy.IDS
    options: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 40, "slo": "ttft 0.5"})
    notes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ("",)
    temperatures: tuple[float | None, ...] = (None,)
    keeps_answers: bool = False


def make_run(folder: Path, made: MadeRun | None = None) -> RunFolder:
    """Write a run's files below `folder`."""
    made = made or MadeRun()
    run = RunFolder(folder)
    run.write_facts(_facts(made))
    run.requests_path.touch()
    chance = random.Random(made.seed)
    clock = 100.0
    for cell in run.facts.cells:
        for block in range(made.blocks):
            for arm in made.arms:
                shift = _shift(made, arm, cell, block, clock, chance)
                records = list(_requests(made, arm, cell, shift, chance))
                write_records(run.requests_path, records)
                append(run.shifts_path, shift)
                if made.has_samples:
                    for sample in _samples(arm, shift, records, chance):
                        append(run.samples_path, sample)
                clock = shift.end_s + 1
    return run


def _facts(made: MadeRun) -> RunFacts:
    return RunFacts(
        command="outrider bench serve --arm off --arm 'depth 2' --rate 1,2,4,8",
        started="2001-02-03T04:05:06Z",
        seed=made.seed,
        arms=[
            ArmFacts(arm.name, "outrider", arm.url, {"num_speculative_tokens": arm.depth})
            for arm in made.arms
        ],
        cells=_cells(made),
        options=dict(made.options),
        machine={"cpu": "two cores", "memory_gb": 24, "python": "3.11"},
        prompts="spec-bench",
        is_natural=made.is_natural,
        notes=list(made.notes),
    )


def _cells(made: MadeRun) -> list[CellFacts]:
    """Named as `outrider bench serve` names them."""
    return [
        CellFacts(
            f"{made.kind} {value:g}"
            + (f", {text}" if len(made.texts) > 1 else "")
            + (f", T {heat:g}" if heat is not None and len(made.temperatures) > 1 else ""),
            *(made.kind, value, text, heat),
        )
        for text in made.texts
        for heat in made.temperatures
        for value in made.loads
    ]


def _shift(
    made: MadeRun, arm: MadeArm, cell: CellFacts, block: int, start_s: float, chance: random.Random
) -> ShiftRecord:
    busy = min(1.0, cell.value / 10)
    return ShiftRecord(
        arm=arm.name,
        cell=cell.name,
        block=block,
        start_s=start_s,
        measured_from_s=start_s + made.warm_up_s,
        measured_to_s=start_s + made.warm_up_s + made.shift_s,
        end_s=start_s + made.warm_up_s + made.shift_s + 2,
        client_cpu_s=0.3 + busy * chance.uniform(0.3, 0.5),
        loop_delay_p50_ms=0.2,
        loop_delay_p99_ms=chance.uniform(0.8, 2.5),
        loop_delay_max_ms=6.0,
        send_lag_p99_ms=1.1,
        server_cpu_s=made.shift_s * (0.4 + 0.9 * busy),
        idle_arms_cpu_s=0.05,
    )


def _requests(
    made: MadeRun, arm: MadeArm, cell: CellFacts, shift: ShiftRecord, chance: random.Random
) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    at_s = shift.start_s
    # All arms of a block are asked at the same moments, as the harness does it.
    arrivals = random.Random(f"{made.seed} {cell.name} {shift.block}")
    pressure = cell.value / max(made.loads)  # the last load is about as much as the server takes
    while True:
        at_s += arrivals.expovariate(max(cell.value, 0.5))
        if at_s >= shift.measured_to_s:
            return found
        phase = ShiftPhase.MEASURED if at_s >= shift.measured_from_s else ShiftPhase.WARM_UP
        number = len(found)
        category = list(CATEGORIES)[number % len(CATEGORIES)]
        record = RequestRecord(
            id=f"{category}-{number}/0",
            arm=arm.name,
            cell=cell.name,
            block=shift.block,
            phase=phase,
            category=category,
            intended_s=at_s,
            sent_s=at_s + 0.0005,
            prompt_tokens=int(20 * 2 ** chance.uniform(0, 5)),
            cached_tokens=0,
        )
        _answer(made, arm, record, pressure, chance)
        found.append(record)


def _answer(
    made: MadeRun, arm: MadeArm, record: RequestRecord, pressure: float, chance: random.Random
) -> None:
    now_s = 0.05 + 0.4 * pressure**3 * chance.expovariate(1.0) + chance.uniform(0, 0.02)
    if chance.random() < made.failing:
        record.end_s = record.sent_s + now_s
        record.error, record.message = made.error
        return
    # Drafts are nearly free while the server is idle, and cost their share once it is full.
    round_s = arm.step_s * (1 + pressure) * (1 + arm.depth * (0.06 + 0.22 * pressure**2))
    told = RequestSpeculation(rounds_by_accepted=[0] * (arm.depth + 1))
    left = made.output_tokens
    while left > 0:
        accepted = 0
        while accepted < arm.depth and chance.random() < CATEGORIES[record.category]:
            accepted += 1
        told.rounds += 1
        told.drafted += arm.depth
        told.accepted += accepted
        told.rounds_by_accepted[accepted] += 1
        record.update_s.append(now_s)
        record.update_tokens.append(min(accepted + 1, left))
        left -= accepted + 1
        now_s += round_s * chance.lognormvariate(0, 0.1)
    record.end_s = record.sent_s + record.update_s[-1] + 0.001
    record.outcome = RequestOutcome.OK
    record.output_tokens = sum(record.update_tokens)
    record.counted_by = made.counted_by
    record.finish = "length"
    record.speculated = told if arm.depth else None
    if made.keeps_answers:
        record.token_ids = [len(record.id) + number for number in range(record.output_tokens)]


def _samples(
    arm: MadeArm, shift: ShiftRecord, records: list[RequestRecord], chance: random.Random
) -> list[ServerSample]:
    found = []
    for second in range(int(shift.end_s - shift.start_s)):
        at_s = shift.start_s + second
        ended = [each for each in records if each.end_s <= at_s]
        told = [each.speculated for each in ended if each.speculated]
        found.append(
            ServerSample(
                at_s=at_s,
                server="outrider",
                arm=arm.name,
                processes=3,
                memory_mb=900 + at_s * 0.05 + chance.uniform(0, 4),
                handles=120 + chance.randrange(6),
                threads=44,
                cpu_s=at_s * 1.2,
                running=sum(each.sent_s <= at_s < each.end_s for each in records),
                waiting=0,
                rounds=sum(each.rounds for each in told),
                committed=sum(each.output_tokens for each in ended),
                drafted=sum(each.drafted for each in told),
                accepted=sum(each.accepted for each in told),
            )
        )
    return found
