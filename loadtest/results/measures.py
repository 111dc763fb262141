"""Figures of a set of requests.

Latencies are milliseconds from the intended time, of completed measured requests. Tokens and
requests a second count what arrived in the measured window from requests of any phase, so that
both edges of the window are treated alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError, OutriderError

Floats = NDArray[np.float64]

KEPT_UP = 0.95  # of the offered rate; below it a server may be overloaded
NOISE = 2.0  # standard deviations of arrivals tolerated
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a quantity over `n` requests, updates or tokens; `n` is at least 1."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Floats | Sequence[float]) -> Spread | None:
        """Linear percentiles; None without values. NaN is a missing value."""
        known = np.asarray(values, dtype=np.float64)
        known = known[~np.isnan(known)]
        if not known.size:
            return None
        p50, p90, p95, p99 = (float(value) for value in np.percentile(known, PERCENTILES))
        return cls(p50, p90, p95, p99, float(known.mean()), float(known.max()), int(known.size))

    @classmethod
    def of_counts(
        cls,
        values: Floats,
        counts: NDArray[np.int64],
        mean: float | None = None,
        largest: float | None = None,
    ) -> Spread | None:
        """As `of`, from a histogram with ascending values and positive counts.

        `mean` and `largest` override those of the values where exact ones are known.
        """
        if not values.size:
            return None
        upto = np.cumsum(counts)
        num = int(upto[-1])
        ranks = np.array(PERCENTILES) / 100 * (num - 1)
        low, high = (
            values[np.searchsorted(upto, each, side="right")]
            for each in (np.floor(ranks), np.ceil(ranks))
        )
        p50, p90, p95, p99 = (low + (high - low) * (ranks - np.floor(ranks))).tolist()
        exact = float((values * counts).sum()) / num if mean is None else mean
        largest_value = float(values[-1]) if largest is None else largest
        return cls(p50, p90, p95, p99, exact, largest_value, num)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a request in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From "ttft=500ms,tpot=50ms,e2e=10s"."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, limit = part.strip().partition("=")
            if name not in ("ttft", "tpot", "e2e") or name in limits:
                raise ConfigError(
                    f"slo {text!r} names {name!r}; give each of ttft, tpot and e2e at most once, "
                    'as "ttft=500ms,tpot=50ms,e2e=10s".'
                )
            limits[name] = milliseconds(limit, f"slo {text!r}")
        return cls(limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))

    def __str__(self) -> str:
        limits = (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("e2e", self.e2e_ms))
        return ",".join(f"{name}={limit:g}ms" for name, limit in limits if limit is not None)

    def met(self, ttft: Floats, tpot: Floats, e2e: Floats) -> NDArray[np.bool_]:
        """Which of these completed requests meet the SLO.

        A reply in one update has no time per token and meets any TPOT limit; a reply without a
        token meets no TTFT limit.
        """
        is_met = np.ones(e2e.shape, dtype=np.bool_)
        if self.ttft_ms is not None:
            is_met &= ttft <= self.ttft_ms  # NaN compares false
        if self.tpot_ms is not None:
            is_met &= (tpot <= self.tpot_ms) | np.isnan(tpot)
        if self.e2e_ms is not None:
            is_met &= e2e <= self.e2e_ms
        return is_met


def milliseconds(text: str, where: str) -> float:
    """Parses "500ms" or "2s"; `where` begins the error message."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)\s*", text)
    if found is None:
        raise ConfigError(
            f"{where} has the limit {text!r}; give a number with ms or s, as 500ms or 2s."
        )
    return float(found[1]) * (1000.0 if found[2] == "s" else 1.0)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Measured requests that met the SLO; failed ones never do."""

    slo: Slo
    met: int
    share: float | None  # of all sent
    requests_s: float | None


@dataclass(frozen=True, slots=True)
class SpeculationMeasures:
    """Speculation figures over many rounds.

    `survival[j - 1]` is the share of rounds that accepted at least j draft tokens, `hazard[j - 1]`
    the share of rounds with at least j - 1 that reached j. A round that drafted fewer than j
    counts as not reaching it. Empty if the server does not report it.
    """

    rounds: int
    drafted: int
    accepted: int
    acceptance: float | None  # accepted / drafted
    tokens_a_round: float | None  # committed, including the target's own
    depth: float | None  # drafted / rounds
    rounds_by_accepted: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    hazard: tuple[float | None, ...] = ()

    @classmethod
    def of(
        cls,
        rounds: int,
        drafted: int,
        accepted: int,
        committed: int,
        rounds_by_accepted: Sequence[int] = (),
    ) -> SpeculationMeasures | None:
        """None without a round."""
        if not rounds:
            return None
        at_least = np.cumsum(np.asarray(rounds_by_accepted, dtype=np.int64)[::-1])[::-1].tolist()
        steps = list(zip(at_least, at_least[1:], strict=False))
        num_rounds = at_least[0] if at_least else 0
        return cls(
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            acceptance=accepted / drafted if drafted else None,
            tokens_a_round=committed / rounds,
            depth=drafted / rounds,
            rounds_by_accepted=tuple(rounds_by_accepted),
            survival=tuple(after / num_rounds for _, after in steps) if num_rounds else (),
            hazard=tuple(after / before if before else None for before, after in steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The figures of one arm under one load, or of one block or part of it."""

    arm: str
    cell: str
    block: int | None = None  # None: all blocks
    part: str | None = None  # a category, or a bucket of prompt lengths
    seconds: float  # measured time over all its blocks
    windows: int = 1  # number of measured windows

    # Invariant of measured requests: sent == ok + errors + timed out.
    sent: int
    ok: int
    errors: dict[str, int] = field(default_factory=dict)  # by kind
    timed_out: int = 0
    retries: int = 0

    ttft: Spread | None = None  # from the intended time
    ttft_from_send: Spread | None = None  # ignores the client's own delay
    e2e: Spread | None = None
    # (last update - first update) / tokens after the first update, per request; undefined for a
    # reply in one update.
    tpot: Spread | None = None
    # Between consecutive updates, which other tools call inter-token latency. Misleading with
    # speculation: an update carries several tokens, so the gap grows while tokens get cheaper.
    gap: Spread | None = None
    itl: Spread | None = None  # gap before an update divided by its tokens, weighted by tokens
    tokens_per_update: Spread | None = None
    # Histogram of tokens per update. For a server that reports only totals, the rounded average
    # of each reply.
    updates_by_tokens: dict[int, int] = field(default_factory=dict)

    output_tokens_s: float | None = None  # arrived in the window, from requests of any phase
    requests_s: float | None = None  # completed in the window, of any phase
    offered_s: float | None = None  # requests due a second
    goodput: Goodput | None = None
    # Requests due but unfinished at the start and at the end of the windows.
    open_at_start: int = 0
    open_at_end: int = 0

    speculation: SpeculationMeasures | None = None
    cached_share: float | None = None  # of prompt tokens, if the server reports it
    counted_by: dict[str, int] = field(default_factory=dict)  # requests by source of token counts
    prompt_tokens: Spread | None = None
    output_tokens: Spread | None = None

    def __post_init__(self) -> None:
        if self.sent != self.ok + self.failed + self.timed_out:
            raise OutriderError(
                f"the counts of {self.arm!r} at {self.cell!r} do not add up: {self.sent} sent, "
                f"{self.ok} ok, {self.failed} errors, {self.timed_out} timed out; the records "
                "are incomplete, so measure again."
            )

    @property
    def failed(self) -> int:
        """Errors of all kinds, excluding timeouts."""
        return sum(self.errors.values())

    @property
    def kept_up(self) -> bool:
        """Whether requests completed about as fast as they were due.

        In a short window the requests in flight at its end are a large share of all. So a deficit
        within the noise of random arrivals is tolerated if hardly any request failed: a growing
        queue soon exceeds that noise.
        """
        if self.requests_s is None or not self.offered_s:
            return False
        if self.requests_s >= KEPT_UP * self.offered_s:
            return True
        if self.failed + self.timed_out > (1 - KEPT_UP) * self.sent:
            return False
        # Little's law; the number in flight has the variance of arrivals at both ends of a window.
        in_flight = self.windows * self.offered_s * (self.e2e.mean / 1000 if self.e2e else 0.0)
        noise = NOISE * math.sqrt(min(2 * in_flight, self.sent))
        return self.open_at_end - self.open_at_start <= noise


@dataclass(frozen=True, slots=True)
class Series:
    """One arm under one load second by second; NaN where unknown.

    `at_s` is seconds since the start of the run and jumps where another arm ran; `block` changes
    there. `is_measured` is False in warm-up and cool-down.
    """

    at_s: Floats
    block: NDArray[np.int64]
    is_measured: NDArray[np.bool_]
    tokens_s: Floats
    ttft_p50_ms: Floats  # of requests due in that second
    in_flight: Floats  # from the clients
    running: Floats  # from the server
    waiting: Floats
    acceptance: Floats
    depth: Floats  # drafted a round
