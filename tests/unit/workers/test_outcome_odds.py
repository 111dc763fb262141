"""Which outcomes are thought likely, and that this follows what comes true."""

from __future__ import annotations

import random
from math import inf, nan

import pytest

from outrider.workers.proposers.outcome_odds import (
    Alternatives,
    OutcomeOdds,
    RoundView,
    RowOutcome,
)


def view(confidence: float = 0.5, gaps: tuple[float, float] = (0.1, 4.0)) -> RoundView:
    """Two drafts; of each position two tokens that may come instead, the third is the bonus."""
    seen = [Alternatives((10 * place, 10 * place + 1), gaps) for place in range(3)]
    return RoundView((7, 8), (confidence, confidence), seen, is_greedy=True)


def test_small_gaps_come_first() -> None:
    found = OutcomeOdds().likeliest([view()], 6)
    assert len(found) == 6 and {index for index, _ in found} == {0}
    tokens = [outcome.token for _, outcome in found]
    assert set(tokens[:3]) == {0, 10, 20} and set(tokens[3:]) == {1, 11, 21}


def test_rounds_compete_for_branches() -> None:
    sure, unsure = view(0.95, (0.1, 4.0)), view(0.95, (9.0, 9.5))
    found = OutcomeOdds().likeliest([unsure, sure], 2)
    assert [index for index, _ in found] == [1, 1]
    assert OutcomeOdds().likeliest([], 4) == []


def test_it_learns_how_often_drafts_are_accepted() -> None:
    odds, rng = OutcomeOdds(), random.Random(3)
    for _ in range(300):
        odds.observe(view(), RowOutcome(2, rng.choice((20, 20, 21))))
    assert odds.likeliest([view()], 1) == [(0, RowOutcome(2, 20))]
    for _ in range(3000):
        odds.observe(view(), RowOutcome(0, 0))
    assert odds.likeliest([view()], 1) == [(0, RowOutcome(0, 0))]


@pytest.mark.parametrize("broken", [nan, inf])
def test_scores_that_are_no_numbers_break_nothing(broken: float) -> None:
    odds, seen = OutcomeOdds(), view(broken, (broken, 0.1))
    odds.observe(seen, RowOutcome(1, 10))
    assert len(odds.likeliest([seen], 9)) == 6


def test_it_learns_what_a_gap_means() -> None:
    odds = OutcomeOdds()
    for _ in range(200):
        odds.observe(view(), RowOutcome(0, 1))
    best = odds.likeliest([view()], 1)
    assert best == [(0, RowOutcome(0, 1))], "the far one, since it always comes"
