"""What verdicts teach about the chances of drafts."""

from __future__ import annotations

import random

import pytest

from outrider.scheduler.acceptance import AcceptanceBias, AcceptanceEstimator


def rounds(
    estimator: AcceptanceEstimator,
    row: AcceptanceBias,
    chances: list[float],
    count: int,
    depth: int,
    seed: int = 0,
) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        accepted = 0
        while accepted < depth and rng.random() < chances[accepted]:
            accepted += 1
        estimator.observe_round(row, depth, accepted)
        estimator.refresh()


def test_hazards_are_by_position_and_not_the_mean_to_a_power() -> None:
    estimator, row = AcceptanceEstimator(), AcceptanceBias()
    rounds(estimator, row, [0.6, 0.9, 0.3], 3000, 3)
    assert [estimator.at(position) for position in (1, 2, 3)] == pytest.approx(
        [0.6, 0.9, 0.3], abs=0.08
    )


def test_positions_behind_a_rejection_are_not_counted() -> None:
    estimator, row = AcceptanceEstimator(), AcceptanceBias()
    for _ in range(200):
        estimator.observe_round(row, 5, 0)
    estimator.refresh()
    assert estimator.at(1) < 0.05
    before = estimator.at(2)
    for _ in range(200):
        estimator.observe_round(row, 5, 0)
    estimator.refresh()
    assert estimator.at(2) == pytest.approx(before, abs=0.02), "no second draft was verified"


def test_rows_that_are_always_or_never_accepted_soon_have_different_estimates() -> None:
    estimator, good, bad = AcceptanceEstimator(), AcceptanceBias(), AcceptanceBias()
    for _ in range(10):
        estimator.observe_round(good, 4, 4)
        estimator.observe_round(bad, 4, 0)
        estimator.refresh()
    assert estimator.survivals(good, 4)[0] > 0.8
    assert estimator.survivals(bad, 4)[0] < 0.3


def test_with_less_trust_luck_counts_for_less_and_new_rows_stay_what_they_are() -> None:
    estimator, good, bad = AcceptanceEstimator(), AcceptanceBias(), AcceptanceBias()
    for _ in range(10):
        estimator.observe_round(good, 4, 4)
        estimator.observe_round(bad, 4, 0)
        estimator.refresh()
    firsts = [
        [estimator.survivals(row, 4, trust)[0] for row in (bad, good)] for trust in (1, 0.5, 0)
    ]
    assert firsts[0][0] < firsts[1][0] < firsts[2][0] == firsts[2][1] < firsts[1][1] < firsts[0][1]
    assert estimator.survivals(AcceptanceBias(), 4, 0.5) is estimator.survivals(AcceptanceBias(), 4)


def test_a_row_without_history_is_what_its_proposer_is() -> None:
    estimator, old = AcceptanceEstimator(), AcceptanceBias()
    rounds(estimator, old, [0.8] * 4, 500, 4)
    assert estimator.survivals(AcceptanceBias(), 1)[0] == pytest.approx(estimator.at(1), abs=0.1)


def test_a_row_forgets_bad_luck_that_it_has_not_seen_for_long() -> None:
    estimator, row, others = AcceptanceEstimator(), AcceptanceBias(), AcceptanceBias()
    for _ in range(30):
        estimator.observe_round(row, 2, 0)
        rounds(estimator, others, [0.9, 0.9], 1, 2, seed=_)
    unlucky = estimator.survivals(row, 1)[0]
    for _ in range(600):
        estimator.observe_round(row, 0, 0)
    assert estimator.survivals(row, 1)[0] > 2 * unlucky


def test_survivals_never_rise_and_rows_alike_share_them() -> None:
    estimator, row = AcceptanceEstimator(), AcceptanceBias()
    rounds(estimator, row, [0.5, 0.99, 0.99], 300, 3)
    values = estimator.survivals(row, 8)
    assert list(values) == sorted(values, reverse=True)
    assert estimator.survivals(row, 8) is values


def test_agreement_tells_of_every_place_a_draft_could_have_begun() -> None:
    estimator, row = AcceptanceEstimator(), AcceptanceBias()
    for _ in range(200):
        estimator.observe_agreement(row, (True, True, False))
    estimator.refresh()
    found = [estimator.at(position) for position in (1, 2, 3)]
    assert found == pytest.approx([2 / 3, 1 / 2, 0.0], abs=0.1)


def test_a_text_that_changes_character_is_noticed_within_some_dozen_rounds() -> None:
    estimator, row = AcceptanceEstimator(), AcceptanceBias()
    others = [AcceptanceBias() for _ in range(8)]
    for number in range(60):
        estimator.observe_round(row, 3, 3)
        for each in others:
            rounds(estimator, each, [0.6] * 3, 1, 3, seed=number)
    assert estimator.survivals(row, 1)[0] > 0.85
    for number in range(40):
        estimator.observe_round(row, 3, 0)
        for each in others:
            rounds(estimator, each, [0.6] * 3, 1, 3, seed=number)
    assert estimator.survivals(row, 1)[0] < 0.45
