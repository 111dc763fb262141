"""What a run leaves in its folder, and reading it again.

run.json         what was done: arms, loads, options, machine
requests.jsonl   every request, see `records`
shifts.jsonl     every stretch of one arm under one load
samples.jsonl    servers and clients once a second: memory, handles, threads, CPU, counters
report.html      made from the above, with its pictures beside it
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.bench.load.records import RequestRecord, read_records
from outrider.errors import OutriderError


@dataclass(slots=True)
class ShiftRecord:
    """One arm under one load for one stretch of time; A and B take turns shift by shift."""

    arm: str
    cell: str
    block: int
    start_s: float  # on the clock of the run, as all times
    measured_from_s: float
    measured_to_s: float
    end_s: float  # when its last request had ended
    is_discarded: bool = False  # the client could not keep up; another shift took its place
    # The client's own account.
    client_processes: int = 1
    client_cpu_s: float = 0.0  # of all of them
    loop_delay_p50_ms: float = 0.0  # how late their event loops were
    loop_delay_p99_ms: float = 0.0
    loop_delay_max_ms: float = 0.0
    send_lag_p99_ms: float = 0.0  # sent after intended; open loop only
    is_client_bound: bool = False
    # Of the machine's processes, where they can be seen.
    server_cpu_s: float | None = None
    idle_arms_cpu_s: float | None = None  # of the servers that were not being measured

    @property
    def seconds(self) -> float:
        return self.measured_to_s - self.measured_from_s


@dataclass(slots=True)
class Sample:
    """A server at one moment; counters are since its start, None where nobody tells."""

    at_s: float
    server: str
    arm: str | None  # being measured just then
    processes: int = 0
    memory_mb: float | None = None
    handles: int | None = None
    threads: int | None = None
    cpu_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    rounds: int | None = None  # drafts that were verified (vLLM), or passes that committed (ours)
    committed: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@dataclass(slots=True)
class ArmFacts:
    """What is told of an arm in every report."""

    name: str
    server: str  # arms of one server share its name
    url: str
    extras: dict[str, Any] = field(default_factory=dict)
    command: str | None = None  # how the harness started it


@dataclass(slots=True)
class CellFacts:
    """One load: its name, and what orders it among others."""

    name: str  # "rate 2", "clients 8", "trace azure-conv x0.5"
    kind: str  # "rate", "clients", "trace"
    value: float  # requests a second, clients at once, or the scale of the trace


@dataclass(slots=True)
class RunFacts:
    """`run.json`."""

    command: str
    started: str  # UTC
    seed: int
    arms: list[ArmFacts]
    cells: list[CellFacts]
    options: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    prompts: str = ""  # the set, as it was asked for
    is_natural: bool = True
    notes: list[str] = field(default_factory=list)


class Run:
    """A folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def facts(self) -> RunFacts:
        path = self.folder / "run.json"
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            given["arms"] = [ArmFacts(**arm) for arm in given["arms"]]
            given["cells"] = [CellFacts(**cell) for cell in given["cells"]]
            return RunFacts(**given)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutriderError(
                f"{self.folder} is not the folder of a run ({error}); give one that "
                "`outrider bench serve --out` has written."
            ) from None

    def write_facts(self, facts: RunFacts) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(facts), indent=1, ensure_ascii=False)
        (self.folder / "run.json").write_text(text + "\n", encoding="utf-8")

    @property
    def requests_path(self) -> Path:
        return self.folder / "requests.jsonl"

    @property
    def shifts_path(self) -> Path:
        return self.folder / "shifts.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.folder / "samples.jsonl"

    def requests(self) -> Iterator[RequestRecord]:
        return read_records(self.requests_path)

    def shifts(self) -> list[ShiftRecord]:
        return [ShiftRecord(**row) for row in _rows(self.shifts_path)]

    def samples(self) -> list[Sample]:
        return [Sample(**row) for row in _rows(self.samples_path)]


def append(path: Path, row: ShiftRecord | Sample) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
