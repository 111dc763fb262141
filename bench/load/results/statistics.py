"""How sure a figure is, and whether two differ.

Nothing here crashes or warns on empty, single, zero or missing values: what cannot be said is None.
Whatever is random takes a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.bench.load.results.draws import (
    ROUNDING,
    Floats,
    Statistic,
    flipped,
    resampled,
    resampled_blocks,
)

LEVEL = 0.95
RESAMPLES = 2000
FEWEST_PAIRS = 3
LARGEST_LOG = 700.0  # of a ratio that a number holds


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and between what it lies with the given confidence; None: cannot be said."""

    value: float
    low: float | None
    high: float | None
    level: float = LEVEL


@dataclass(frozen=True, slots=True)
class Ratio:
    """A over B. `p` is the chance of a ratio this far from one if there were no difference."""

    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int  # pairs, or the smaller side
    kind: str  # "blocks", "asks", "unpaired" or "unpaired blocks"
    # A second opinion that assumes less: flipped signs of pairs, ranks of what is unpaired.
    p_check: float | None = None
    remark: str | None = None  # why something cannot be said

    @property
    def is_known(self) -> bool:
        return self.value is not None and self.p is not None

    def inverse(self) -> Ratio:
        """B over A."""
        value, low, high = (
            None if each is None else 1 / each for each in (self.value, self.high, self.low)
        )
        return replace(self, value=value, low=low, high=high)


def clean(values: Sequence[float] | Floats) -> Floats:
    """Without what is missing or endless."""
    found = np.asarray(values, dtype=np.float64).ravel()
    return found[np.isfinite(found)]


def percentile(values: Sequence[float] | Floats, percent: float) -> float | None:
    """Linear between neighbours, as numpy's."""
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
    """A percentile bootstrap: the middle `level` of the statistic over resampled values.

    Plain percentiles, not BCa: they are what most readers take an interval to be, they never
    leave the range of the data, and BCa's correction is unsteady for tail percentiles, which
    are what latency is about. None for nothing; no ends for a single value.
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
    """As `bootstrap_interval`, drawing whole blocks and then requests inside them.

    Requests of one block share the state of the machine, so together they say less than as many
    from different blocks would.
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
) -> Ratio:
    """Of pairs that were measured side by side: the geometric mean of their ratios.

    The interval is Student's on the logarithms, and so is `p`; `p_check` flips signs.
    Pairs where either is missing or not above zero are left out.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    logs = _log_ratios(a, b)
    num = int(logs.size)
    if not num:
        return Ratio(None, None, None, None, 0, kind, remark="nothing to compare")
    value = _exp(logs.mean())
    if num < FEWEST_PAIRS:
        return Ratio(value, None, None, None, num, kind, remark="too few blocks to say")
    from scipy import special

    error = float(logs.std(ddof=1)) / math.sqrt(num)
    if error < ROUNDING:
        p = 1.0 if abs(logs.mean()) < ROUNDING else 0.0
        return Ratio(value, value, value, p, num, kind, flipped(logs, seed))
    reach = float(special.stdtrit(num - 1, (1 + level) / 2)) * error
    p = 2 * float(special.stdtr(num - 1, -abs(float(logs.mean())) / error))
    low, high = _exp(logs.mean() - reach), _exp(logs.mean() + reach)
    return Ratio(value, low, high, p, num, kind, flipped(logs, seed))


def ask_ratio(
    a: Mapping[str, float],
    b: Mapping[str, float],
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Ratio:
    """Of runs that asked the same: the geometric mean of the asks' ratios, drawn again by ask."""
    common = sorted(a.keys() & b.keys())
    logs = _log_ratios([a[ask] for ask in common], [b[ask] for ask in common])
    num = int(logs.size)
    if num < FEWEST_PAIRS:
        value = _exp(logs.mean()) if num else None
        return Ratio(value, None, None, None, num, "asks", remark="too few common asks to say")
    drawn = resampled(logs, mean_of_rows, np.random.default_rng(seed), resamples)
    low, high = _middle(drawn, level)
    p = paired_ratio([a[ask] for ask in common], [b[ask] for ask in common], seed=seed)
    return Ratio(_exp(logs.mean()), _exp(low), _exp(high), p.p, num, "asks", p.p_check)


