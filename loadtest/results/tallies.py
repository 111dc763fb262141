"""Aggregates records as they stream in.

A request becomes one row of numbers (about 190 bytes and its id), independent of its updates.
Counts by update go into fixed-size histograms, one per block, category and length bucket. In all a
request takes half a kilobyte, whatever its length.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.loadtest.records import RequestOutcome, RequestRecord, ShiftPhase
from outrider.loadtest.results.measures import Floats, Spread

Ints = NDArray[np.int64]
Window = tuple[float, float]  # measured from, to

NAN = float("nan")
UNKNOWN = -1

SMALLEST_MS = 0.01  # resolution of a client's clock
STEP = 1.01  # ratio of adjacent bins: percentiles are exact to half a per cent
NUM_BINS = 2 + math.ceil(math.log(1e9) / math.log(STEP))  # up to nearly three hours

PENDING = 2048  # updates of a group counted at once

LENGTH_EDGES = (64, 256, 1024, 4096, 16384)
LENGTH_BUCKETS = (
    f"up to {LENGTH_EDGES[0]}",
    *(f"{low + 1} to {high}" for low, high in zip(LENGTH_EDGES, LENGTH_EDGES[1:], strict=False)),
    f"over {LENGTH_EDGES[-1]}",
    "unknown",
)


def length_bucket(prompt_tokens: int | None) -> int:
    """Index into `LENGTH_BUCKETS`."""
    if prompt_tokens is None or prompt_tokens < 0:
        return len(LENGTH_BUCKETS) - 1
    return bisect.bisect_left(LENGTH_EDGES, prompt_tokens)


class Histogram:
    """Durations in bins that grow by one per cent; count, mean and extremes are exact."""

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(NUM_BINS, dtype=np.int64)
        self.total = 0.0
        self.min = math.inf
        self.max = -math.inf

    @staticmethod
    def bins(values_ms: Floats) -> Ints:
        over = np.log(np.maximum(values_ms, SMALLEST_MS) / SMALLEST_MS) / math.log(STEP)
        return np.minimum(over.astype(np.int64) + (values_ms >= SMALLEST_MS), NUM_BINS - 1)

    def add(self, values_ms: Floats, bins: Ints, weights: Ints | int = 1) -> None:
        """Adds values with their bins, which callers compute once for several histograms."""
        if not values_ms.size:
            return
        np.add.at(self.counts, bins, weights)
        self.total += float((values_ms * weights).sum())
        self.min = min(self.min, float(values_ms.min()))
        self.max = max(self.max, float(values_ms.max()))

    def merge(self, other: Histogram) -> None:
        self.counts += other.counts
        self.total += other.total
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def spread(self) -> Spread | None:
        used = np.flatnonzero(self.counts)
        if not used.size:
            return None
        middles = np.where(used > 0, SMALLEST_MS * STEP ** (used - 0.5), 0.0)
        counts = self.counts[used]
        mean = self.total / int(counts.sum())
        return Spread.of_counts(np.clip(middles, self.min, self.max), counts, mean, self.max)


@dataclass(slots=True)
class GroupTally:
    """Counts by update, round and name of one group of measured requests."""

    gap: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    updates_by_tokens: Counter[int] = field(default_factory=Counter)
    rounds_by_accepted: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    counted_by: Counter[str] = field(default_factory=Counter)

    def merge(self, other: GroupTally) -> None:
        self.gap.merge(other.gap)
        self.itl.merge(other.itl)
        self.updates_by_tokens.update(other.updates_by_tokens)
        self.rounds_by_accepted.update(other.rounds_by_accepted)
        self.errors.update(other.errors)
        self.counted_by.update(other.counted_by)


# The columns of a request's row; NaN if undefined.
COLUMNS = (
    *("block", "category", "bucket", "is_measured", "outcome", "retries"),
    *("intended_s", "sent_s", "end_s", "ttft", "ttft_from_send", "tpot", "e2e"),
    *("tokens_in_window", "ended_in_window", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("rounds", "drafted", "accepted", "open_at_start", "open_at_end"),
)
OUTCOMES = tuple(RequestOutcome)


class _PendingPairs:
    """Buffers pairs of arrays, to count many at once."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Floats, Floats]] = []
        self._num = 0

    def add(self, values: Floats, tokens: Floats) -> bool:
        """Whether the buffer is full."""
        self._pairs.append((values, tokens))
        self._num += values.size + 1
        return self._num >= PENDING

    def take(self) -> tuple[Floats, Floats]:
        values, tokens = (
            np.concatenate([pair[side] for pair in self._pairs] or [np.empty(0)]) for side in (0, 1)
        )
        self._pairs, self._num = [], 0
        return values, tokens


Group = tuple[int, int, int]  # block, category, bucket


