"""The files of a run's folder.

run.json         arms, loads, options, machine
requests.jsonl   every request, see `records`
shifts.jsonl     every shift: one arm under one load
samples.jsonl    servers and clients once a second: memory, handles, threads, CPU, counters
chaos.jsonl      injected faults, see `chaos`
report.html      generated from the above, with its pictures
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import OutriderError
from outrider.loadtest.plain import plain
from outrider.loadtest.records import MAX_VALUE, RequestRecord, read_lines, read_records, read_row

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(slots=True)
class ShiftRecord:
    """One arm under one load for a period of time; arms alternate shift by shift."""

    arm: str
    cell: str
    block: int
    start_s: float  # seconds since the start of the run, as all times
    measured_from_s: float
    measured_to_s: float
    end_s: float  # when its last request finished
    is_discarded: bool = False  # the client was the bottleneck, or nothing was measured yet
    # Measured by the client processes.
    client_processes: int = 1
    client_cpu_s: float = 0.0  # of all of them
    loop_delay_p50_ms: float = 0.0  # event loop lag
    loop_delay_p99_ms: float = 0.0
    loop_delay_max_ms: float = 0.0
    send_lag_p99_ms: float = 0.0  # sent after intended; open loop only
    is_client_bound: bool = False
    # CPU time of server processes on this host.
    server_cpu_s: float | None = None
    idle_arms_cpu_s: float | None = None  # of the servers that were not being measured

    @property
    def seconds(self) -> float:
        return self.measured_to_s - self.measured_from_s


@dataclass(slots=True)
class ServerSample:
    """State of a server at one moment. Counters count from its start; None if unavailable."""

    at_s: float
    server: str
    arm: str | None  # being measured at that moment
    processes: int = 0
    memory_mb: float | None = None  # resident
    anonymous_mb: float | None = None  # not backed by files; see `processes.Use`
    handles: int | None = None
    threads: int | None = None
    cpu_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    steps: int | None = None  # batched forward passes of the target
    rounds: int | None = None  # of single requests: drafts verified, or steps that committed
    committed: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_by_position: list[int] | None = None
    accept_length: float | None = None  # recent tokens a round, if a server reports only that


@dataclass(slots=True)
class ArmFacts:
    """Description of an arm in reports."""

    name: str
    server: str  # shared by arms of the same server
    url: str
    extras: dict[str, Any] = field(default_factory=dict)
    command: str | None = None  # if the harness started it


@dataclass(slots=True)
class CellFacts:
    """Description of a load."""

    name: str  # "rate 2", "clients 8", "trace azure-conv x0.5"
    kind: str  # "rate", "clients", "trace"
    value: float  # requests a second, clients at once, or the scale of the trace
    text: str = ""  # the dataset, where a run has several
    temperature: float | None = None  # where a run has several


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
    prompts: str = ""  # the datasets as specified
    is_natural: bool = True
    notes: list[str] = field(default_factory=list)


Kind = TypeVar("Kind", bound="DataclassInstance")
_KINDS: dict[str, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "list": list,
    "dict": dict,
}


class RunFolder:
    """Reads and writes the files of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def facts(self) -> RunFacts:
        path = self.folder / "run.json"
        try:
            row = read_row(path.read_text(encoding="utf-8"))
            row["arms"] = [checked(ArmFacts, arm) for arm in row["arms"]]
            row["cells"] = [checked(CellFacts, cell) for cell in row["cells"]]
            row["notes"] = [plain(note) for note in row.get("notes", [])]
            return checked(RunFacts, row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OutriderError(
                f"{self.folder} is not the folder of a run ({plain(str(error))[:200]}); give one "
                "that `outrider bench serve --out` has written."
            ) from None

    def write_facts(self, facts: RunFacts) -> None:
        self.__dict__.pop("facts", None)  # invalidate the cached property
        text = json.dumps(dataclasses.asdict(facts), indent=1, ensure_ascii=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "run.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OutriderError(
                f"{self.folder} cannot be written ({error.strerror}); give --out another folder."
            ) from None

    @property
    def requests_path(self) -> Path:
        return self.folder / "requests.jsonl"

    @property
    def shifts_path(self) -> Path:
        return self.folder / "shifts.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.folder / "samples.jsonl"

    @property
    def chaos_path(self) -> Path:
        return self.folder / "chaos.jsonl"

    def requests(self) -> Iterator[RequestRecord]:
        return read_records(self.requests_path)

    def shifts(self) -> list[ShiftRecord]:
        return rows_of(self.shifts_path, ShiftRecord)

    def samples(self) -> list[ServerSample]:
        return rows_of(self.samples_path, ServerSample)


def append(path: Path, row: ShiftRecord | ServerSample) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n")


def rows_of(path: Path, kind: type[Kind]) -> list[Kind]:
    """The rows of a file, empty if it does not exist; an error names the damaged line."""
    if not path.exists():
        return []
    what, expected = f"a row of {path.name}", "the folder as `outrider bench serve` has left it"
    return list(read_lines(path, lambda line: checked(kind, read_row(line)), what, expected))


def checked(kind: type[Kind], row: dict[str, Any]) -> Kind:
    """Builds a dataclass from a row; checks the fields' types and makes text printable."""
    made = kind(**row)
    fit: dict[str, str] = {}
    for each in dataclasses.fields(made):
        value = getattr(made, each.name)
        name, *or_none = str(each.type).split(" | ")
        if value is None and or_none:
            continue
        is_valid = isinstance(value, _KINDS[name.partition("[")[0]])
        if name in ("int", "float"):
            is_valid = is_valid and not isinstance(value, bool) and abs(value) < MAX_VALUE
        if not is_valid:
            raise ValueError(f"{each.name} is out of range or of the wrong type")
        if isinstance(value, str):
            fit[each.name] = plain(value)
    return dataclasses.replace(made, **fit)
