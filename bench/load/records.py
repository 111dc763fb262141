"""One request as its client saw it: a line of `requests.jsonl`.

Times are seconds on the clock of the run, which all processes of a machine share. Latency counts
from `intended_s`, when the request should have been sent: a client that a slow server holds up
sends late, and a count from `sent_s` would hide just the requests that suffered most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from outrider.bench.load.plain import plain
from outrider.errors import OutriderError

CLOCK_DIGITS = 5  # of a second; what a client can tell apart
LARGEST = 1e12  # of seconds and of tokens; what is beyond it was not measured
_TIMES = ("intended_s", "sent_s", "end_s")
_COUNTS = ("output_tokens", "retries", "client")
_OPTIONAL_COUNTS = ("prompt_tokens", "cached_tokens")
Row = TypeVar("Row")
_NAMES = ("id", "arm", "cell", "category")
_OPTIONAL_TEXTS = ("error", "message", "finish")


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
    DISCARDED = "discarded"  # the client could not keep up, or the run was interrupted


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
        shown: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None or value == []:
                continue
            kind = type(value)
            if kind is float:
                value = round(value, CLOCK_DIGITS)
            elif kind is Speculated:
                value = dataclasses.asdict(value)
            shown[name] = value
        if "update_s" in shown:
            shown["update_s"] = [round(at_s, CLOCK_DIGITS) for at_s in self.update_s]
        line = json.dumps(shown, separators=(",", ":"), ensure_ascii=False)
        # A server may send half a character: a file of UTF-8 holds it escaped only.
        return line if _is_utf8(line) else json.dumps(shown, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> RequestRecord:
        """Raises `ValueError`, `TypeError` or `KeyError` for what `to_json` does not write."""
        given: dict[str, Any] = read_row(line)
        given["phase"] = Phase(given["phase"])
        given["outcome"] = Outcome(given["outcome"])
        given["counted_by"] = CountedBy(given["counted_by"])
        if "speculated" in given:
            given["speculated"] = Speculated(**given["speculated"])
        record = cls(**given)
        record._check()
        return record

    def _check(self) -> None:
        """The file may have passed through other hands."""
        for name in _TIMES:
            _need(abs(getattr(self, name)) < LARGEST, name)
        _need(type(self.block) is int and abs(self.block) < LARGEST, "block")
        for name in _COUNTS:
            _need(_is_count(getattr(self, name)), name)
        for name in _OPTIONAL_COUNTS:
            _need(getattr(self, name) is None or _is_count(getattr(self, name)), name)
        _need(_are_within(self.update_s), "update_s")
        _need(_are_within(self.update_tokens), "update_tokens")
        _need(len(self.update_tokens) in (0, len(self.update_s)), "update_tokens")
        if (told := self.speculated) is not None:
            counts = (told.rounds, told.drafted, told.accepted)
            _need(
                all(map(_is_count, counts)) and _are_within(told.rounds_by_accepted), "speculated"
            )
        for name in (*_NAMES, *_OPTIONAL_TEXTS):
            if (text := getattr(self, name)) is not None or name in _NAMES:
                _need(isinstance(text, str), name)
                setattr(self, name, plain(text))


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records of a file, one at a time; a damaged line is named."""
    expected = "a record of a request", "a requests.jsonl of `outrider bench serve`"
    yield from read_lines(path, RequestRecord.from_json, *expected)


def read_lines(path: Path, read: Callable[[str], Row], what: str, expected: str) -> Iterator[Row]:
    """What `read` makes of each line that is not blank; a line it refuses is named."""
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield read(line)
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); give {expected}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OutriderError(
            f"{path}:{number} is not {what} ({plain(str(error))[:200]}); give {expected}."
        ) from None


def read_row(line: str) -> dict[str, Any]:
    """An object of JSON; NaN and Infinity, which Python would take, are none."""
    row = _decoder.decode(line)
    if not isinstance(row, dict):
        raise TypeError("it is no object")
    return row


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.writelines(record.to_json() + "\n" for record in records)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


_decoder = json.JSONDecoder(parse_constant=_refuse)


def _need(is_right: bool, name: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is out of range or of another kind")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _are_within(values: Any) -> bool:
    """Whether all are numbers from 0; by the least and the largest, as there are many."""
    return isinstance(values, list) and (
        not values or bool(min(values) >= 0 and max(values) < LARGEST)
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
