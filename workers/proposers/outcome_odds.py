"""How likely each outcome of a round is, learned from the outcomes: which to draft ahead of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import exp
from typing import NamedTuple

_PRIOR_WEIGHT = 8.0  # observations
_MAX_OBSERVATIONS = 4096  # of a bucket, after which all of them count half
_CONFIDENCE_BUCKETS, _GAP_BUCKETS, _BUCKETS_PER_NAT = 16, 24, 2


class RowOutcome(NamedTuple):
    """What comes of a row's round: accepted drafts, and the target's own token after them."""

    num_accepted: int
    token: int


@dataclass(frozen=True, slots=True)
class Alternatives:
    """A draft's view of one position behind its drafts, once it is the target's own: other tokens
    than its draft there, the best first, and how far their scores are below its own choice."""

    tokens: Sequence[int]
    gaps: Sequence[float]


@dataclass(frozen=True, slots=True)
class RoundView:
    """What the draft thinks of its round: its drafts, and the alternatives of each position and of
    the one behind the last."""

    drafts: Sequence[int]
    confidences: Sequence[float]
    alternatives: Sequence[Alternatives]
    is_greedy: bool


class _Shares:
    """Shares of hits by bucket."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._hits = [_PRIOR_WEIGHT * each for each in prior]
        self._counts = [_PRIOR_WEIGHT] * len(prior)

    def __getitem__(self, bucket: int) -> float:
        return self._hits[bucket] / self._counts[bucket]

    def observe(self, bucket: int, *, hit: bool) -> None:
        if self._counts[bucket] > _MAX_OBSERVATIONS:
            self._hits[bucket] /= 2
            self._counts[bucket] /= 2
        self._hits[bucket] += hit
        self._counts[bucket] += 1


class OutcomeOdds:
    """Learns from outcomes: how often a draft of some confidence is accepted, and how often the
    target's own token is one whose score is a gap below the draft's choice."""

    def __init__(self) -> None:
        middles = [(each + 0.5) / _CONFIDENCE_BUCKETS for each in range(_CONFIDENCE_BUCKETS)]
        self._accepted = _Shares([0.3 + 0.7 * each for each in middles])
        gaps = [exp(-(each + 0.5) / _BUCKETS_PER_NAT) for each in range(_GAP_BUCKETS)]
        # By whether the row is greedy, and whether all drafts were accepted.
        self._follows = {
            key: _Shares([(0.6 if key[1] else 0.4) * each for each in gaps])
            for key in ((False, False), (False, True), (True, False), (True, True))
        }

    def likeliest(self, rounds: Sequence[RoundView], count: int) -> list[tuple[int, RowOutcome]]:
        """The likeliest outcomes of all rounds together, with the index of their round."""
        found = nlargest(
            count,
            (
                (chance, -index, outcome)
                for index, view in enumerate(rounds)
                for chance, outcome in self._outcomes(view)
            ),
        )
        return [(-index, outcome) for _, index, outcome in found]

    def observe(self, view: RoundView, outcome: RowOutcome) -> None:
        num_drafts = len(view.drafts)
        for place in range(min(outcome.num_accepted + 1, num_drafts)):
            bucket = _confidence_bucket(view.confidences[place])
            self._accepted.observe(bucket, hit=place < outcome.num_accepted)
        seen = view.alternatives[outcome.num_accepted]
        follows = self._follows[view.is_greedy, outcome.num_accepted == num_drafts]
        for token, gap in zip(seen.tokens, seen.gaps, strict=True):
            follows.observe(_gap_bucket(gap), hit=token == outcome.token)

    def _outcomes(self, view: RoundView) -> Iterator[tuple[float, RowOutcome]]:
        survival, num_drafts = 1.0, len(view.drafts)
        for place, seen in enumerate(view.alternatives):
            accepted = 0.0
            if place < num_drafts:
                accepted = self._accepted[_confidence_bucket(view.confidences[place])]
            follows = self._follows[view.is_greedy, place == num_drafts]
            ends = survival * (1 - accepted)
            for token, gap in zip(seen.tokens, seen.gaps, strict=True):
                yield ends * follows[_gap_bucket(gap)], RowOutcome(place, token)
            survival *= accepted


def _confidence_bucket(confidence: float) -> int:
    if not confidence > 0:  # or NaN
        return 0
    return min(int(_CONFIDENCE_BUCKETS * min(confidence, 1.0)), _CONFIDENCE_BUCKETS - 1)


def _gap_bucket(gap: float) -> int:
    last = _GAP_BUCKETS - 1
    return int(_BUCKETS_PER_NAT * gap) if gap * _BUCKETS_PER_NAT < last else last  # also if NaN
