"""What verdicts teach about the chances of drafts."""

from __future__ import annotations

import random

import pytest

from outrider.scheduler.hazards import Hazards, RowLuck


def rounds(
    hazards: Hazards, row: RowLuck, chances: list[float], count: int, depth: int, seed: int = 0
) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        accepted = 0
        while accepted < depth and rng.random() < chances[accepted]:
            accepted += 1
        hazards.see_round(row, depth, accepted)
        hazards.refresh()


def test_hazards_are_by_position_and_not_the_mean_to_a_power() -> None:
    hazards, row = Hazards(), RowLuck()
    rounds(hazards, row, [0.6, 0.9, 0.3], 3000, 3)
    assert [hazards.at(level) for level in (1, 2, 3)] == pytest.approx([0.6, 0.9, 0.3], abs=0.08)


def test_positions_behind_a_rejection_are_not_counted() -> None:
    hazards, row = Hazards(), RowLuck()
    for _ in range(200):
        hazards.see_round(row, 5, 0)
    hazards.refresh()
    assert hazards.at(1) < 0.05
    before = hazards.at(2)
    for _ in range(200):
        hazards.see_round(row, 5, 0)
    hazards.refresh()
    assert hazards.at(2) == pytest.approx(before, abs=0.02), "nobody has seen a second draft"


def test_a_row_that_is_always_right_and_one_that_never_is_are_told_apart_soon() -> None:
    hazards, good, bad = Hazards(), RowLuck(), RowLuck()
    for _ in range(10):
        hazards.see_round(good, 4, 4)
        hazards.see_round(bad, 4, 0)
        hazards.refresh()
    assert hazards.survivals(good, 4)[0] > 0.8
    assert hazards.survivals(bad, 4)[0] < 0.3


def test_with_less_trust_luck_counts_for_less_and_new_rows_stay_what_they_are() -> None:
    hazards, good, bad = Hazards(), RowLuck(), RowLuck()
    for _ in range(10):
        hazards.see_round(good, 4, 4)
        hazards.see_round(bad, 4, 0)
        hazards.refresh()
    firsts = [[hazards.survivals(row, 4, trust)[0] for row in (bad, good)] for trust in (1, 0.5, 0)]
    assert firsts[0][0] < firsts[1][0] < firsts[2][0] == firsts[2][1] < firsts[1][1] < firsts[0][1]
    assert hazards.survivals(RowLuck(), 4, 0.5) is hazards.survivals(RowLuck(), 4)


def test_a_row_without_history_is_what_its_proposer_is() -> None:
    hazards, old = Hazards(), RowLuck()
    rounds(hazards, old, [0.8] * 4, 500, 4)
    assert hazards.survivals(RowLuck(), 1)[0] == pytest.approx(hazards.at(1), abs=0.1)


def test_a_row_forgets_bad_luck_that_it_has_not_seen_for_long() -> None:
    hazards, row, others = Hazards(), RowLuck(), RowLuck()
    for _ in range(30):
        hazards.see_round(row, 2, 0)
        rounds(hazards, others, [0.9, 0.9], 1, 2, seed=_)
    unlucky = hazards.survivals(row, 1)[0]
    for _ in range(600):
        hazards.see_round(row, 0, 0)
    assert hazards.survivals(row, 1)[0] > 2 * unlucky


def test_survivals_never_rise_and_rows_alike_share_them() -> None:
    hazards, row = Hazards(), RowLuck()
    rounds(hazards, row, [0.5, 0.99, 0.99], 300, 3)
    values = hazards.survivals(row, 8)
    assert list(values) == sorted(values, reverse=True)
    assert hazards.survivals(row, 8) is values


def test_agreement_tells_of_every_place_a_draft_could_have_begun() -> None:
    hazards, row = Hazards(), RowLuck()
    for _ in range(200):
        hazards.see_agreement(row, (True, True, False))
    hazards.refresh()
    found = [hazards.at(level) for level in (1, 2, 3)]
    assert found == pytest.approx([2 / 3, 1 / 2, 0.0], abs=0.1)


def test_a_text_that_changes_character_is_noticed_within_some_dozen_rounds() -> None:
    hazards, row = Hazards(), RowLuck()
    others = [RowLuck() for _ in range(8)]
    for number in range(60):
        hazards.see_round(row, 3, 3)
        for each in others:
            rounds(hazards, each, [0.6] * 3, 1, 3, seed=number)
    assert hazards.survivals(row, 1)[0] > 0.85
    for number in range(40):
        hazards.see_round(row, 3, 0)
        for each in others:
            rounds(hazards, each, [0.6] * 3, 1, 3, seed=number)
    assert hazards.survivals(row, 1)[0] < 0.45
