"""Estimates acceptance probabilities of draft tokens from verdicts, by position and by row.

The rate at position j is the probability that draft token j is accepted given that 1..j-1 were.
Positions after a rejection were not observed and are never counted. A proposer has one rate per
position, over all its rows. A row has one bias: the ratio by which its recent odds differ from
these rates. Biases are quantized into buckets, and new rows share a bucket of their own. Each
bucket is corrected by the acceptance its rows then have. So a row learns from few rounds and
forgets soon, and the value of a new row is learned from new rows, not from those that stay longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

_MAX_DEPTH = 32
_AGREEMENT_POSITIONS = 7  # positions after the first that one caught-up token informs
_AGREEMENT_WEIGHT = 0.25  # of such a token: one row has many, and it may be unlike the others
_PRIOR_RATE = 0.6  # before any observation: high enough to be tried
_PRIOR_WEIGHT = 8.0  # observations that the rate of the previous position counts for
_MEMORY = 150.0  # observations of a position that count
_ROW_PRIOR = 2.0  # observations that a row borrows from its proposer
_KEEP = 0.85  # share of a row's observations kept after a round; half is gone after 4
_ROW_MEMORY = 10.0  # maximum: an accepted round has many, a rejected one only one
_KEEP_UNSEEN = 0.96  # after a round without verified drafts
_BUCKETS = 24  # ratios of odds from 1/64 to 64, in steps of the square root of two
_NEW = _BUCKETS + 1  # bucket of rows without observations
_KNOWN = 0.05  # observations
_BUCKET_PRIOR = 16.0  # observations that a bucket's own ratio counts for
_BUCKET_MEMORY = 300.0
_FADE = 0.995  # of these, from one refresh to the next


class AcceptanceBias:
    """How much better or worse one row is accepted than its proposer's average; older rounds count
    less."""

    __slots__ = ("bucket", "expected", "hits", "reached", "run")

    def __init__(self) -> None:
        self.reached = 0.0  # drafts with a known outcome
        self.hits = 0.0
        self.expected = 0.0  # hits predicted by the proposer's rates
        self.bucket = _NEW
        self.run = 0  # hits since the last miss, while it only caught up

    def observe(self, reached: float, hits: float, expected: float, keep: float) -> None:
        if self.reached > _ROW_MEMORY:
            keep *= _ROW_MEMORY / self.reached
        self.reached = reached + keep * self.reached
        self.hits = hits + keep * self.hits
        self.expected = expected + keep * self.expected
        if self.reached < _KNOWN:
            if self.bucket != _NEW:
                self.bucket = _BUCKETS // 2
            return
        odds = _odds_ratio(self.reached, self.hits, self.expected, _ROW_PRIOR)
        self.bucket = min(max(round(2 * log2(odds)) + _BUCKETS // 2, 0), _BUCKETS)


class _Correction:
    """Observed against predicted acceptance of one bucket."""

    __slots__ = ("expected", "hits", "reached")

    def __init__(self) -> None:
        self.reached = self.hits = self.expected = 0.0

    def observe(self, reached: float, hits: float, expected: float) -> None:
        if self.reached >= _BUCKET_MEMORY:
            keep = 1 - reached / _BUCKET_MEMORY
            self.reached *= keep
            self.hits *= keep
            self.expected *= keep
        self.reached += reached
        self.hits += hits
        self.expected += expected

    def fade(self) -> None:
        self.reached *= _FADE
        self.hits *= _FADE
        self.expected *= _FADE

    def ratio(self) -> float:
        """Of observed to predicted odds."""
        if self.reached < _KNOWN:
            return 1.0
        return _odds_ratio(self.reached, self.hits, self.expected, _BUCKET_PRIOR)


class AcceptanceEstimator:
    """Rates of one proposer. Readers see a snapshot that only `refresh` updates."""

    def __init__(self) -> None:
        self._reached = [0.0] * _MAX_DEPTH
        self._hits = [0.0] * _MAX_DEPTH
        self._is_stale = True
        self._rates: list[float] = []  # by position
        self._rate_sums: list[float] = []  # cumulative
        self._bucket_rate_sums: dict[int, list[float]] = {}  # by bucket, scaled by its ratio
        # Of the first draft of a round, and of the later ones.
        self._first = [_Correction() for _ in range(_NEW + 1)]
        self._others = [_Correction() for _ in range(_NEW + 1)]
        self._survivals: dict[tuple[int, int], tuple[float, ...]] = {}
        self.refresh()

    def at(self, position: int) -> float:
        return self._rates[position - 1]

    def observe_round(self, row: AcceptanceBias, num_verified: int, num_accepted: int) -> None:
        """A round with `num_verified` drafts, of which the first `num_accepted` were accepted."""
        if not num_verified:
            row.observe(0.0, 0.0, 0.0, _KEEP_UNSEEN)
            return
        reached = num_accepted + 1 if num_accepted < num_verified else num_verified
        for position in range(reached):
            self._count(position, position < num_accepted)
        self._correct(row.bucket, reached, num_accepted)
        row.observe(reached, num_accepted, self._rate_sums[reached], _KEEP)

    def observe_agreement(self, row: AcceptanceBias, hits: Sequence[bool]) -> None:
        """For each output token, whether the draft would have proposed it. A draft could have
        started anywhere, so a token after `n` hits in a row counts for positions 1 to n + 1."""
        expected, run = 0.0, row.run
        rate_sums = self._rate_sums_of(row.bucket)
        first, others = self._first[row.bucket], self._others[row.bucket]
        for hit in hits:
            position = min(run, _AGREEMENT_POSITIONS)
            for each in range(position + 1):
                self._count(each, hit, _AGREEMENT_WEIGHT)
            expected += self._rates[position]
            first.observe(
                _AGREEMENT_WEIGHT, _AGREEMENT_WEIGHT * hit, _AGREEMENT_WEIGHT * rate_sums[1]
            )
            if position:
                rest = rate_sums[position + 1] - rate_sums[position]
                others.observe(_AGREEMENT_WEIGHT, _AGREEMENT_WEIGHT * hit, _AGREEMENT_WEIGHT * rest)
            run = run + 1 if hit else 0
        row.run = run
        row.observe(len(hits), sum(hits), expected, _KEEP ** min(len(hits), 8))

    def _correct(self, bucket: int, reached: int, hits: int) -> None:
        rate_sums = self._rate_sums_of(bucket)
        self._first[bucket].observe(1, hits > 0, rate_sums[1])
        if reached > 1:
            rest = rate_sums[reached] - rate_sums[1]
            self._others[bucket].observe(reached - 1, hits - 1, rest)

    def _rate_sums_of(self, bucket: int) -> list[float]:
        """Cumulative rates by position, scaled by the bucket's ratio."""
        found = self._bucket_rate_sums.get(bucket)
        if found is None:
            ratio, total = _ratio_of(bucket), 0.0
            found = self._bucket_rate_sums[bucket] = [total]
            for rate in self._rates:
                total += _scale_odds(rate, ratio)
                found.append(total)
        return found

    def survivals(self, row: AcceptanceBias, depth: int, trust: float = 1.0) -> tuple[float, ...]:
        """For each draft up to `depth`, the probability that it and all before it are accepted.
        Rows of one bucket get the same object. `trust` below 1 shrinks the row's bias."""
        bucket = row.bucket
        if bucket != _NEW:
            neutral = _BUCKETS // 2
            bucket = round(neutral + trust * (bucket - neutral))
        key = (bucket, depth)
        found = self._survivals.get(key)
        if found is None:
            found = self._survivals[key] = self._survivals_of(bucket, depth)
        return found

    def refresh(self) -> None:
        """Apply the observations since the last call."""
        for each in (*self._first, *self._others):
            each.fade()
        if not self._is_stale:
            return
        self._is_stale = False
        self._survivals.clear()
        self._bucket_rate_sums.clear()
        rate, total = _PRIOR_RATE, 0.0
        self._rates, self._rate_sums = [], [0.0]
        for reached, hits in zip(self._reached, self._hits, strict=True):
            rate = (hits + _PRIOR_WEIGHT * rate) / (reached + _PRIOR_WEIGHT)
            total += rate
            self._rates.append(rate)
            self._rate_sums.append(total)

    def _count(self, position: int, is_hit: bool, weight: float = 1.0) -> None:
        self._is_stale = True
        if self._reached[position] >= _MEMORY:
            keep = (_MEMORY - weight) / _MEMORY
            self._reached[position] *= keep
            self._hits[position] *= keep
        self._reached[position] += weight
        self._hits[position] += weight * is_hit

    def _survivals_of(self, bucket: int, depth: int) -> tuple[float, ...]:
        ratio = _ratio_of(bucket)
        first, others = (each[bucket].ratio() * ratio for each in (self._first, self._others))
        survival, values = 1.0, []
        for position, rate in enumerate(self._rates[:depth]):
            survival *= _scale_odds(rate, others if position else first)
            values.append(survival)
        return tuple(values)


def _ratio_of(bucket: int) -> float:
    return 1.0 if bucket == _NEW else 2.0 ** ((bucket - _BUCKETS // 2) / 2)


def _scale_odds(rate: float, ratio: float) -> float:
    rate = min(max(rate, 0.001), 0.999)
    odds = ratio * rate / (1 - rate)
    return odds / (1 + odds)


def _odds_ratio(reached: float, hits: float, expected: float, prior: float) -> float:
    """Of observed to expected hits, with `prior` more observations that are as expected."""
    rate = min(max(expected / reached, 0.01), 0.99)
    own = min(max((hits + prior * rate) / (reached + prior), 0.001), 0.999)
    return own * (1 - rate) / ((1 - own) * rate)
