"""Recorded traffic: arrival times, lengths and shared prefixes of requests."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.input_files import count_of, json_rows, numbered_lines, path_from, shown
from outrider.loadtest.bundled_data import DATA

PREFIX_BLOCK = 512  # tokens per prefix id of Mooncake's trace
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_MILLISECONDS = 1e15
MAX_TOKENS = 100_000_000  # of a row; a larger number means a damaged file
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE = f"a CSV file with the columns {', '.join(AZURE_COLUMNS)}"
MOONCAKE = "JSON lines of {timestamp (ms), input_length, output_length, hash_ids}"
AZURE_FOLDER = DATA / "azure_llm_trace_2023"
BUNDLED = {
    "azure-code": AZURE_FOLDER / "AzureLLMInferenceTrace_code.csv.gz",
    "azure-conv": AZURE_FOLDER / "AzureLLMInferenceTrace_conv.csv.gz",
    "mooncake": DATA / "mooncake_trace" / "conversation_trace.jsonl.gz",
}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    at_s: float  # from the start of the trace, or of the window cut from it
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...]  # one per block of `PREFIX_BLOCK` tokens; empty if unknown
    number: int  # its index in the whole trace


def read_trace(
    spec: str, *, scale: float = 1.0, start_s: float = 0.0, duration_s: float | None = None
) -> list[TraceRow]:
    """The rows of a bundled trace (`BUNDLED`) or of a file in either format, sorted by time.

    `start_s` and `duration_s` select a window in the trace's own time, whose start becomes 0.
    `scale` then divides the times: 2 replays it twice as fast.
    """
    _check_options(scale, start_s, duration_s)
    path = BUNDLED.get(spec.strip().lower())
    if path is None:
        path = path_from(spec)
        if not os.path.exists(path):
            raise ConfigError(
                f"trace {spec!r} is neither one of {', '.join(BUNDLED)} nor a file; name one, or "
                f"give {AZURE}, or {MOONCAKE}."
            )
    timed = sorted(_layout(path)(path), key=lambda each: each[0])
    if not timed:
        raise ConfigError(f"{path} has no requests; give a trace with at least one.")
    first = timed[0][0]
    end_s = math.inf if duration_s is None else start_s + duration_s
    rows = [
        TraceRow(((at - first) / 1e6 - start_s) / scale, *lengths, number)
        for number, (at, lengths) in enumerate(timed)
        if start_s <= (at - first) / 1e6 < end_s
    ]
    if not rows:
        raise ConfigError(
            f"the window from {start_s:g} s has no request of {spec}, which is "
            f"{(timed[-1][0] - first) / 1e6:.0f} s long; choose another window."
        )
    return rows


Lengths = tuple[int, int, tuple[int, ...]]
Timed = tuple[int, Lengths]  # microseconds on the trace's own clock


def _layout(path: Path) -> Callable[[Path], Iterator[Timed]]:
    """The reader for a file, by its first line: a JSON object, or Azure's header."""
    first = next((line for _, line in numbered_lines(path)), "")
    if first.lstrip().startswith("{"):
        return _read_mooncake
    if set(AZURE_COLUMNS) <= {name.strip() for name in first.split(",")}:
        return _read_azure
    raise ConfigError(f"{path} is not a known trace format; give {AZURE}, or {MOONCAKE}.")


def _read_azure(path: Path) -> Iterator[Timed]:
    lines = numbered_lines(path)
    _, header = next(lines)
    names = [name.strip() for name in header.split(",")]
    at, prompt, output = (names.index(column) for column in AZURE_COLUMNS)
    for number, line in lines:
        where = f"{path}:{number}"
        try:
            cells = next(csv.reader([line]))
            time = datetime.fromisoformat(cells[at].strip())
            lengths = int(cells[prompt]), int(cells[output])
        except (ValueError, IndexError, csv.Error, StopIteration):
            raise ConfigError(
                f"{where} is {shown(line.strip())}; give {', '.join(AZURE_COLUMNS)} as in "
                "`2023-11-16 18:17:03.9799600,4808,10`."
            ) from None
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        yield (
            (time - EPOCH) // timedelta(microseconds=1),
            (
                _tokens(lengths[0], "ContextTokens", where),
                _tokens(lengths[1], "GeneratedTokens", where),
                (),
            ),
        )


def _read_mooncake(path: Path) -> Iterator[Timed]:
    for where, row in json_rows(path, MOONCAKE):
        at_ms = row.get("timestamp")
        if (
            isinstance(at_ms, bool)
            or not isinstance(at_ms, int | float)
            or not 0 <= at_ms < MAX_MILLISECONDS
        ):
            raise ConfigError(
                f"{where}: timestamp must be milliseconds from 0, not {shown(at_ms)}; give "
                f"{MOONCAKE}."
            )
        ids = row.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise ConfigError(
                f"{where}: hash_ids must be a list of whole numbers from 0, not {shown(ids)}."
            )
        lengths = (
            _tokens(row.get("input_length"), "input_length", where),
            _tokens(row.get("output_length"), "output_length", where),
            tuple(ids),
        )
        yield round(at_ms * 1000), lengths


def _tokens(value: Any, name: str, where: str) -> int:
    counted = count_of(value, name, where)
    if counted > MAX_TOKENS:
        raise ConfigError(f"{where}: {name} is {shown(counted)}; give at most {MAX_TOKENS}.")
    return counted


def _check_options(scale: float, start_s: float, duration_s: float | None) -> None:
    if not math.isfinite(scale) or scale <= 0:
        raise ConfigError(
            f"the trace's scale is {scale}; give a number above 0, 2 for twice as fast."
        )
    if not math.isfinite(start_s) or start_s < 0:
        raise ConfigError(f"the trace's start_s is {start_s}; give seconds from 0.")
    if duration_s is not None and not (math.isfinite(duration_s) and duration_s > 0):
        raise ConfigError(f"the trace's duration_s is {duration_s}; give seconds above 0.")
