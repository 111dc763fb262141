"""One request as measured by its client: a line of `requests.jsonl`.

Times are seconds since the start of the run, on the machine's monotonic clock. Latency counts from
`intended_s`, when the request was due: a slow server delays sending, so latency from `sent_s`
would hide the slowest requests (coordinated omission).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import OutriderError
from outrider.loadtest.plain import plain

CLOCK_DIGITS = 5  # decimals of a second; the resolution of a client's clock
MAX_VALUE = 1e12  # of seconds and of tokens; larger values are invalid
_TIMES = ("intended_s", "sent_s", "end_s")
_COUNTS = ("output_tokens", "retries", "client")
_OPTIONAL_COUNTS = ("prompt_tokens", "cached_tokens")
Row = TypeVar("Row")
_NAMES = ("id", "arm", "cell", "category")
_OPTIONAL_TEXTS = ("error", "message", "finish")


class RequestOutcome(StrEnum):
    """How a request ended; every request sent has exactly one outcome."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class ShiftPhase(StrEnum):
    """Phase of a request by its intended time; figures use measured requests only."""

    WARM_UP = "warm-up"
    MEASURED = "measured"
    COOL_DOWN = "cool-down"
    DISCARDED = "discarded"  # the client was the bottleneck, or the run was interrupted


class CountedBy(StrEnum):
    """Source of a token count."""

    IDS = "ids"
    USAGE = "usage"
    TOKENISER = "tokeniser"
    UNKNOWN = "nobody"  # the value is part of the file format


@dataclass(slots=True)
class RequestSpeculation:
    """Speculation counts of one request.

    `rounds_by_accepted[j]` is the number of rounds that accepted exactly j draft tokens; empty if
    the server does not report it.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds_by_accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestRecord:
    """One request and its outcome; see the module docstring for times."""

    id: str  # of the `BenchRequest`
    arm: str
    cell: str  # the load, as "rate 2" or "clients 8"
    block: int
    phase: ShiftPhase
    category: str
    intended_s: float
    sent_s: float
    end_s: float = 0.0
    outcome: RequestOutcome = RequestOutcome.ERROR
    error: str | None = None  # the kind, as "http 429", "reset", "malformed"
    message: str | None = None  # the error's text
    # Per update with tokens: seconds since `sent_s`, and its number of tokens. `update_tokens` is
    # empty if the server reports only the total.
    update_s: list[float] = field(default_factory=list)
    update_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = CountedBy.UNKNOWN
    finish: str | None = None
    retries: int = 0
    client: int = 0
    speculated: RequestSpeculation | None = None
    token_ids: list[int] | None = None  # kept on request
    text: str | None = None  # kept on request

    @property
    def first_s(self) -> float | None:
        """Time of the first token."""
        return self.sent_s + self.update_s[0] if self.update_s else None

    def to_json(self) -> str:
        """One line of JSON without empty fields."""
        row: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None or value == []:
                continue
            kind = type(value)
            if kind is float:
                value = round(value, CLOCK_DIGITS)
            elif kind is RequestSpeculation:
                value = dataclasses.asdict(value)
            row[name] = value
        if "update_s" in row:
            row["update_s"] = [round(at_s, CLOCK_DIGITS) for at_s in self.update_s]
        line = json.dumps(row, separators=(",", ":"), ensure_ascii=False)
        # A server may send a lone surrogate, which UTF-8 can only hold escaped.
        return line if _is_utf8(line) else json.dumps(row, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> RequestRecord:
        """Raises `ValueError`, `TypeError` or `KeyError` for a line `to_json` would not write."""
        row: dict[str, Any] = read_row(line)
        row["phase"] = ShiftPhase(row["phase"])
        row["outcome"] = RequestOutcome(row["outcome"])
        row["counted_by"] = CountedBy(row["counted_by"])
        if "speculated" in row:
            row["speculated"] = RequestSpeculation(**row["speculated"])
        record = cls(**row)
        record._check()
        return record

    def _check(self) -> None:
        """Validates every field: the file may have been edited."""
        for name in _TIMES:
            _need(abs(getattr(self, name)) < MAX_VALUE, name)
        _need(type(self.block) is int and abs(self.block) < MAX_VALUE, "block")
        for name in _COUNTS:
            _need(_is_count(getattr(self, name)), name)
        for name in _OPTIONAL_COUNTS:
            _need(getattr(self, name) is None or _is_count(getattr(self, name)), name)
        _need(_are_within(self.update_s), "update_s")
        _need(_are_within(self.update_tokens), "update_tokens")
        _need(len(self.update_tokens) in (0, len(self.update_s)), "update_tokens")
        if (stats := self.speculated) is not None:
            counts = (stats.rounds, stats.drafted, stats.accepted)
            _need(
                all(map(_is_count, counts)) and _are_within(stats.rounds_by_accepted), "speculated"
            )
        for name in (*_NAMES, *_OPTIONAL_TEXTS):
            if (text := getattr(self, name)) is not None or name in _NAMES:
                _need(isinstance(text, str), name)
                setattr(self, name, plain(text))


def read_records(path: Path) -> Iterator[RequestRecord]:
    """Streams the records of a file; an error names the damaged line."""
    expected = "a record of a request", "a requests.jsonl of `outrider bench serve`"
    yield from read_lines(path, RequestRecord.from_json, *expected)


def read_lines(path: Path, read: Callable[[str], Row], what: str, expected: str) -> Iterator[Row]:
    """Applies `read` to each non-blank line; an error names the line."""
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
    """Parses a JSON object; rejects NaN and Infinity, which Python accepts."""
    row = _decoder.decode(line)
    if not isinstance(row, dict):
        raise TypeError("it is not an object")
    return row


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.writelines(record.to_json() + "\n" for record in records)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


_decoder = json.JSONDecoder(parse_constant=_refuse)


def _need(is_valid: bool, name: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is out of range or of the wrong type")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_VALUE


def _are_within(values: Any) -> bool:
    """Whether all are numbers from 0. Checks only minimum and maximum, for speed."""
    return isinstance(values, list) and (
        not values or bool(min(values) >= 0 and max(values) < MAX_VALUE)
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
