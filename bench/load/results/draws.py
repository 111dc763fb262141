"""Values drawn again and signs flipped, many at once and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Of the rows of a table: one figure a row.
Statistic = Callable[[Floats], Floats]

CHUNK = 1 << 20  # numbers drawn at once
# Of very many values fewer resamples are drawn: the interval is narrow, and its ends need not be
# known to a part of their own width that nobody could see.
MOST_DRAWN = 1 << 28
FEWEST_RESAMPLES = 200
MOST_EXACT = 14  # pairs, whose 2^13 sign flips are all tried; more are drawn
FLIPS = 8192
ROUNDING = 1e-12  # of logarithms: no difference


def resampled(
    values: Floats, statistic: Statistic, rng: np.random.Generator, resamples: int
) -> Floats:
    """The statistic of as many values, drawn with replacement, again and again."""
    resamples = _affordable(resamples, values.size)
    drawn = np.empty(resamples)
    rows = max(1, CHUNK // values.size)
    for first in range(0, resamples, rows):
        num = min(rows, resamples - first)
        chosen = rng.integers(values.size, size=(num, values.size))
        drawn[first : first + num] = statistic(values[chosen])
    return drawn


def resampled_blocks(
    blocks: Sequence[Floats], statistic: Statistic, rng: np.random.Generator, resamples: int
) -> Floats:
    """As `resampled`, of blocks drawn first and values drawn inside each."""
    values, sizes = np.concatenate(blocks), np.array([each.size for each in blocks])
    starts = np.cumsum(sizes) - sizes
    resamples = _affordable(resamples, values.size)
    drawn = np.empty(resamples)
    # Blocks of one length make a table of many resamples; others go one by one.
    rows = max(1, CHUNK // values.size) if (sizes == sizes[0]).all() else 1
    for first in range(0, resamples, rows):
        num = min(rows, resamples - first)
        taken = rng.integers(sizes.size, size=num * sizes.size)
        lengths = np.repeat(sizes[taken], sizes[taken])
        inside = (rng.random(lengths.size) * lengths).astype(np.int64)
        chosen = np.repeat(starts[taken], sizes[taken]) + inside
        drawn[first : first + num] = statistic(values[chosen].reshape(num, -1))
    return drawn


def flipped(values: Floats, seed: int) -> float:
    """How often the sum is as far from zero with each sign flipped or not.

    With few values all flips are tried (a flip and its opposite are alike, so half of them), which
    is exact: its least result is 2^(1-n). Of more a sample is drawn, with the values as they are
    among it.
    """
    num = values.size
    far = abs(float(values.sum()))
    if num <= MOST_EXACT:
        bits = np.arange(1 << (num - 1))[:, None] >> np.arange(num) & 1
        sums = np.abs((1.0 - 2.0 * bits) @ values)
    else:
        rng = np.random.default_rng(seed)
        sums = np.full(FLIPS + 1, far)
        rows = max(1, CHUNK // num)
        for first in range(0, FLIPS, rows):
            taken = min(rows, FLIPS - first)
            signs = rng.integers(2, size=(taken, num)) * 2.0 - 1.0
            sums[first : first + taken] = np.abs(signs @ values)
    return float((sums >= far - ROUNDING * max(1.0, far)).mean())


def _affordable(resamples: int, num_values: int) -> int:
    return min(resamples, max(FEWEST_RESAMPLES, MOST_DRAWN // num_values))
