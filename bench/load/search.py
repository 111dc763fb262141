"""Looking for a load instead of measuring given ones: the largest that is still good, the knee."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider.bench.load.results.measures import Slo
from outrider.errors import ConfigError

GOOD_SHARE = 0.95  # of requests must keep to the SLO for a load to be good
RESOLUTION = 1.1  # the answer is known to within this factor
GAIN = 1.05  # twice the clients must bring at least this much more, or the knee is passed
MOST_STEPS = 12
MOST_CLIENTS = 4096


@dataclass(frozen=True, slots=True)
class Search:
    """`kind` is "slo" or "knee"."""

    kind: str
    slo: Slo | None = None

    @classmethod
    def parse(cls, text: str, slo: Slo | None) -> Search:
        if text not in ("slo", "knee"):
            raise ConfigError(f"--find is {text!r}; choose from slo, knee.")
        if text == "slo" and slo is None:
            raise ConfigError("--find slo needs --slo, as in --slo ttft=500ms,tpot=50ms.")
        return cls(text, slo)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a search has come to, for one arm."""

    arm: str
    kind: str
    value: float | None  # None: not even the lowest load was good
    is_bound: bool = False  # the highest load tried was good too
    tried: tuple[tuple[float, float], ...] = ()  # load and its figure, in the order of trying

    @property
    def sentence(self) -> str:
        if self.kind == "knee":
            figures = ", ".join(f"{load:g}: {figure:,.1f}" for load, figure in sorted(self.tried))
            if self.is_bound:
                return f"{self.arm}: throughput still grew at {self.value:g} clients ({figures})."
            return (
                f"{self.arm}: beyond {self.value:g} clients throughput stops growing "
                f"(tokens/s by clients: {figures})."
            )
        if self.value is None:
            lowest = min(load for load, _ in self.tried)
            return f"{self.arm}: not even {lowest:g} requests a second meet the SLO."
        if self.is_bound:
            return f"{self.arm}: {self.value:g} requests a second, the highest tried, meet the SLO."
        return f"{self.arm}: up to {self.value:.3g} requests a second meet the SLO."


Measure = Callable[[float], Awaitable[float]]
"""Tries a load and returns its figure: the share of good requests, or tokens/s."""


async def largest_good(arm: str, low: float, high: float, measure: Measure) -> Finding:
    """Bisection on a logarithmic scale between two rates, whose order of goodness is taken for
    granted: more load is never better."""
    if not 0 < low < high:
        raise ConfigError(
            f"the search is from {low:g} to {high:g}; give two rates, the lower first."
        )
    tried: list[tuple[float, float]] = []

    async def is_good(load: float) -> bool:
        tried.append((load, await measure(load)))
        return tried[-1][1] >= GOOD_SHARE

    if not await is_good(low):
        return Finding(arm, "slo", None, tried=tuple(tried))
    if await is_good(high):
        return Finding(arm, "slo", high, is_bound=True, tried=tuple(tried))
    while high / low > RESOLUTION and len(tried) < MOST_STEPS:
        middle = (low * high) ** 0.5
        if await is_good(middle):
            low = middle
        else:
            high = middle
    return Finding(arm, "slo", low, tried=tuple(tried))


async def knee(arm: str, start: int, measure: Measure) -> Finding:
    """Clients are doubled until that brings next to nothing."""
    tried = [(float(start), await measure(start))]
    clients = start
    while clients < MOST_CLIENTS:
        clients *= 2
        tried.append((float(clients), await measure(clients)))
        if tried[-1][1] < GAIN * tried[-2][1]:
            return Finding(arm, "knee", tried[-2][0], tried=tuple(tried))
    return Finding(arm, "knee", tried[-1][0], is_bound=True, tried=tuple(tried))


def named(finding: Finding) -> dict[str, object]:
    """For `run.json`."""
    return dataclasses.asdict(finding)
