"""Draw functions for each kind of chart, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.loadtest.report.palette import Palette, dash, marker

Draw = Callable[[Any, Palette], None]
Floats = NDArray[np.float64]

_WIDE_RANGE = 8.0  # largest over smallest value from which an axis is logarithmic
_MAX_POINTS = 160  # of one line; more are invisible at this width
_MAX_LETTERS = 34  # of all horizontal labels; longer ones are rotated
_BAND = 0.16  # opacity


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A value at a load, with its interval if known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one arm; `index` is its colour."""

    index: int
    points: Sequence[PlotPoint]


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One row of a forest plot."""

    index: int
    label: str
    value: float
    low: float | None
    high: float | None
    is_significant: bool


def against_load(lines: Sequence[Line], x_label: str, y_label: str) -> Draw:
    """Lines with bands over the loads of a run; a single load shows points with error bars."""

    def draw(axes: Any, palette: Palette) -> None:
        ticks = sorted({point.x for line in lines for point in line.points})
        for place, line in enumerate(lines):
            # With a single load, arms are drawn side by side so that error bars do not overlap.
            aside = place - (len(lines) - 1) / 2 if len(ticks) < 2 else None
            _line(axes, palette, line, aside)
        values = [point.y for line in lines for point in line.points]
        if values and min(values) > 0 and max(values) / min(values) > 2 * _WIDE_RANGE:
            axes.set_yscale("log")
            _plain_log_labels(axes.yaxis)
        elif values and min(values) >= 0:
            axes.set_ylim(bottom=0)
        _load_axis(axes, ticks)
        axes.set(xlabel=x_label, ylabel=y_label)

    return draw


def _line(axes: Any, palette: Palette, line: Line, aside: float | None) -> None:
    x = [point.x for point in line.points]
    y = [point.y for point in line.points]
    low = [point.y if point.low is None else point.low for point in line.points]
    high = [point.y if point.high is None else point.high for point in line.points]
    colour = palette.arm(line.index)
    if aside is not None:
        x = [each + 0.12 * aside * (abs(each) or 1.0) for each in x]
        errors = [np.subtract(y, low).clip(0), np.subtract(high, y).clip(0)]
        axes.errorbar(x, y, yerr=errors, color=colour, fmt=marker(line.index), capsize=3)
        return
    if len(x) > 1:
        axes.fill_between(x, low, high, color=colour, alpha=_BAND, linewidth=0)
    axes.plot(x, y, color=colour, marker=marker(line.index), linestyle=dash(line.index))


def _load_axis(axes: Any, ticks: Sequence[float]) -> None:
    if not ticks:
        return
    if len(ticks) == 1:
        axes.set_xticks(ticks, [f"{ticks[0]:g}"])
        reach = 0.7 * (abs(ticks[0]) or 1)
        axes.set_xlim(ticks[0] - reach, ticks[0] + reach)
        return
    is_log = min(ticks) > 0 and max(ticks) / min(ticks) >= _WIDE_RANGE
    if is_log:
        axes.set_xscale("log")
    axes.set_xticks(ticks, _thinned(ticks, is_log), minor=False)
    axes.xaxis.set_minor_locator(_no_ticks())


def _thinned(ticks: Sequence[float], is_log: bool) -> list[str]:
    """Labels, empty if too close to the last one."""
    places = [math.log(tick) if is_log else tick for tick in ticks]
    room = (places[-1] - places[0]) / 9
    shown, last = [], -math.inf
    for tick, place in zip(ticks, places, strict=True):
        near = place - last < room
        shown.append("" if near else f"{tick:g}")
        last = last if near else place
    return shown


def forest(rows: Sequence[ForestRow], x_label: str) -> Draw:
    """Ratios with intervals around a line at one; markers of significant ones are filled."""

    def draw(axes: Any, palette: Palette) -> None:
        axes.grid(False)
        axes.grid(axis="x", color=palette.grid, linewidth=0.8)
        axes.axvline(1.0, color=palette.muted, linewidth=1.2)
        for place, row in enumerate(rows):
            colour = palette.arm(row.index)
            low = row.value if row.low is None else row.low
            high = row.value if row.high is None else row.high
            axes.plot([low, high], [place, place], color=colour, linewidth=2.2)
            axes.plot(
                [row.value],
                [place],
                color=colour,
                marker=marker(row.index),
                markersize=7,
                markerfacecolor=colour if row.is_significant else palette.page,
            )
        ends = [end for row in rows for end in (row.low, row.high, row.value) if end]
        if ends and max(ends) / min(ends) > 3:
            axes.set_xscale("log")
            _plain_log_labels(axes.xaxis)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.08)
        axes.set_xlabel(x_label)

    return draw


def cumulative(lines: Sequence[tuple[int, Floats]], x_label: str) -> Draw:
    """The share of requests at or below each value, per arm."""

    def draw(axes: Any, palette: Palette) -> None:
        everything = [values for _, values in lines if values.size]
        for index, values in lines:
            if not values.size:
                continue
            shares = np.linspace(0, 1, min(_MAX_POINTS, max(values.size, 2)))
            x = np.quantile(values, shares)
            axes.plot(x, shares * 100, color=palette.arm(index), linestyle=dash(index))
        pooled = np.concatenate(everything) if everything else np.array([1.0])
        middle, largest = np.quantile(pooled, 0.5), pooled.max()
        if pooled.min() > 0 and largest / middle > _WIDE_RANGE:
            axes.set_xscale("log")
            _plain_log_labels(axes.xaxis)
        axes.set_ylim(0, 101)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set(xlabel=x_label, ylabel="requests at or below, %")

    return draw


def over_time(
    lines: Sequence[tuple[int, Floats, Floats]],
    y_label: str,
    *,
    top: float | None = None,
    from_zero: bool = True,
    x_label: str,
    marks: Sequence[tuple[float, str]] = (),
) -> Draw:
    """Values over time per arm; a line breaks where its values are NaN."""

    def draw(axes: Any, palette: Palette) -> None:
        for index, at_s, values in lines:
            x, y = decimated(at_s, values)
            axes.plot(x, y, color=palette.arm(index), linewidth=1.3, linestyle=dash(index))
        if from_zero:
            axes.set_ylim(0, top)
        for at, name in marks if len(marks) > 1 else ():
            axes.axvline(at, color=palette.muted, linewidth=0.7, linestyle=(0, (1, 3)))
            axes.annotate(
                name,
                (at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=palette.muted,
            )
        axes.set(xlabel=x_label, ylabel=y_label)

    return draw


def decimated(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Averages neighbours down to the visible number of points, never across a break."""
    step = math.ceil(x.size / (2 * _MAX_POINTS))
    if step <= 1:
        return x, y
    places: list[float] = []
    means: list[float] = []
    breaks = np.flatnonzero(np.isnan(x))
    for piece in np.split(np.arange(x.size), breaks):
        inside = piece[~np.isnan(x[piece])]
        for start in range(0, inside.size, step):
            some = inside[start : start + step]
            known = y[some][~np.isnan(y[some])]
            places.append(float(x[some].mean()))
            means.append(float(known.mean()) if known.size else math.nan)
        places.append(math.nan)
        means.append(math.nan)
    return np.asarray(places), np.asarray(means)


