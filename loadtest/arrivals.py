"""Arrival patterns: the offsets, in seconds, at which an open loop sends its requests.

A schedule is a function of its seed. Offsets are generated lazily, so eight hours cost no memory.
Client processes generate the same schedule, and each takes its share.
"""

from __future__ import annotations

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from outrider.errors import ConfigError
from outrider.loadtest.units import UNITS_S

MIN_RATE, MAX_RATE = 1e-6, 1e6  # requests a second
MIN_BURSTINESS, MAX_BURSTINESS = 0.01, 1000.0
MAX_DURATION_S = 366 * 24 * 3600.0
SPECS = "poisson, gamma:BURSTINESS, constant, ramp:FROM-TO, spike:RATE-PEAK@AT+FOR"


class Arrivals(ABC):
    """A pattern of arrivals."""

    def offsets(self, duration_s: float, seed: int) -> Iterator[float]:
        """Intended times in [0, `duration_s`), ascending; equal for equal seeds."""
        if not 0 < duration_s <= MAX_DURATION_S:
            raise ConfigError(
                f"the duration is {duration_s} s; give more than 0 and at most a year."
            )
        # Seeded by text: other users of the same seed draw other numbers.
        drawn = self._drawn(duration_s, random.Random(f"arrivals {seed}"))
        return _below(drawn, duration_s)

    @abstractmethod
    def expected(self, duration_s: float) -> float:
        """The mean number of arrivals in `duration_s`."""

    @abstractmethod
    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        """Ascending offsets; those from `duration_s` on are ignored."""


@dataclass(frozen=True)
class Poisson(Arrivals):
    """Independent users: exponential inter-arrival times."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)

    def expected(self, duration_s: float) -> float:
        return self.rate * duration_s

    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        return (elapsed / self.rate for elapsed in _unit_poisson(rng))


@dataclass(frozen=True)
class Gamma(Arrivals):
    """Gamma inter-arrival times of shape `burstiness`: 1 is Poisson, lower is burstier.

    Their standard deviation is 1/√burstiness of their mean. Time 0 counts as an arrival, so a
    bursty run has a few more than `expected`.
    """

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)
        if not MIN_BURSTINESS <= self.burstiness <= MAX_BURSTINESS:
            raise ConfigError(
                f"the burstiness is {self.burstiness}; give {MIN_BURSTINESS} (bursts) to "
                f"{MAX_BURSTINESS:g} (even), 1 being Poisson."
            )

    def expected(self, duration_s: float) -> float:
        return self.rate * duration_s

    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        at, mean_gap = 0.0, 1 / (self.rate * self.burstiness)
        while True:
            at += rng.gammavariate(self.burstiness, mean_gap)
            yield at


@dataclass(frozen=True)
class Constant(Arrivals):
    """Equal inter-arrival times, the first request at 0."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)

    def expected(self, duration_s: float) -> float:
        return self.rate * duration_s

    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        return (number / self.rate for number in count())


@dataclass(frozen=True)
class Ramp(Arrivals):
    """Poisson whose rate changes linearly over the duration."""

    from_rate: float
    to_rate: float

    def __post_init__(self) -> None:
        _check_rate("rate that the ramp starts from", self.from_rate)
        _check_rate("rate that the ramp ends at", self.to_rate)

    def expected(self, duration_s: float) -> float:
        return (self.from_rate + self.to_rate) / 2 * duration_s

    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        """Maps a unit Poisson process through the inverse of the cumulative rate."""
        slope = (self.to_rate - self.from_rate) / duration_s
        for elapsed in _unit_poisson(rng):
            if elapsed >= self.expected(duration_s):
                return
            root = math.sqrt(max(0.0, self.from_rate**2 + 2 * slope * elapsed))
            yield 2 * elapsed / (self.from_rate + root)