def unpaired_ratio(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    statistic: Statistic = mean_of_rows,
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Ratio:
    """Of runs with nothing in common: the ratio of a statistic, each side drawn again by itself.

    `p` is how often the drawn ratios fall on the other side of one; `p_check` is Mann-Whitney's,
    which asks whether values of one side tend to be larger.
    """
    left, right = clean(a), clean(b)
    num = int(min(left.size, right.size))
    if not num:
        return Ratio(None, None, None, None, 0, "unpaired", remark="nothing to compare")
    above, below = (float(statistic(each[None, :])[0]) for each in (left, right))
    if not (above > 0 and below > 0):
        return Ratio(None, None, None, None, num, "unpaired", remark="no ratio to zero")
    value = _exp(math.log(above) - math.log(below))
    if num < FEWEST_PAIRS:
        return Ratio(value, None, None, None, num, "unpaired", remark="too few requests to say")
    from scipy import stats

    rng = np.random.default_rng(seed)
    drawn_above = resampled(left, statistic, rng, resamples)
    drawn_below = resampled(right, statistic, rng, resamples)
    usable = (drawn_above > 0) & (drawn_below > 0)
    if not usable.any():
        return Ratio(value, None, None, None, num, "unpaired", remark="too many zeros to say")
    logs = np.log(drawn_above[usable]) - np.log(drawn_below[usable])
    ratios = np.exp(np.clip(logs, -LARGEST_LOG, LARGEST_LOG))
    low, high = _middle(ratios, level)
    fewer = min(int((ratios <= 1).sum()), int((ratios >= 1).sum()))
    p = min(1.0, 2 * (fewer + 1) / (ratios.size + 1))
    ranks = float(stats.mannwhitneyu(left, right).pvalue)
    check = ranks if math.isfinite(ranks) else 1.0
    return Ratio(value, min(low, value), max(high, value), p, num, "unpaired", check)


def unpaired_blocks_ratio(
    a: Sequence[float | None], b: Sequence[float | None], *, level: float = LEVEL
) -> Ratio:
    """Of the blocks of runs at different times: Welch's interval on their logarithms."""
    above, below = (_log_ratios(side, [1.0] * len(side)) for side in (a, b))
    num = int(min(above.size, below.size))
    kind = "unpaired blocks"
    if not num:
        return Ratio(None, None, None, None, 0, kind, remark="nothing to compare")
    middle = float(above.mean() - below.mean())
    if num < FEWEST_PAIRS:
        return Ratio(_exp(middle), None, None, None, num, kind, remark="too few blocks to say")
    from scipy import special

    parts = [float(each.var(ddof=1)) / each.size for each in (above, below)]
    error = math.sqrt(sum(parts))
    if error < ROUNDING:
        p = 1.0 if abs(middle) < ROUNDING else 0.0
        return Ratio(_exp(middle), _exp(middle), _exp(middle), p, num, kind)
    degrees = sum(parts) ** 2 / sum(
        part**2 / (each.size - 1) for part, each in zip(parts, (above, below), strict=True)
    )
    reach = float(special.stdtrit(degrees, (1 + level) / 2)) * error
    p = 2 * float(special.stdtr(degrees, -abs(middle) / error))
    ends = _exp(middle - reach), _exp(middle + reach)
    return Ratio(_exp(middle), *ends, p, num, kind)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Chances corrected for being a family: none is less than it was, and None stays None."""
    known = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        corrected[index] = largest
    return corrected


def _exp(log: float) -> float:
    """Of the logarithm of any ratio; what no number holds becomes about the largest one does."""
    return math.exp(min(max(float(log), -LARGEST_LOG), LARGEST_LOG))


def _around(value: float, drawn: Floats, level: float) -> Interval:
    """The figure itself is always inside, which rounding and heavy tails do not promise."""
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
