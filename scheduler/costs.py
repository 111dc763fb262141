"""Costs of the parts of a step by size: measured at start-up, corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds by size. Between two sizes it interpolates, or, where passes are padded to the next
    captured size, takes that one's cost; beyond the last it extrapolates."""

    sizes: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]
    is_padded: bool = False

    def at(self, size: int) -> float:
        if size <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.seconds
        index = bisect_left(sizes, size)
        if index < len(sizes) and (self.is_padded or sizes[index] == size or index == 0):
            return seconds[index]
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        high = min(index, len(sizes) - 1)
        low = high - 1
        slope = (seconds[high] - seconds[low]) / (sizes[high] - sizes[low])
        if size > sizes[high]:  # the last two may cost the same: use the overall slope
            slope = max(slope, (seconds[high] - seconds[0]) / (sizes[high] - sizes[0]), 0.0)
        return seconds[high] + slope * (size - sizes[high])

    def times(self, factor: float) -> CostTable:
        return replace(self, seconds=tuple(factor * each for each in self.seconds))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step. Gaps between passes, layouts and sampling belong to the pass they precede or
    follow."""

    verify: CostTable  # the target's pass by its tokens, without attention's reads
    first_draft: CostTable  # the first pass of a drafting round by its rows
    next_draft: CostTable  # each of the others
    context_s: float = 0.0  # a token of context that one tile of the target's pass reads
    tile_tokens: int = 4  # tokens of a row that share such a tile
    prefill_s: float = 0.0  # a prompt token that the draft computes as well

    def catch_up_s(self, num_tokens: int) -> float:
        """Computing this many tokens that the draft lacks."""
        return self.first_draft.at(1) + num_tokens * self.prefill_s

    def drafting_s(self, depth: int) -> float:
        """For one row."""
        return self.round_s(1, depth)

    def round_s(self, num_rows: int, depth: int) -> float:
        """Drafting so deep for these rows together."""
        return self.first_draft.at(num_rows) + (depth - 1) * self.next_draft.at(num_rows)


_FIRST_WEIGHT, _LEAST_WEIGHT = 0.5, 0.05  # of a new observation
_OUTLIER = 2.5  # an observation off by this factor was disturbed
_PATIENCE = 8  # outliers in a row, after which they count
_HOPE = 0.9  # factor on sizes not tried yet, or one measured too high would never be corrected
_REFRESH = 16  # observations
_FORGET = 0.05  # of sizes not observed between two refreshes
_LARGEST = 2048  # tokens; few passes are larger


class _Ratio:
    """Observed over measured time."""

    __slots__ = ("is_fresh", "num_observed", "num_outliers", "value")

    def __init__(self) -> None:
        self.is_fresh = False  # observed since the last `forget`
        self.value = 1.0
        self.num_observed = 0
        self.num_outliers = 0

    def observe(self, ratio: float) -> None:
        now = ratio / self.value
        if not 1 / _OUTLIER < now < _OUTLIER and self.num_outliers < _PATIENCE:
            self.num_outliers += 1
            return
        self.num_outliers = 0
        self.num_observed += 1
        self.is_fresh = True
        weight = max(_FIRST_WEIGHT / self.num_observed, _LEAST_WEIGHT)
        self.value += weight * (ratio - self.value)

    def forget(self, overall: float) -> None:
        """Drift towards `overall` unless observed lately: a size that was once too expensive would
        otherwise never be tried again."""
        if not self.is_fresh:
            self.value += _FORGET * (overall - self.value)
        self.is_fresh = False


class LiveCosts:
    """Measured costs, corrected by the time steps take."""

    def __init__(self, measured: StepCosts) -> None:
        measured = replace(measured, verify=_extended(measured.verify))
        self.measured = measured
        self._verify = [_Ratio() for _ in measured.verify.sizes]
        self._overall = _Ratio()
        self._draft = _Ratio()
        self._num_unread = 0
        self.now = measured

    def observe_verify(self, tokens: int, context: float, seconds: float) -> None:
        measured = self.measured
        expected = measured.verify.at(tokens) + context * measured.context_s
        if expected <= 0 or seconds <= 0:
            return
        sizes = measured.verify.sizes
        index = min(bisect_left(sizes, tokens), len(sizes) - 1)
        self._verify[index].observe(seconds / expected)
        self._overall.observe(seconds / expected)
        self._num_unread += 1
        if self._num_unread >= _REFRESH:
            self._refresh()

    def observe_draft(self, expected_s: float, seconds: float) -> None:
        """`expected_s` is by the current costs."""
        if expected_s > 0 and seconds > 0:
            self._draft.observe(self._draft.value * seconds / expected_s)

    def _refresh(self) -> None:
        self._num_unread = 0
        measured, overall = self.measured, self._overall.value
        for each in (*self._verify, self._draft):
            each.forget(overall)
        hoped = overall * _HOPE
        ratios = [each.value if each.num_observed >= _PATIENCE else hoped for each in self._verify]
        drafting = self._draft.value
        if self._draft.num_observed < _PATIENCE:
            drafting *= _HOPE
        self.now = StepCosts(
            _scaled(measured.verify, ratios),
            measured.first_draft.times(drafting),
            measured.next_draft.times(drafting),
            measured.context_s * overall,
            measured.tile_tokens,
            measured.prefill_s * drafting,
        )


def _extended(table: CostTable) -> CostTable:
    """With sizes beyond those measured, each corrected separately."""
    sizes, seconds = list(table.sizes), list(table.seconds)
    while sizes[-1] < _LARGEST:
        sizes.append(2 * sizes[-1])
        seconds.append(table.at(sizes[-1]))
    return CostTable(tuple(sizes), tuple(seconds), table.is_padded)


def _scaled(table: CostTable, ratios: Sequence[float]) -> CostTable:
    """Kept non-decreasing in size: single ratios are noisy."""
    seconds, least = [], 0.0
    for each, ratio in zip(table.seconds, ratios, strict=True):
        least = max(each * ratio, least)
        seconds.append(least)
    return CostTable(table.sizes, tuple(seconds), table.is_padded)
