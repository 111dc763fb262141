"""Records of requests that a test writes by hand, and a run made of them."""

from __future__ import annotations

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
from outrider.loadtest.runs import ArmFacts, CellFacts, RunFacts, RunFolder, ShiftRecord, append


def answered(
    ask: str = "a/0",
    *,
    arm: str = "off",
    cell: str = "rate 2",
    block: int = 0,
    intended_s: float = 1.0,
    lag_s: float = 0.0,
    update_s: tuple[float, ...] = (0.1, 0.2, 0.3),
    update_tokens: tuple[int, ...] = (1, 1, 1),
    **more: Any,
) -> RequestRecord:
    """A measured request that ended well with its last update."""
    sent_s = intended_s + lag_s
    given: dict[str, Any] = {
        "phase": ShiftPhase.MEASURED,
        "category": "text",
        "end_s": sent_s + (update_s[-1] if update_s else 0.0),
        "outcome": RequestOutcome.OK,
        "output_tokens": sum(update_tokens),
        "counted_by": CountedBy.IDS,
        "update_s": list(update_s),
        "update_tokens": list(update_tokens),
    }
    return RequestRecord(
        id=ask,
        arm=arm,
        cell=cell,
        block=block,
        intended_s=intended_s,
        sent_s=sent_s,
        **given | more,
    )


def failed(kind: str | None, **more: Any) -> RequestRecord:
    """A measured request that failed so; None: that timed out."""
    outcome = RequestOutcome.TIMEOUT if kind is None else RequestOutcome.ERROR
    return answered(update_s=(), update_tokens=(), **{"outcome": outcome, "error": kind, **more})


def shift(arm: str = "off", cell: str = "rate 2", block: int = 0, **more: Any) -> ShiftRecord:
    """Measured from 0 to 10 s unless told."""
    times = {"start_s": 0.0, "measured_from_s": 0.0, "measured_to_s": 10.0, "end_s": 10.0}
    return ShiftRecord(arm=arm, cell=cell, block=block, **times | more)


def write_run(
    folder: Path,
    records: list[RequestRecord],
    shifts: list[ShiftRecord],
    **more: Any,
) -> RunFolder:
    """With the arms and loads that the records name."""
    run = RunFolder(folder)
    arms = [ArmFacts(name, name, f"http://{name}") for name in {r.arm: 0 for r in records}]
    cells = []
    for name in {record.cell: 0 for record in records}:
        kind, _, value = name.partition(" ")
        cells.append(CellFacts(name, kind, float(value)))
    facts: dict[str, Any] = {"command": "outrider bench serve", "started": "", "seed": 0}
    run.write_facts(RunFacts(**facts | {"arms": arms, "cells": cells} | more))
    write_records(run.requests_path, records)
    for each in shifts:
        append(run.shifts_path, each)
    return run


def speculated(*rounds_by_accepted: int, depth: int) -> RequestSpeculation:
    """Rounds that all drafted `depth` tokens."""
    rounds = sum(rounds_by_accepted)
    accepted = sum(index * num for index, num in enumerate(rounds_by_accepted))
    return RequestSpeculation(rounds, rounds * depth, accepted, list(rounds_by_accepted))
