"""Confidence intervals and significance tests.

Empty, single, zero or missing values never raise or warn: an unknown result is None. Every random
procedure takes a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.loadtest.results.draws import (
    ROUNDING,
    Floats,
    Statistic,
    flipped,
    resampled,
    resampled_blocks,
)

LEVEL = 0.95
RESAMPLES = 2000
MIN_PAIRS = 3
MAX_LOG = 700.0  # logarithm of the largest ratio a float can represent


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its confidence interval; None: unknown."""

    value: float
    low: float | None
    high: float | None
    level: float = LEVEL


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """A over B. `p` is the p-value against a ratio of one."""

    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int  # pairs, or the smaller side
    kind: str  # "blocks", "asks", "unpaired" or "unpaired blocks"
    # A nonparametric check: sign flips of pairs, ranks of unpaired values.
    p_check: float | None = None
    remark: str | None = None  # why something is unknown

    @property
    def is_known(self) -> bool:
        return self.value is not None and self.p is not None

    def inverse(self) -> RatioEstimate:
        """B over A."""
        value, low, high = (
            None if each is None else 1 / each for each in (self.value, self.high, self.low)
        )
        return replace(self, value=value, low=low, high=high)


def clean(values: Sequence[float] | Floats) -> Floats:
    """Finite values only."""
    found = np.asarray(values, dtype=np.float64).ravel()
    return found[np.isfinite(found)]


def percentile(values: Sequence[float] | Floats, percent: float) -> float | None:
    """Linear interpolation, as numpy's."""
    known = clean(values)
    return float(np.percentile(known, percent)) if known.size else None


def mean_of_rows(table: Floats) -> Floats:
    means: Floats = table.mean(axis=-1)
    return means


def percentile_of_rows(percent: float) -> Statistic:
    def statistic(table: Floats) -> Floats:
        found: Floats = np.percentile(table, percent, axis=-1)
        return found

    return statistic


