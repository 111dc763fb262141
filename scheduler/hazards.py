"""How likely drafts are right: learned from verdicts, by position, for each row.

The hazard at j is the chance that draft j is right given that 1..j-1 were. Positions behind a
rejection were not observed and are never counted. A proposer has a hazard for each position, over
all its rows; a row has one number, by which its odds lately were better or worse than these. Rows
with the same number are alike, new rows among themselves: how good drafts of such rows then turn
out to be puts right what their number says. So a row learns from few rounds and forgets soon,
as much or as little as texts change; and what a new row is worth is learned from new rows, not
from those that stay longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

_MAX_LEVELS = 32
_MOST_TOLD = 7  # levels beyond the first that a token caught up on tells of
_TOLD_WEIGHT = 0.25  # of such a token: there are many of one row, and it may be like no other
_FIRST_GUESS = 0.6  # before anything was seen: worth finding out
_PRIOR_WEIGHT = 8.0  # observations that what is known of the position before counts for
_MEMORY = 150.0  # observations of a position that count
_ROW_PRIOR = 2.0  # observations that a row borrows from its proposer
_KEEP = 0.85  # of what a row has seen, after a round; half is gone after 4
_ROW_MEMORY = 10.0  # the most that count: a round all right has many, one all wrong a single one
_KEEP_UNSEEN = 0.96  # after a round in which nothing could be seen
_BUCKETS = 24  # ratios of odds from 1/64 to 64, in steps of the square root of two
_NEW = _BUCKETS + 1  # the bucket of rows of which nothing is known
_KNOWN = 0.05  # observations
_BUCKET_PRIOR = 16.0  # observations that what a bucket's number says counts for
_BUCKET_MEMORY = 300.0
_FADE = 0.995  # of these, from one refresh to the next


class RowLuck:
    """What drafts of one row came to, older rounds counting less."""

    __slots__ = ("bucket", "expected", "hits", "reached", "run")

    def __init__(self) -> None:
        self.reached = 0.0  # drafts of which it is known whether they were right
        self.hits = 0.0
        self.expected = 0.0  # hits that the proposer's hazards promised
        self.bucket = _NEW
        self.run = 0  # hits since the last miss, where it only caught up

    def see(self, reached: float, hits: float, expected: float, keep: float) -> None:
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
    """What drafts came to, of what they promised."""

    __slots__ = ("expected", "hits", "reached")

    def __init__(self) -> None:
        self.reached = self.hits = self.expected = 0.0

    def see(self, reached: float, hits: float, expected: float) -> None:
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
        """By which odds are better than promised."""
        if self.reached < _KNOWN:
            return 1.0
        return _odds_ratio(self.reached, self.hits, self.expected, _BUCKET_PRIOR)


class Hazards:
    """Those of one proposer. What is read stays as it was until `refresh`."""

    def __init__(self) -> None:
        self._reached = [0.0] * _MAX_LEVELS
        self._hits = [0.0] * _MAX_LEVELS
        self._is_stale = True
        self._usual: list[float] = []  # by level
        self._promised: list[float] = []  # sums of these
        self._promised_to: dict[int, list[float]] = {}  # by bucket, as its number says
        # Of the first draft of a round, and of those behind it.
        self._first = [_Correction() for _ in range(_NEW + 1)]
        self._others = [_Correction() for _ in range(_NEW + 1)]
        self._survivals: dict[tuple[int, int], tuple[float, ...]] = {}
        self.refresh()

    def at(self, level: int) -> float:
        return self._usual[level - 1]

    def see_round(self, row: RowLuck, num_verified: int, num_accepted: int) -> None:
        """A round of which so many drafts were verified."""
        if not num_verified:
            row.see(0.0, 0.0, 0.0, _KEEP_UNSEEN)
            return
        reached = num_accepted + 1 if num_accepted < num_verified else num_verified
        for level in range(reached):
            self._count(level, level < num_accepted)
        self._correct(row.bucket, reached, num_accepted)
        row.see(reached, num_accepted, self._promised[reached], _KEEP)

    def see_agreement(self, row: RowLuck, hits: Sequence[bool]) -> None:
        """Output of which it is known whether the draft would have guessed it. A draft could have
        begun anywhere, so a token behind `n` hits in a row tells what drafts 1 to n + 1 would have
        been."""
        expected, run = 0.0, row.run
        promised = self._promises_of(row.bucket)
        first, others = self._first[row.bucket], self._others[row.bucket]
        for hit in hits:
            level = min(run, _MOST_TOLD)
            for each in range(level + 1):
                self._count(each, hit, _TOLD_WEIGHT)
            expected += self._usual[level]
            first.see(_TOLD_WEIGHT, _TOLD_WEIGHT * hit, _TOLD_WEIGHT * promised[1])
            if level:
                rest = promised[level + 1] - promised[level]
                others.see(_TOLD_WEIGHT, _TOLD_WEIGHT * hit, _TOLD_WEIGHT * rest)
            run = run + 1 if hit else 0
        row.run = run
        row.see(len(hits), sum(hits), expected, _KEEP ** min(len(hits), 8))

    def _correct(self, bucket: int, reached: int, hits: int) -> None:
        promised = self._promises_of(bucket)
        self._first[bucket].see(1, hits > 0, promised[1])
        if reached > 1:
            rest = promised[reached] - promised[1]
            self._others[bucket].see(reached - 1, hits - 1, rest)

    def _promises_of(self, bucket: int) -> list[float]:
        """Sums of hazards by level, as the bucket's number says."""
        found = self._promised_to.get(bucket)
        if found is None:
            ratio, total = _ratio_of(bucket), 0.0
            found = self._promised_to[bucket] = [total]
            for usual in self._usual:
                total += _at_odds(usual, ratio)
                found.append(total)
        return found

    def survivals(self, row: RowLuck, depth: int, trust: float = 1.0) -> tuple[float, ...]:
        """Rows alike get the same object. With less `trust` a row's luck counts for less."""
        bucket = row.bucket
        if bucket != _NEW:
            usual = _BUCKETS // 2
            bucket = round(usual + trust * (bucket - usual))
        key = (bucket, depth)
        found = self._survivals.get(key)
        if found is None:
            found = self._survivals[key] = self._of_bucket(bucket, depth)
        return found

    def refresh(self) -> None:
        """Let what was seen since the last call count."""
        for each in (*self._first, *self._others):
            each.fade()
        if not self._is_stale:
            return
        self._is_stale = False
        self._survivals.clear()
        self._promised_to.clear()
        usual, total = _FIRST_GUESS, 0.0
        self._usual, self._promised = [], [0.0]
        for reached, hits in zip(self._reached, self._hits, strict=True):
            usual = (hits + _PRIOR_WEIGHT * usual) / (reached + _PRIOR_WEIGHT)
            total += usual
            self._usual.append(usual)
            self._promised.append(total)

    def _count(self, level: int, is_hit: bool, weight: float = 1.0) -> None:
        self._is_stale = True
        if self._reached[level] >= _MEMORY:
            keep = (_MEMORY - weight) / _MEMORY
            self._reached[level] *= keep
            self._hits[level] *= keep
        self._reached[level] += weight
        self._hits[level] += weight * is_hit

    def _of_bucket(self, bucket: int, depth: int) -> tuple[float, ...]:
        ratio = _ratio_of(bucket)
        first, others = (each[bucket].ratio() * ratio for each in (self._first, self._others))
        survival, values = 1.0, []
        for level, usual in enumerate(self._usual[:depth]):
            survival *= _at_odds(usual, others if level else first)
            values.append(survival)
        return tuple(values)


def _ratio_of(bucket: int) -> float:
    return 1.0 if bucket == _NEW else 2.0 ** ((bucket - _BUCKETS // 2) / 2)


def _at_odds(usual: float, ratio: float) -> float:
    usual = min(max(usual, 0.001), 0.999)
    odds = ratio * usual / (1 - usual)
    return odds / (1 + odds)


def _odds_ratio(reached: float, hits: float, expected: float, prior: float) -> float:
    """Of what was seen, with so many observations more that are as expected."""
    usual = min(max(expected / reached, 0.01), 0.99)
    own = min(max((hits + prior * usual) / (reached + prior), 0.001), 0.999)
    return own * (1 - usual) / ((1 - own) * usual)
