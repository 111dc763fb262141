"""Formats figures: three significant digits, and a dash for unknown values."""

from __future__ import annotations

import math

from outrider.loadtest.results.statistics import Interval, RatioEstimate

NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """With thousands separators and `digits` significant digits."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 4)}f}"


def count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def share(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def with_interval(estimate: Interval | RatioEstimate | None) -> str:
    """ "85.2 (81.0 to 89.9)", or the value alone."""
    if estimate is None:
        return NOTHING
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"