def bootstrap_interval(
    values: Sequence[float] | Floats,
    statistic: Statistic = mean_of_rows,
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Percentile bootstrap: the middle `level` of the statistic over resampled values.

    Plain percentiles instead of BCa: they stay within the range of the data, and BCa's correction
    is unstable for the tail percentiles that matter for latency. None without values; no ends for
    a single value.
    """
    known = clean(values)
    if not known.size:
        return None
    value = float(statistic(known[None, :])[0])
    if known.size == 1:
        return Interval(value, None, None, level)
    drawn = resampled(known, statistic, np.random.default_rng(seed), resamples)
    return _around(value, drawn, level)


def block_interval(
    blocks: Sequence[Sequence[float] | Floats],
    statistic: Statistic = mean_of_rows,
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """As `bootstrap_interval`, drawing blocks and then requests within them.

    Requests of one block share the machine's state, so they are not independent.
    """
    known = [each for each in map(clean, blocks) if each.size]
    if not known:
        return None
    value = float(statistic(np.concatenate(known)[None, :])[0])
    if len(known) == 1:
        return Interval(value, None, None, level)
    drawn = resampled_blocks(known, statistic, np.random.default_rng(seed), resamples)
    return _around(value, drawn, level)


def paired_ratio(
    a: Sequence[float | None],
    b: Sequence[float | None],
    *,
    level: float = LEVEL,
    seed: int = 0,
    kind: str = "blocks",
) -> RatioEstimate:
    """Geometric mean of the ratios of paired values.

    Interval and `p` are Student's t on the logarithms; `p_check` is the sign-flip test. Pairs with
    a missing or non-positive value are skipped.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    logs = _log_ratios(a, b)
    num = int(logs.size)
    if not num:
        return RatioEstimate(None, None, None, None, 0, kind, remark="nothing to compare")
    value = _exp(logs.mean())
    if num < MIN_PAIRS:
        return RatioEstimate(value, None, None, None, num, kind, remark="too few blocks to say")
    from scipy import special

    error = float(logs.std(ddof=1)) / math.sqrt(num)
    if error < ROUNDING:
        p = 1.0 if abs(logs.mean()) < ROUNDING else 0.0
        return RatioEstimate(value, value, value, p, num, kind, flipped(logs, seed))
    reach = float(special.stdtrit(num - 1, (1 + level) / 2)) * error
    p = 2 * float(special.stdtr(num - 1, -abs(float(logs.mean())) / error))
    low, high = _exp(logs.mean() - reach), _exp(logs.mean() + reach)
    return RatioEstimate(value, low, high, p, num, kind, flipped(logs, seed))


def per_request_ratio(
    a: Mapping[str, float],
    b: Mapping[str, float],
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> RatioEstimate:
    """Runs of the same requests: geometric mean of their ratios, bootstrapped by request."""
    common = sorted(a.keys() & b.keys())
    logs = _log_ratios(
        [a[request_id] for request_id in common], [b[request_id] for request_id in common]
    )
    num = int(logs.size)
    if num < MIN_PAIRS:
        value = _exp(logs.mean()) if num else None
        return RatioEstimate(
            value, None, None, None, num, "asks", remark="too few common requests to say"
        )
    drawn = resampled(logs, mean_of_rows, np.random.default_rng(seed), resamples)
    low, high = _middle(drawn, level)
    p = paired_ratio(
        [a[request_id] for request_id in common],
        [b[request_id] for request_id in common],
        seed=seed,
    )
    return RatioEstimate(_exp(logs.mean()), _exp(low), _exp(high), p.p, num, "asks", p.p_check)


def unpaired_ratio(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    statistic: Statistic = mean_of_rows,
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> RatioEstimate:
    """Unpaired runs: the ratio of a statistic, each side bootstrapped by itself.

    `p` is how often bootstrapped ratios fall on the other side of one; `p_check` is the
    Mann-Whitney test.
    """
    left, right = clean(a), clean(b)
    num = int(min(left.size, right.size))
    if not num:
        return RatioEstimate(None, None, None, None, 0, "unpaired", remark="nothing to compare")
    above, below = (float(statistic(each[None, :])[0]) for each in (left, right))
    if not (above > 0 and below > 0):
        return RatioEstimate(None, None, None, None, num, "unpaired", remark="no ratio to zero")
    value = _exp(math.log(above) - math.log(below))
    if num < MIN_PAIRS:
        return RatioEstimate(
            value, None, None, None, num, "unpaired", remark="too few requests to say"
        )
    from scipy import stats

    rng = np.random.default_rng(seed)
    drawn_above = resampled(left, statistic, rng, resamples)
    drawn_below = resampled(right, statistic, rng, resamples)
    usable = (drawn_above > 0) & (drawn_below > 0)
    if not usable.any():
        return RatioEstimate(
            value, None, None, None, num, "unpaired", remark="too many zeros to say"
        )
    logs = np.log(drawn_above[usable]) - np.log(drawn_below[usable])
    ratios = np.exp(np.clip(logs, -MAX_LOG, MAX_LOG))
    low, high = _middle(ratios, level)
    fewer = min(int((ratios <= 1).sum()), int((ratios >= 1).sum()))
    p = min(1.0, 2 * (fewer + 1) / (ratios.size + 1))
    ranks = float(stats.mannwhitneyu(left, right).pvalue)
    check = ranks if math.isfinite(ranks) else 1.0
    return RatioEstimate(value, min(low, value), max(high, value), p, num, "unpaired", check)


def unpaired_blocks_ratio(
    a: Sequence[float | None], b: Sequence[float | None], *, level: float = LEVEL
) -> RatioEstimate:
    """Blocks of unpaired runs: Welch's t interval on their logarithms."""
    above, below = (_log_ratios(side, [1.0] * len(side)) for side in (a, b))
    num = int(min(above.size, below.size))
    kind = "unpaired blocks"
    if not num:
        return RatioEstimate(None, None, None, None, 0, kind, remark="nothing to compare")
    middle = float(above.mean() - below.mean())
    if num < MIN_PAIRS:
        return RatioEstimate(
            _exp(middle), None, None, None, num, kind, remark="too few blocks to say"
        )
    from scipy import special

    parts = [float(each.var(ddof=1)) / each.size for each in (above, below)]
    error = math.sqrt(sum(parts))
    if error < ROUNDING:
        p = 1.0 if abs(middle) < ROUNDING else 0.0
        return RatioEstimate(_exp(middle), _exp(middle), _exp(middle), p, num, kind)
    degrees = sum(parts) ** 2 / sum(
        part**2 / (each.size - 1) for part, each in zip(parts, (above, below), strict=True)
    )
    reach = float(special.stdtrit(degrees, (1 + level) / 2)) * error
    p = 2 * float(special.stdtr(degrees, -abs(middle) / error))
    ends = _exp(middle - reach), _exp(middle + reach)
    return RatioEstimate(_exp(middle), *ends, p, num, kind)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm-corrected p-values; None stays None."""
    known = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        corrected[index] = largest
    return corrected


def _exp(log: float) -> float:
    """Exponential clipped to the range of a float."""
    return math.exp(min(max(float(log), -MAX_LOG), MAX_LOG))


def _around(value: float, drawn: Floats, level: float) -> Interval:
    """Widens the interval to include the figure, which rounding and heavy tails may exclude."""
    low, high = _middle(drawn, level)
    return Interval(value, min(low, value), max(high, value), level)


def _middle(drawn: Floats, level: float) -> tuple[float, float]:
    tail = 50 * (1 - level)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def _log_ratios(a: Sequence[float | None], b: Sequence[float | None]) -> Floats:
    above, below = (np.array(side, dtype=np.float64) for side in (a, b))  # None becomes NaN
    usable = np.isfinite(above) & np.isfinite(below)
    usable[usable] = (above[usable] > 0) & (below[usable] > 0)
    logs: Floats = np.log(above[usable]) - np.log(below[usable])
    return logs
