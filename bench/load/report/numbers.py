"""Figures as people read them: three digits that count, and a dash where nothing is known."""

from __future__ import annotations

import math

from outrider.bench.load.results.statistics import Interval, Ratio

NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """With thousands apart and as many decimals as `digits` leaves."""
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


def with_interval(found: Interval | Ratio | None) -> str:
    """ "85.2 (81.0 to 89.9)", or the value alone."""
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return number(found.value)
    return f"{number(found.value)} ({number(found.low)} to {number(found.high)})"
