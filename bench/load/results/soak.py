"""Whether memory, handles or threads of a server grow over a long run.

The slope is Theil and Sen's (the median of the slopes between all pairs of points), which
outliers do not move, over medians of short stretches. Its interval is Kendall's, widened where
neighbouring stretches resemble each other, as those of a garbage collector or a cache do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from outrider.bench.load.runs import Sample

WARM_UP_SHARE = 0.2  # of the run, at most `WARM_UP_S`
WARM_UP_S = 600.0
MAX_STRETCHES = 60
MIN_STRETCHES = 12
MIN_SECONDS = 60.0
SECONDS_AN_HOUR = 3600.0
_Z = 2.576  # 99 %: three measures of several servers are looked at
_NOISES = 4.0  # growth below so many of the noise's own size is none
_NOISES_OF_A_STEP = 6.0  # the same for a rise that is over, which is no trend
_MAX_LIKENESS = 0.95
_LEAST = {"memory": 0.5, "handles": 2.0, "threads": 2.0}  # growth that is worth a word
_UNITS = {"memory": " MB", "handles": "", "threads": ""}

Floats = npt.NDArray[np.float64]


class Course(StrEnum):
    FLAT = "flat"
    GROWS = "grows"
    LEVELS_OFF = "levels off"
    FALLS = "falls"
    TOO_SHORT = "too short to tell"


@dataclass(frozen=True, slots=True)
class Slope:
    """An hour, with its interval."""

    an_hour: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Trend:
    """One measure of one server, after warm-up."""

    server: str
    measure: str  # "memory", "handles" or "threads"
    course: Course
    start: float
    end: float
    most: float
    seconds: float
    slope: Slope | None  # None where the run is too short

    @property
    def sentence(self) -> str:
        unit = _UNITS[self.measure]
        span = f"from {self.start:.4g} to {self.end:.4g}{unit}, at most {self.most:.4g}{unit}"
        return f"{self.server}: {self.measure} {self._course()}, {span}."

    def _course(self) -> str:
        if self.slope is None:
            return f"is {self.course}"
        if self.course is Course.LEVELS_OFF:
            return "grew at first, but no longer in the second half"
        low, high = sorted((abs(self.slope.low), abs(self.slope.high)))
        unit = _UNITS[self.measure]
        if self.course is Course.FLAT:  # what the run could not have told from noise is said
            return f"flat to within {high:.3g}{unit} an hour" if high > 0 else "flat"
        amount = f"{abs(self.slope.an_hour):.3g}{unit} an hour ({low:.3g} to {high:.3g})"
        return f"{self.course} by {amount}"


@dataclass(frozen=True, slots=True)
class SoakVerdict:
    trends: tuple[Trend, ...]

    @property
    def is_flat(self) -> bool:
        """Whether nothing is known to grow."""
        return not any(trend.course is Course.GROWS for trend in self.trends)

    @property
    def sentences(self) -> list[str]:
        return [trend.sentence for trend in self.trends]


def soak_verdict(samples: Iterable[Sample], warm_up_s: float | None = None) -> SoakVerdict:
    """The trends of every server and of the clients; by default a fifth of the run is warm-up."""
    by_server: dict[str, list[Sample]] = {}
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


def _value(sample: Sample, measure: str) -> float | None:
    if measure != "memory":
        return sample.handles if measure == "handles" else sample.threads
    return sample.memory_mb if sample.anonymous_mb is None else sample.anonymous_mb


def _trend(server: str, measure: str, points: Sequence[tuple[float, float]]) -> Trend:
    times, values = np.array(points, dtype=np.float64).T
    seconds = float(times[-1] - times[0])
    tenth = max(1, len(values) // 10)
    course, slope = _course(times, values, _LEAST[measure])
    return Trend(
        server=server,
        measure=measure,
        course=course,
        start=float(np.median(values[:tenth])),
        end=float(np.median(values[-tenth:])),
        most=float(values.max()),
        seconds=seconds,
        slope=slope,
    )


def _course(times: Floats, values: Floats, least: float) -> tuple[Course, Slope | None]:
    """Both of the whole run and of its second half: growth may end, or begin, in between."""
    if len(times) < MIN_STRETCHES or times[-1] - times[0] < MIN_SECONDS:
        return Course.TOO_SHORT, None
    at, middle = _stretches(times, values)
    half = len(at) // 2
    whole, late = _Part.of(at, middle), _Part.of(at[half:], middle[half:])
    if late.is_growing(least):
        return Course.GROWS, whole.slope if whole.is_growing(least) else late.slope
    if whole.is_growing(least):
        # A short half proves little: it must be flat by its size too.
        is_over = late.change < max(least, whole.change / 8)
        return Course.LEVELS_OFF if is_over else Course.GROWS, whole.slope
    risen = float(np.median(middle[half:]) - np.median(middle[: max(1, half // 5)]))
    if risen > max(least, _NOISES_OF_A_STEP * late.noise):
        return Course.LEVELS_OFF, whole.slope
    if whole.is_falling(least):
        return Course.FALLS, whole.slope
    return Course.FLAT, whole.slope


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a run."""

    slope: Slope
    change: float  # from its beginning to its end, by the slope
    noise: float  # the median distance from the line

    @classmethod
    def of(cls, at: Floats, values: Floats) -> _Part:
        slope = theil_sen(at, values)
        rest = values - slope.an_hour * at / SECONDS_AN_HOUR
        change = slope.an_hour * float(at[-1] - at[0]) / SECONDS_AN_HOUR
        return cls(slope, change, float(np.median(np.abs(rest - np.median(rest)))))

    def is_growing(self, least: float) -> bool:
        return self.slope.low > 0 and self.change >= max(least, _NOISES * self.noise)

    def is_falling(self, least: float) -> bool:
        return self.slope.high < 0 and -self.change >= max(least, _NOISES * self.noise)


def _stretches(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The medians of equal parts of the run."""
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
    """Of the variance, for values that resemble the one before; 1 for independent ones."""
    centred = rest - rest.mean()
    power = float(centred @ centred)
    if power <= 0:
        return 1.0
    likeness = float(centred[:-1] @ centred[1:]) / power
    likeness += (1 + 4 * likeness) / len(rest)  # short series look less alike than they are
    likeness = min(_MAX_LIKENESS, max(0.0, likeness))
    return (1 + likeness) / (1 - likeness)
