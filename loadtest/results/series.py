"""One arm under one load, second by second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.loadtest.results.measures import Floats, Series
from outrider.loadtest.runs import ServerSample, ShiftRecord


def series_of(
    shifts: Sequence[ShiftRecord],
    columns: Mapping[str, Floats],
    tokens_by_second: Mapping[int, float],
    samples: Sequence[ServerSample],
) -> Series:
    """`columns` and `tokens_by_second` must be of the shifts' arm and load."""
    ordered = sorted(shifts, key=lambda shift: shift.start_s)
    pieces = [_of_shift(shift, columns, tokens_by_second, samples) for shift in ordered]
    names = [each.name for each in fields(Series)]
    if not pieces:
        none: dict[str, NDArray[Any]] = {name: np.empty(0) for name in names}
        return Series(**none)
    return Series(**{name: np.concatenate([piece[name] for piece in pieces]) for name in names})


def _of_shift(
    shift: ShiftRecord,
    columns: Mapping[str, Floats],
    tokens_by_second: Mapping[int, float],
    samples: Sequence[ServerSample],
) -> dict[str, NDArray[Any]]:
    start = int(np.floor(shift.start_s))
    at_s = np.arange(start, max(int(np.ceil(shift.end_s)), start + 1), dtype=np.float64)
    mine = {name: values[columns["block"] == shift.block] for name, values in columns.items()}
    own = [
        sample
        for sample in samples
        if sample.arm == shift.arm and shift.start_s <= sample.at_s <= shift.end_s
    ]
    acceptance, depth = _of_counters(at_s, own)
    if np.isnan(acceptance).all():
        acceptance, depth = _of_requests(at_s, mine)
    return {
        "at_s": at_s,
        "block": np.full(at_s.shape, shift.block, dtype=np.int64),
        "is_measured": (at_s >= shift.measured_from_s) & (at_s < shift.measured_to_s),
        "tokens_s": np.array([tokens_by_second.get(int(second), 0.0) for second in at_s]),
        "ttft_p50_ms": _medians(at_s, mine["intended_s"], mine["ttft"]),
        "in_flight": _in_flight(at_s, mine),
        "running": _by_second(at_s, own, lambda sample: sample.running),
        "waiting": _by_second(at_s, own, lambda sample: sample.waiting),
        "acceptance": acceptance,
        "depth": depth,
    }


def _medians(at_s: Floats, when_s: Floats, values: Floats) -> Floats:
    known = ~np.isnan(values)
    index = np.floor(when_s[known]).astype(np.int64) - int(at_s[0])
    values = values[known]
    order = np.argsort(index, kind="stable")
    index, values = index[order], values[order]
    starts = np.searchsorted(index, np.arange(at_s.size))
    ends = np.searchsorted(index, np.arange(at_s.size), side="right")
    medians = np.full(at_s.shape, np.nan)
    for second in np.flatnonzero(ends > starts):
        medians[second] = np.median(values[starts[second] : ends[second]])
    return medians


def _in_flight(at_s: Floats, mine: Mapping[str, Floats]) -> Floats:
    """At the middle of each second."""
    middle = at_s + 0.5
    sent = np.searchsorted(np.sort(mine["sent_s"]), middle, side="right")
    ended = np.searchsorted(np.sort(mine["end_s"]), middle, side="right")
    return (sent - ended).astype(np.float64)


def _by_second(
    at_s: Floats, samples: Sequence[ServerSample], value: Callable[[ServerSample], float | None]
) -> Floats:
    own = np.full(at_s.shape, np.nan)
    for sample in samples:
        index = int(sample.at_s) - int(at_s[0])
        known = value(sample)
        if known is not None and 0 <= index < own.size:
            own[index] = known
    return own


def _of_counters(at_s: Floats, samples: Sequence[ServerSample]) -> tuple[Floats, Floats]:
    """Acceptance and depth between consecutive samples of a server."""
    acceptance, depth = np.full(at_s.shape, np.nan), np.full(at_s.shape, np.nan)
    before: dict[str, ServerSample] = {}
    for sample in sorted(samples, key=lambda sample: sample.at_s):
        last = before.get(sample.server)
        before[sample.server] = sample
        index = int(sample.at_s) - int(at_s[0])
        if last is None or not 0 <= index < at_s.size:
            continue
        drafted, accepted, rounds = (
            _rise(last, sample, name) for name in ("drafted", "accepted", "rounds")
        )
        if drafted and accepted is not None:
            acceptance[index] = accepted / drafted
        if drafted is not None and rounds:
            depth[index] = drafted / rounds
    return acceptance, depth


def _rise(last: ServerSample, sample: ServerSample, name: str) -> int | None:
    """None if a counter is unavailable or the server was restarted."""
    before, after = getattr(last, name), getattr(sample, name)
    if before is None or after is None or after < before:
        return None
    return int(after - before)


def _of_requests(at_s: Floats, mine: Mapping[str, Floats]) -> tuple[Floats, Floats]:
    """Acceptance and depth of the requests that finished in each second."""
    index = np.floor(mine["end_s"]).astype(np.int64) - int(at_s[0])
    inside = (index >= 0) & (index < at_s.size)
    drafted, accepted, rounds = (
        np.bincount(index[inside], mine[name][inside], minlength=at_s.size)
        for name in ("drafted", "accepted", "rounds")
    )
    nothing = np.full(at_s.shape, np.nan)
    return (
        np.divide(accepted, drafted, out=nothing.copy(), where=drafted > 0),
        np.divide(drafted, rounds, out=nothing.copy(), where=rounds > 0),
    )
