"""Named quantities, for comparisons and thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from outrider.loadtest.results.measures import Measures, Spread


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity; `of` reads it from measures, None if undefined."""

    name: str
    title: str  # in a sentence
    unit: str  # "ms", "share", or "" for a plain number
    is_higher_better: bool
    of: Callable[[Measures], float | None]
    latency: str | None = None  # name in `Analysis.values`, if defined per request
    percent: float | None = None  # None: the mean

    def is_gain(self, ratio: float) -> bool:
        return (ratio > 1) == self.is_higher_better

    def change(self, ratio: float) -> str:
        """ "23 % more tokens/s"."""
        more, less = ("longer", "shorter") if self.unit == "ms" else ("more", "fewer")
        return f"{percent(ratio - 1)} {more if ratio > 1 else less} {self.title}"


def percent(share: float) -> str:
    """The size of a change in percent."""
    size = abs(100 * share)
    return f"{size:.0f} %" if size >= 9.95 else f"{size:.1f} %"


_LATENCIES = {
    "ttft": "time to the first token",
    "ttft_from_send": "time from sending to the first token",
    "tpot": "time per token",
    "gap": "gap between updates",
    "itl": "inter-token latency",
    "e2e": "time to the whole answer",
}
_BY_REQUEST = ("ttft", "ttft_from_send", "tpot", "e2e")
_POINTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "mean": None, "max": 100.0}
_WORDS = {"p50": "median ", "mean": "mean ", "max": "longest "}


def _of_spread(measure: str, point: str, measures: Measures) -> float | None:
    spread: Spread | None = getattr(measures, measure)
    return None if spread is None else float(getattr(spread, point))


def _latencies() -> list[Quantity]:
    return [
        Quantity(
            f"{measure}_{point}",
            _WORDS.get(point, f"{point} ") + title,
            "ms",
            False,
            partial(_of_spread, measure, point),
            measure if measure in _BY_REQUEST else None,
            at,
        )
        for measure, title in _LATENCIES.items()
        for point, at in _POINTS.items()
    ]


def _speculation(name: str, measures: Measures) -> float | None:
    speculation = measures.speculation
    value: float | None = None if speculation is None else getattr(speculation, name)
    return value


def _failures(measures: Measures) -> float:
    return measures.failed + measures.timed_out


QUANTITIES: dict[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        Quantity("tokens_s", "tokens/s", "", True, lambda m: m.output_tokens_s),
        Quantity("requests_s", "requests/s", "", True, lambda m: m.requests_s),
        Quantity(
            *("goodput", "requests within the limits", "share", True),
            lambda m: None if m.goodput is None else m.goodput.share,
        ),
        Quantity(
            *("goodput_s", "requests/s within the limits", "", True),
            lambda m: None if m.goodput is None else m.goodput.requests_s,
        ),
        Quantity("sent", "requests", "", True, lambda m: m.sent),
        Quantity("errors", "requests that failed or timed out", "", False, _failures),
        Quantity(
            *("error_share", "requests that failed or timed out", "share", False),
            lambda m: _failures(m) / m.sent if m.sent else None,
        ),
        Quantity("timeouts", "requests that timed out", "", False, lambda m: m.timed_out),
        Quantity("retries", "retries", "", False, lambda m: m.retries),
        Quantity(
            *("acceptance", "drafts accepted", "share", True),
            partial(_speculation, "acceptance"),
        ),
        Quantity(
            *("tokens_a_round", "tokens a round", "", True),
            partial(_speculation, "tokens_a_round"),
        ),
        Quantity(
            *("cached_share", "prompt tokens cached", "share", True), lambda m: m.cached_share
        ),
        *_latencies(),
    )
}
