"""One request as its client saw it: a line of `requests.jsonl`.

Times are seconds on the clock of the run, which all processes of a machine share. Latency counts
from `intended_s`, when the request should have been sent: a client that a slow server holds up
sends late, and a count from `sent_s` would hide just the requests that suffered most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

CLOCK_DIGITS = 5  # of a second; what a client can tell apart


class Outcome(StrEnum):
    """How a request ended: every one that was sent ends in exactly one of these."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class Phase(StrEnum):
    """By its intended time; only measured requests enter a figure."""

    WARM_UP = "warm-up"
    MEASURED = "measured"
    COOL_DOWN = "cool-down"
    DISCARDED = "discarded"  # the client could not keep up; measured again with more processes


class CountedBy(StrEnum):
    """Where a number of tokens comes from."""

    IDS = "ids"
    USAGE = "usage"
    TOKENISER = "tokeniser"
    NOBODY = "nobody"


@dataclass(slots=True)
class Speculated:
    """What speculation did for one request.

    `rounds_by_accepted[j]` is the number of rounds that accepted exactly j drafts; empty where
    the server does not tell.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds_by_accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestRecord:
    """Sent, answered or not; see the module's words on time."""

    id: str  # of the ask
    arm: str
    cell: str  # the load it was part of, as "rate 2" or "clients 8"
    block: int
    phase: Phase
    category: str
    intended_s: float
    sent_s: float
    end_s: float = 0.0
    outcome: Outcome = Outcome.ERROR
    error: str | None = None  # its kind in few words, "http 429", "reset", "malformed", ...
    message: str | None = None  # what was said about it
    # Each update that carried tokens: seconds since `sent_s`, and how many tokens it carried.
    # Tokens are empty where the server tells only their sum.
    update_s: list[float] = field(default_factory=list)
    update_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = CountedBy.NOBODY
    finish: str | None = None
    retries: int = 0
    client: int = 0
    speculated: Speculated | None = None
    token_ids: list[int] | None = None  # kept if asked for
    text: str | None = None  # likewise

    @property
    def first_s(self) -> float | None:
        """When the first tokens arrived."""
        return self.sent_s + self.update_s[0] if self.update_s else None

    def to_json(self) -> str:
        """One line; what is empty is left out."""
        shown = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and value != []
        }
        return json.dumps(_rounded(shown), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> RequestRecord:
        given: dict[str, Any] = json.loads(line)
        given["phase"] = Phase(given["phase"])
        given["outcome"] = Outcome(given["outcome"])
        given["counted_by"] = CountedBy(given["counted_by"])
        if "speculated" in given:
            given["speculated"] = Speculated(**given["speculated"])
        return cls(**given)


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records of a file, one at a time; a damaged line is named."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield RequestRecord.from_json(line)
            except (ValueError, TypeError, KeyError) as error:
                raise OutriderError(
                    f"{path}:{number} is not a record of a request ({error}); give a "
                    "requests.jsonl of `outrider bench serve`."
                ) from None


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.writelines(record.to_json() + "\n" for record in records)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, CLOCK_DIGITS)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value