def survival(lines: Sequence[Line], deepest: int) -> Draw:
    """Survival of draft tokens by position in the round."""

    def draw(axes: Any, palette: Palette) -> None:
        for line in lines:
            axes.plot(
                [point.x for point in line.points],
                [point.y for point in line.points],
                color=palette.arm(line.index),
                marker=marker(line.index),
                linestyle=dash(line.index),
            )
        axes.set_ylim(0, 105)
        axes.set_xlim(0.6, deepest + 0.4)
        step = math.ceil(deepest / 10)
        axes.set_xticks(range(1, deepest + 1, step))
        axes.set(xlabel="drafts accepted, at least", ylabel="rounds, %")

    return draw


def grouped_bars(
    groups: Sequence[str],
    bars: Sequence[tuple[int, Sequence[PlotPoint | None]]],
    y_label: str,
    x_label: str = "",
    line_at: float | None = None,
) -> Draw:
    """Grouped bars, one per arm, topped by the arm's marker; `x` of a point is unused."""

    def draw(axes: Any, palette: Palette) -> None:
        width = 0.8 / max(len(bars), 1)
        if line_at is not None:
            axes.axhline(line_at, color=palette.muted, linewidth=1.2)
        for place, (index, points) in enumerate(bars):
            for group, point in enumerate(points):
                if point is None:
                    continue
                x = group + (place - (len(bars) - 1) / 2) * width
                colour = palette.arm(index)
                axes.bar(x, point.y, width * 0.9, color=colour, linewidth=0)
                axes.plot(x, point.y, marker(index), color=colour, markersize=6)
        axes.set_xticks(range(len(groups)), groups)
        if _is_turned(groups):
            axes.tick_params(axis="x", rotation=30)
            for text in axes.get_xticklabels():
                text.set(ha="right", rotation_mode="anchor")
        axes.set(xlabel=x_label, ylabel=y_label)

    return draw


def bars_bottom_in(groups: Sequence[str]) -> float:
    """Margin below bars for the names of their groups."""
    return 0.36 + 0.045 * max(map(len, groups), default=0) if _is_turned(groups) else 0.34


def _is_turned(groups: Sequence[str]) -> bool:
    return sum(map(len, groups)) > _MAX_LETTERS


def _plain_log_labels(axis: Any) -> None:
    """A few plain numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
