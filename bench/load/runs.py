"""What a run leaves in its folder, and reading it again.

run.json         what was done: arms, loads, options, machine
requests.jsonl   every request, see `records`
shifts.jsonl     every stretch of one arm under one load
samples.jsonl    servers and clients once a second: memory, handles, threads, CPU, counters
chaos.jsonl      what was done to the server on purpose, see `chaos`
report.html      made from the above, with its pictures beside it
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.bench.load.plain import plain
from outrider.bench.load.records import LARGEST, RequestRecord, read_lines, read_records, read_row
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
    is_discarded: bool = False  # the client could not keep up, or nothing was measured yet
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
    memory_mb: float | None = None  # resident
    anonymous_mb: float | None = None  # of it, not from files; see `processes.Use`
    handles: int | None = None
    threads: int | None = None
    cpu_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    steps: int | None = None  # passes of the target, each for many requests
    rounds: int | None = None  # of single requests: drafts verified, or passes that committed
    committed: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_by_position: list[int] | None = None
    accept_length: float | None = None  # tokens a round of late, where a server tells only that


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
    text: str = ""  # the set of prompts, where a run has several
    temperature: float | None = None  # likewise


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


Kind = TypeVar("Kind", bound="DataclassInstance")
_KINDS: dict[str, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "list": list,
    "dict": dict,
}


class Run:
    """A folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def facts(self) -> RunFacts:
        path = self.folder / "run.json"
        try:
            given = read_row(path.read_text(encoding="utf-8"))
            given["arms"] = [checked(ArmFacts, arm) for arm in given["arms"]]
            given["cells"] = [checked(CellFacts, cell) for cell in given["cells"]]
            given["notes"] = [plain(note) for note in given.get("notes", [])]
            return checked(RunFacts, given)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OutriderError(
                f"{self.folder} is not the folder of a run ({plain(str(error))[:200]}); give one "
                "that `outrider bench serve --out` has written."
            ) from None

    def write_facts(self, facts: RunFacts) -> None:
        self.__dict__.pop("facts", None)  # what was read before is out of date
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

    def samples(self) -> list[Sample]:
        return rows_of(self.samples_path, Sample)


def append(path: Path, row: ShiftRecord | Sample) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n")


def rows_of(path: Path, kind: type[Kind]) -> list[Kind]:
    """The rows of a file, none if there is no such file; a damaged line is named."""
    if not path.exists():
        return []
    what, expected = f"a row of {path.name}", "the folder as `outrider bench serve` has left it"
    return list(read_lines(path, lambda line: checked(kind, read_row(line)), what, expected))


def checked(kind: type[Kind], row: dict[str, Any]) -> Kind:
    """A record of what a file says, whose fields are of their kinds and can be printed."""
    made = kind(**row)
    fit: dict[str, str] = {}
    for each in dataclasses.fields(made):
        value = getattr(made, each.name)
        name, *or_none = str(each.type).split(" | ")
        if value is None and or_none:
            continue
        is_right = isinstance(value, _KINDS[name.partition("[")[0]])
        if name in ("int", "float"):
            is_right = is_right and not isinstance(value, bool) and abs(value) < LARGEST
        if not is_right:
            raise ValueError(f"{each.name} is out of range or of another kind")
        if isinstance(value, str):
            fit[each.name] = plain(value)
    return dataclasses.replace(made, **fit)