class CellTally:
    """All requests of one arm under one load; call `finish` before reading."""

    def __init__(self, windows: dict[int, list[Window]]) -> None:
        self._windows = windows  # by block
        self._rows = array("d")
        self.ids: list[str] = []
        self.categories: dict[str, int] = {}
        self.by_block: defaultdict[int, GroupTally] = defaultdict(GroupTally)
        self.by_category: defaultdict[int, GroupTally] = defaultdict(GroupTally)
        self.by_bucket: defaultdict[int, GroupTally] = defaultdict(GroupTally)
        self.tokens_by_second: defaultdict[int, float] = defaultdict(float)
        # Buffers: gaps with the tokens of the update after them, and arrival times with their
        # tokens.
        self._gaps: defaultdict[Group, _PendingPairs] = defaultdict(_PendingPairs)
        self._arrived = _PendingPairs()

    def add(self, record: RequestRecord) -> None:
        if record.phase is ShiftPhase.DISCARDED:
            return
        category = self.categories.setdefault(record.category, len(self.categories))
        bucket = length_bucket(record.prompt_tokens)
        arrived = record.sent_s + np.asarray(record.update_s, dtype=np.float64)
        tokens = tokens_of_updates(record)
        self.ids.append(record.id)
        self._rows.extend(self._row(record, category, bucket, arrived, tokens))
        if self._arrived.add(arrived, tokens):
            self._count_arrived()
        if record.phase is not ShiftPhase.MEASURED:
            return
        group = (record.block, category, bucket)
        tallies = self._tallies(group)
        _count_names(record, tallies)
        if record.outcome is RequestOutcome.OK and tokens.size:
            whole = np.maximum(np.rint(tokens), 1)
            for tally in tallies:
                tally.updates_by_tokens[int(whole[0])] += 1  # no gap before it
            if self._gaps[group].add(1000 * np.diff(arrived), whole[1:]):
                self._count_gaps(group)

    def finish(self) -> None:
        self._count_arrived()
        for group in self._gaps:
            self._count_gaps(group)

    def _tallies(self, group: Group) -> tuple[GroupTally, GroupTally, GroupTally]:
        block, category, bucket = group
        return self.by_block[block], self.by_category[category], self.by_bucket[bucket]

    def _count_arrived(self) -> None:
        moments, tokens = self._arrived.take()
        seconds, which = np.unique(np.floor(moments), return_inverse=True)
        sums = np.bincount(which, tokens, minlength=seconds.size)
        for second, total in zip(seconds.tolist(), sums.tolist(), strict=True):
            self.tokens_by_second[int(second)] += total

    def _count_gaps(self, group: Group) -> None:
        gaps, tokens = self._gaps[group].take()
        whole = tokens.astype(np.int64)
        shares = gaps / tokens
        gap_bins, share_bins = Histogram.bins(gaps), Histogram.bins(shares)
        nums, counts = (each.tolist() for each in np.unique(whole, return_counts=True))
        for tally in self._tallies(group):
            tally.gap.add(gaps, gap_bins)
            tally.itl.add(shares, share_bins, whole)
            tally.updates_by_tokens.update(dict(zip(nums, counts, strict=True)))

    def _row(
        self, record: RequestRecord, category: int, bucket: int, arrived: Floats, tokens: Floats
    ) -> Sequence[float]:
        in_window, has_ended = 0.0, False
        open_at_start = open_at_end = 0
        for start, end in self._windows.get(record.block, ()):
            in_window += float(tokens[(arrived >= start) & (arrived < end)].sum())
            has_ended |= start <= record.end_s < end
            open_at_start += record.intended_s < start <= record.end_s
            open_at_end += record.intended_s < end <= record.end_s
        done = record.speculated
        first_s = record.first_s
        after_first = float(tokens[1:].sum())
        return (
            *(record.block, category, bucket, record.phase is ShiftPhase.MEASURED),
            *(OUTCOMES.index(record.outcome), record.retries),
            *(record.intended_s, record.sent_s, record.end_s),
            NAN if first_s is None else 1000 * (first_s - record.intended_s),
            NAN if first_s is None else 1000 * (first_s - record.sent_s),
            1000 * float(arrived[-1] - arrived[0]) / after_first if after_first else NAN,
            1000 * (record.end_s - record.intended_s),
            *(in_window, has_ended),
            NAN if record.prompt_tokens is None else record.prompt_tokens,
            NAN if record.cached_tokens is None else record.cached_tokens,
            record.output_tokens,
            *((0, 0, 0) if done is None else (done.rounds, done.drafted, done.accepted)),
            *(open_at_start, open_at_end),
        )

    def columns(self) -> dict[str, Floats]:
        table = np.frombuffer(self._rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        return {name: table[:, index] for index, name in enumerate(COLUMNS)}


def tokens_of_updates(record: RequestRecord) -> Floats:
    """Tokens of each update; spread evenly if only their total is known."""
    num = len(record.update_s)
    if len(record.update_tokens) == num:
        return np.asarray(record.update_tokens, dtype=np.float64)
    return np.full(num, record.output_tokens / num if num else 0.0)


def _count_names(record: RequestRecord, tallies: Sequence[GroupTally]) -> None:
    done = record.speculated.rounds_by_accepted if record.speculated is not None else []
    for tally in tallies:
        if record.outcome is RequestOutcome.ERROR:
            tally.errors[record.error or "unknown"] += 1
        elif record.outcome is RequestOutcome.OK:
            tally.counted_by[str(record.counted_by)] += 1
            if done:
                tally.rounds_by_accepted.update(dict(enumerate(done)))
