"""Searches for a load: the highest rate that meets the SLO, or the knee of throughput."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.loadtest.results.measures import Slo

GOOD_SHARE = 0.95  # of requests must meet the SLO for a load to pass
RESOLUTION = 1.1  # the result is exact to this factor
GAIN = 1.05  # below this throughput gain from doubling the clients, the knee is passed
MAX_STEPS = 12
MAX_CLIENTS = 4096


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
class SearchResult:
    """Result of a search for one arm."""

    arm: str
    kind: str
    value: float | None  # None: even the lowest load failed
    is_bound: bool = False  # the highest load tried passed too
    tried: tuple[tuple[float, float], ...] = ()  # load and figure, in the order tried

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
"""Measures a load and returns its figure: the share of requests that met the SLO, or tokens/s."""


async def largest_good(arm: str, low: float, high: float, measure: Measure) -> SearchResult:
    """Bisects two rates on a logarithmic scale; assumes that a higher load is never better."""
    if not 0 < low < high:
        raise ConfigError(
            f"the search is from {low:g} to {high:g}; give two rates, the lower first."
        )
    tried: list[tuple[float, float]] = []

    async def is_good(load: float) -> bool:
        tried.append((load, await measure(load)))
        return tried[-1][1] >= GOOD_SHARE

    if not await is_good(low):
        return SearchResult(arm, "slo", None, tried=tuple(tried))
    if await is_good(high):
        return SearchResult(arm, "slo", high, is_bound=True, tried=tuple(tried))
    while high / low > RESOLUTION and len(tried) < MAX_STEPS:
        middle = (low * high) ** 0.5
        if await is_good(middle):
            low = middle
        else:
            high = middle
    return SearchResult(arm, "slo", low, tried=tuple(tried))


async def knee(arm: str, start: int, measure: Measure) -> SearchResult:
    """Doubles the clients until throughput stops growing."""
    tried = [(float(start), await measure(start))]
    clients = start
    while clients < MAX_CLIENTS:
        clients *= 2
        tried.append((float(clients), await measure(clients)))
        if tried[-1][1] < GAIN * tried[-2][1]:
            return SearchResult(arm, "knee", tried[-2][0], tried=tuple(tried))
    return SearchResult(arm, "knee", tried[-1][0], is_bound=True, tried=tuple(tried))
