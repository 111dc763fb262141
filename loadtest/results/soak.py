"""Detects growth of a server's memory, handles or threads over a long run.

The slope is the Theil-Sen estimator (the median slope between all pairs of points), which is
robust to outliers, over medians of short stretches. Its interval is Kendall's, widened for
autocorrelation, which garbage collectors and caches cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from outrider.loadtest.runs import ServerSample

WARM_UP_SHARE = 0.2  # of the run, at most `WARM_UP_S`
WARM_UP_S = 600.0
MAX_STRETCHES = 60
MIN_STRETCHES = 12
MIN_SECONDS = 60.0
SECONDS_AN_HOUR = 3600.0
_Z = 2.576  # 99 %, since three measures of several servers are tested
_NOISES = 4.0  # growth below this multiple of the noise is ignored
_NOISES_OF_A_STEP = 6.0  # the same for a step, which is not a trend
_MAX_LIKENESS = 0.95
_MIN_GROWTH = {"memory": 0.5, "handles": 2.0, "threads": 2.0}  # smaller growth is ignored
_UNITS = {"memory": " MB", "handles": "", "threads": ""}

Floats = npt.NDArray[np.float64]


class TrendKind(StrEnum):
    FLAT = "flat"
    GROWS = "grows"
    LEVELS_OFF = "levels off"
    FALLS = "falls"
    TOO_SHORT = "too short to tell"


@dataclass(frozen=True, slots=True)
class Slope:
    """Slope per hour, with its interval."""

    an_hour: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Trend:
    """One measure of one server, after warm-up."""

    server: str
    measure: str  # "memory", "handles" or "threads"
    course: TrendKind
    start: float
    end: float
    peak: float
    seconds: float
    slope: Slope | None  # None where the run is too short

    @property
    def sentence(self) -> str:
        unit = _UNITS[self.measure]
        span = f"from {self.start:.4g} to {self.end:.4g}{unit}, at most {self.peak:.4g}{unit}"
        return f"{self.server}: {self.measure} {self._course()}, {span}."

    def _course(self) -> str:
        if self.slope is None:
            return f"is {self.course}"
        if self.course is TrendKind.LEVELS_OFF:
            return "grew at first, but no longer in the second half"
        low, high = sorted((abs(self.slope.low), abs(self.slope.high)))
        unit = _UNITS[self.measure]
        if self.course is TrendKind.FLAT:  # states the growth the run could not detect
            return f"flat to within {high:.3g}{unit} an hour" if high > 0 else "flat"
        amount = f"{abs(self.slope.an_hour):.3g}{unit} an hour ({low:.3g} to {high:.3g})"
        return f"{self.course} by {amount}"


@dataclass(frozen=True, slots=True)
class SoakVerdict:
    trends: tuple[Trend, ...]

    @property
    def is_flat(self) -> bool:
        """Whether no measure grows."""
        return not any(trend.course is TrendKind.GROWS for trend in self.trends)

    @property
    def sentences(self) -> list[str]:
        return [trend.sentence for trend in self.trends]


def soak_verdict(samples: Iterable[ServerSample], warm_up_s: float | None = None) -> SoakVerdict:
    """Trends of every server and of the clients. By default a fifth of the run is warm-up."""
    by_server: dict[str, list[ServerSample]] = {}
    for sample in samples:
        by_server.setdefault(sample.server, []).append(sample)
    trends: list[Trend] = []
    for server, own in by_server.items():
        own.sort(key=lambda sample: sample.at_s)
        skipped_s = warm_up_s
        if skipped_s is None:
            skipped_s = min(WARM_UP_S, WARM_UP_SHARE * (own[-1].at_s - own[0].at_s))
        settled = [sample for sample in own if sample.at_s >= own[0].at_s + skipped_s]
        for measure in _UNITS:
            points = [(s.at_s, value) for s in settled if (value := _value(s, measure)) is not None]
            if points:
                trends.append(_trend(server, measure, points))
    return SoakVerdict(tuple(trends))


def _value(sample: ServerSample, measure: str) -> float | None:
    if measure != "memory":
        return sample.handles if measure == "handles" else sample.threads
    return sample.memory_mb if sample.anonymous_mb is None else sample.anonymous_mb


def _trend(server: str, measure: str, points: Sequence[tuple[float, float]]) -> Trend:
    times, values = np.array(points, dtype=np.float64).T
    seconds = float(times[-1] - times[0])
    tenth = max(1, len(values) // 10)
    course, slope = _course(times, values, _MIN_GROWTH[measure])
    return Trend(
        server=server,
        measure=measure,
        course=course,
        start=float(np.median(values[:tenth])),
        end=float(np.median(values[-tenth:])),
        peak=float(values.max()),
        seconds=seconds,
        slope=slope,
    )


def _course(times: Floats, values: Floats, min_growth: float) -> tuple[TrendKind, Slope | None]:
    """Classifies the trend by the whole run and its second half: growth may end or begin midway."""
    if len(times) < MIN_STRETCHES or times[-1] - times[0] < MIN_SECONDS:
        return TrendKind.TOO_SHORT, None
    at, middle = _stretches(times, values)
    half = len(at) // 2
    whole, late = _TrendPart.of(at, middle), _TrendPart.of(at[half:], middle[half:])
    if late.is_growing(min_growth):
        return TrendKind.GROWS, whole.slope if whole.is_growing(min_growth) else late.slope
    if whole.is_growing(min_growth):
        # A half run is weak evidence: its growth must be small too.
        is_over = late.change < max(min_growth, whole.change / 8)
        return TrendKind.LEVELS_OFF if is_over else TrendKind.GROWS, whole.slope
    risen = float(np.median(middle[half:]) - np.median(middle[: max(1, half // 5)]))
    if risen > max(min_growth, _NOISES_OF_A_STEP * late.noise):
        return TrendKind.LEVELS_OFF, whole.slope
    if whole.is_falling(min_growth):
        return TrendKind.FALLS, whole.slope
    return TrendKind.FLAT, whole.slope


@dataclass(frozen=True, slots=True)
class _TrendPart:
    """Trend of a part of the run."""

    slope: Slope
    change: float  # over its duration, by the slope
    noise: float  # the median distance from the line

    @classmethod
    def of(cls, at: Floats, values: Floats) -> _TrendPart:
        slope = theil_sen(at, values)
        rest = values - slope.an_hour * at / SECONDS_AN_HOUR
        change = slope.an_hour * float(at[-1] - at[0]) / SECONDS_AN_HOUR
        return cls(slope, change, float(np.median(np.abs(rest - np.median(rest)))))

    def is_growing(self, min_growth: float) -> bool:
        return self.slope.low > 0 and self.change >= max(min_growth, _NOISES * self.noise)

    def is_falling(self, min_growth: float) -> bool:
        return self.slope.high < 0 and -self.change >= max(min_growth, _NOISES * self.noise)


def _stretches(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Medians of equal stretches of the run."""
    count = min(MAX_STRETCHES, len(times))
    size = len(times) // count
    kept = slice(len(times) - count * size, None)
    return (
        np.median(times[kept].reshape(count, size), axis=1),
        np.median(values[kept].reshape(count, size), axis=1),
    )