@dataclass(frozen=True)
class Spike(Arrivals):
    """Poisson at `rate`, with `for_s` seconds at `peak` from `at_s` on."""

    rate: float
    peak: float
    at_s: float
    for_s: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)
        _check_rate("peak of the spike", self.peak)
        if not 0 <= self.at_s <= MAX_DURATION_S:
            raise ConfigError(f"the spike starts at {self.at_s} s; give seconds from 0.")
        if not 0 < self.for_s <= MAX_DURATION_S:
            raise ConfigError(f"the spike lasts {self.for_s} s; give seconds above 0.")

    def expected(self, duration_s: float) -> float:
        start = min(self.at_s, duration_s)
        end = min(self.at_s + self.for_s, duration_s)
        return self.rate * duration_s + (self.peak - self.rate) * (end - start)

    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        before, during = self.rate * self.at_s, self.peak * self.for_s
        for elapsed in _unit_poisson(rng):
            if elapsed < before:
                yield elapsed / self.rate
            elif elapsed < before + during:
                yield self.at_s + (elapsed - before) / self.peak
            else:
                yield self.at_s + self.for_s + (elapsed - before - during) / self.rate


@dataclass(frozen=True)
class Replay(Arrivals):
    """The times of a trace; the seed has no effect."""

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        last = 0.0
        for number, at in enumerate(self.times_s):
            if not last <= at < math.inf:
                raise ConfigError(
                    f"arrival {number} is at {at} s, after one at {last} s; give times from 0 in "
                    "order."
                )
            last = at

    def expected(self, duration_s: float) -> float:
        return sum(at < duration_s for at in self.times_s)

    def _drawn(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        return iter(self.times_s)


def read_arrivals(text: str, rate: float | None = None) -> Arrivals:
    """Parses a pattern (`SPECS`); patterns without rates of their own need `rate`."""
    kind, _, argument = text.strip().lower().partition(":")
    number = r"(-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|nan|inf))"
    if kind in ("poisson", "constant") and not argument:
        plain = Poisson if kind == "poisson" else Constant
        return plain(_require_rate(rate, kind))
    if kind == "gamma" and (match := re.fullmatch(number, argument)):
        return Gamma(_require_rate(rate, kind), float(match[1]))
    if kind == "ramp" and (match := re.fullmatch(rf"{number}-{number}", argument)):
        return Ramp(float(match[1]), float(match[2]))
    span = rf"{number}(ms|s|m|h|)"
    if kind == "spike" and (match := re.fullmatch(rf"{number}-{number}@{span}\+{span}", argument)):
        return Spike(
            float(match[1]),
            float(match[2]),
            float(match[3]) * UNITS_S[match[4]],
            float(match[5]) * UNITS_S[match[6]],
        )
    raise ConfigError(
        f"arrivals {text!r} are not understood; write {SPECS}, e.g. gamma:0.3, ramp:1-10 or "
        "spike:2-20@30s+10s."
    )


def share_of(
    offsets: Iterator[float], client: int, num_clients: int
) -> Iterator[tuple[int, float]]:
    """Every `num_clients`-th arrival from `client` on, with its index in the whole schedule."""
    return islice(enumerate(offsets), client, None, num_clients)


def _below(offsets: Iterator[float], duration_s: float) -> Iterator[float]:
    last = 0.0
    for at in offsets:
        last = max(last, at)  # rounding may break the order
        if last >= duration_s:
            return
        yield last


def _unit_poisson(rng: random.Random) -> Iterator[float]:
    elapsed = 0.0
    while True:
        elapsed += rng.expovariate(1.0)
        yield elapsed


def _check_rate(name: str, rate: float) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ConfigError(
            f"the {name} is {rate} requests a second; give {MIN_RATE:g} to {MAX_RATE:g}."
        )


def _require_rate(rate: float | None, kind: str) -> float:
    if rate is None:
        raise ConfigError(f"{kind} arrivals need a rate; give requests a second.")
    return rate
