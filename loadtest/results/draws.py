"""Bootstrap resampling and sign-flip tests, vectorized in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Maps a table to one figure per row.
Statistic = Callable[[Floats], Floats]

CHUNK = 1 << 20  # numbers drawn at once
# Very many values get fewer resamples: their interval is narrow enough already.
MAX_VALUES_DRAWN = 1 << 28
MIN_RESAMPLES = 200
MAX_EXACT_PAIRS = 14  # pairs up to which all 2^13 sign flips are tried; beyond, they are sampled
FLIPS = 8192
ROUNDING = 1e-12  # difference of logarithms that counts as none


def resampled(
    values: Floats, statistic: Statistic, rng: np.random.Generator, resamples: int
) -> Floats:
    """The statistic of bootstrap samples of the values."""
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
    """Hierarchical bootstrap: draws blocks, then values within each."""
    values, sizes = np.concatenate(blocks), np.array([each.size for each in blocks])
    starts = np.cumsum(sizes) - sizes
    resamples = _affordable(resamples, values.size)
    drawn = np.empty(resamples)
    # Blocks of equal length allow many resamples per table; others go one by one.
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
    """p-value of the sign-flip test: how often random signs give a sum as far from zero.

    Exact for few values: tries half of all flips (opposites are symmetric), so its minimum is
    2^(1-n). For more values, samples flips and includes the observed one.
    """
    num = values.size
    far = abs(float(values.sum()))
    if num <= MAX_EXACT_PAIRS:
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
    return min(resamples, max(MIN_RESAMPLES, MAX_VALUES_DRAWN // num_values))