def theil_sen(times: Floats, values: Floats) -> Slope:
    """The median slope between all pairs and its 99 % interval; times in seconds."""
    first, second = np.triu_indices(len(times), k=1)
    apart = times[second] - times[first]
    rises = (values[second] - values[first])[apart > 0] / apart[apart > 0]
    slopes = np.sort(rises) * SECONDS_AN_HOUR
    middle = float(np.median(slopes))
    n = len(times)
    rest = values - middle * times / SECONDS_AN_HOUR
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18 * _widening(rest))
    reach = _Z * spread / 2
    low = max(0, math.floor(len(slopes) / 2 - reach))
    high = min(len(slopes) - 1, math.ceil(len(slopes) / 2 + reach))
    return Slope(middle, float(slopes[low]), float(slopes[high]))


def _widening(rest: Floats) -> float:
    """Factor on the variance for autocorrelated values; 1 for independent ones."""
    centred = rest - rest.mean()
    power = float(centred @ centred)
    if power <= 0:
        return 1.0
    likeness = float(centred[:-1] @ centred[1:]) / power
    likeness += (1 + 4 * likeness) / len(rest)  # short series underestimate autocorrelation
    likeness = min(_MAX_LIKENESS, max(0.0, likeness))
    return (1 + likeness) / (1 - likeness)
