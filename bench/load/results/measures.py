"""What a set of requests amounts to, in figures.

Latencies are milliseconds from the intended time and come from measured requests that ended well;
the sums of tokens and requests a second count what arrived inside the measured window, whoever
asked for it, so that the edges of the window cut off as much as they let in.
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
NOISE = 2.0  # standard deviations that arrivals may be off by
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is spread over requests, updates or tokens; `n` of them, at least one."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Floats | Sequence[float]) -> Spread | None:
        """Linear percentiles; None where there is nothing. NaN stands for a missing value."""
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
        """As `of` each value as often as counted; values ascend, counts are at least one.

        `mean` and `largest` are given where they are known better than by the values.
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
        most = float(values[-1]) if largest is None else largest
        return cls(p50, p90, p95, p99, exact, most, num)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to; a limit that is None is none. Milliseconds."""

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
        """Which of these requests keep to it, all of which ended well.

        An answer that came in one update has no time per token, which keeps to any limit; one
        without a token has no first one, which keeps to none.
        """
        is_met = np.ones(e2e.shape, dtype=np.bool_)
        if self.ttft_ms is not None:
            is_met &= ttft <= self.ttft_ms  # NaN is never less
        if self.tpot_ms is not None:
            is_met &= (tpot <= self.tpot_ms) | np.isnan(tpot)
        if self.e2e_ms is not None:
            is_met &= e2e <= self.e2e_ms
        return is_met


def milliseconds(text: str, where: str) -> float:
    """Of "500ms" or "2s"; `where` begins the sentence about what is neither."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)\s*", text)
    if found is None:
        raise ConfigError(
            f"{where} has the limit {text!r}; give a number with ms or s, as 500ms or 2s."
        )
    return float(found[1]) * (1000.0 if found[2] == "s" else 1.0)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Measured requests that kept to an SLO; those that failed never do."""

    slo: Slo
    met: int
    share: float | None  # of all that were sent
    requests_s: float | None


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did over many rounds.

    `survival[j - 1]` is the share of rounds that accepted at least j drafts, `hazard[j - 1]` the
    share of those that accepted j - 1 that went on to j. Both count a round that drafted fewer
    than j as one that did not get there. Empty where a server does not tell.
    """

    rounds: int
    drafted: int
    accepted: int
    acceptance: float | None  # accepted / drafted
    tokens_a_round: float | None  # committed, with the target's own
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
    ) -> Speculation | None:
        """None where no round is known of."""
        if not rounds:
            return None
        at_least = np.cumsum(np.asarray(rounds_by_accepted, dtype=np.int64)[::-1])[::-1].tolist()
        steps = list(zip(at_least, at_least[1:], strict=False))
        told = at_least[0] if at_least else 0
        return cls(
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            acceptance=accepted / drafted if drafted else None,
            tokens_a_round=committed / rounds,
            depth=drafted / rounds,
            rounds_by_accepted=tuple(rounds_by_accepted),
            survival=tuple(after / told for _, after in steps) if told else (),
            hazard=tuple(after / before if before else None for before, after in steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The figures of one arm under one load; of one block or one part of it where named."""

    arm: str
    cell: str
    block: int | None = None  # None: all of them
    part: str | None = None  # a category, or a bucket of prompt lengths
    seconds: float  # measured, over all blocks that count here
    windows: int = 1  # that many were measured in

    # The books: sent == ok + errors + timed out, of measured requests.
    sent: int
    ok: int
    errors: dict[str, int] = field(default_factory=dict)  # by kind
    timed_out: int = 0
    retries: int = 0

    ttft: Spread | None = None  # from the intended time
    ttft_from_send: Spread | None = None  # what a client that forgives its own delay would say
    e2e: Spread | None = None
    # (last update - first update) / tokens after the first update; one figure a request, none for
    # an answer that came in one update.
    tpot: Spread | None = None
    # Between one update and the next. This is what others call inter-token latency, and what
    # misleads: an update of speculation carries several tokens, so the gap is longer where a
    # token is cheaper.
    gap: Spread | None = None
    itl: Spread | None = None  # a token's even share of the gap before its update; by tokens
    tokens_per_update: Spread | None = None
    # How many updates carried so many tokens. A server that tells only the sum counts with the
    # average of each answer, rounded.
    updates_by_tokens: dict[int, int] = field(default_factory=dict)

    output_tokens_s: float | None = None  # that arrived in the window, of requests of any phase
    requests_s: float | None = None  # that ended well in the window, of any phase
    offered_s: float | None = None  # requests that should have been sent, a second
    goodput: Goodput | None = None
    # Requests that were due but had not ended, when windows began and when they ended.
    open_at_start: int = 0
    open_at_end: int = 0

    speculation: Speculation | None = None
    cached_share: float | None = None  # of prompt tokens, where the server tells
    counted_by: dict[str, int] = field(default_factory=dict)  # requests, by who counted tokens
    prompt_tokens: Spread | None = None
    output_tokens: Spread | None = None

    def __post_init__(self) -> None:
        if self.sent != self.ok + self.failed + self.timed_out:
            raise OutriderError(
                f"the books of {self.arm!r} at {self.cell!r} do not balance: {self.sent} sent, "
                f"{self.ok} ok, {self.failed} errors, {self.timed_out} timed out; the records "
                "are incomplete, so measure again."
            )

    @property
    def failed(self) -> int:
        """Errors of all kinds, without those that timed out."""
        return sum(self.errors.values())

    @property
    def kept_up(self) -> bool:
        """Requests ended well about as fast as they should have been sent.

        In a short window a few that happen to be under way at its end are a large part of all. So
        what is missing may also be within the noise of random arrivals, as long as hardly any
        failed: a queue that grows soon holds more than that.
        """
        if self.requests_s is None or not self.offered_s:
            return False
        if self.requests_s >= KEPT_UP * self.offered_s:
            return True
        if self.failed + self.timed_out > (1 - KEPT_UP) * self.sent:
            return False
        # By Little's law; the number under way varies as arrivals do, at both ends of a window.
        under_way = self.windows * self.offered_s * (self.e2e.mean / 1000 if self.e2e else 0.0)
        noise = NOISE * math.sqrt(min(2 * under_way, self.sent))
        return self.open_at_end - self.open_at_start <= noise


@dataclass(frozen=True, slots=True)
class Series:
    """One arm under one load second by second; NaN where nothing is known.

    `at_s` is on the clock of the run and jumps where another arm had its turn; `block` changes
    there. `is_measured` is False in warm-up and cool-down.
    """

    at_s: Floats
    block: NDArray[np.int64]
    is_measured: NDArray[np.bool_]
    tokens_s: Floats
    ttft_p50_ms: Floats  # of requests that should have been sent in that second
    in_flight: Floats  # as the clients saw it
    running: Floats  # as the server tells
    waiting: Floats
    acceptance: Floats
    depth: Floats  # drafted a round
