"""The likeliest drafts of a step, each with all before it in its row."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from outrider.workers.selection import Offer, is_likely, select_drafts


def select(*confidences: tuple[float, ...], num_selected: int | None) -> list[int]:
    return select_drafts([Offer(each, len(each)) for each in confidences], num_selected)


def test_all_are_verified_where_there_is_room() -> None:
    assert select((0.1, 0.1), (), (0.9,), num_selected=None) == [2, 0, 1]
    assert select((0.1, 0.1), (), (0.9,), num_selected=3) == [2, 0, 1]


def test_the_likeliest_are_verified_each_with_all_before_it() -> None:
    assert select((0.9, 0.9, 0.9), (0.5, 1.0), (0.8, 0.1), num_selected=4) == [3, 0, 1]


def test_a_sure_draft_behind_an_unsure_one_is_no_likelier_than_that() -> None:
    assert select((0.2, 1.0), (0.3,), num_selected=1) == [0, 1]


def test_a_row_never_gets_more_than_it_may() -> None:
    assert select_drafts([Offer((1.0, 1.0, 1.0), 1), Offer((0.1,), 1)], 3) == [1, 1]
    assert select_drafts([Offer((1.0, 1.0, 1.0), 2), Offer((0.1,), 1)], 2) == [2, 0]


def test_among_equals_the_first_rows_are_served() -> None:
    assert select((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), num_selected=3) == [2, 1, 0]
    assert select((0.5, 0.5), (0.5, 0.5), num_selected=3) == [2, 1]


def test_confidences_beyond_the_possible_do_no_harm() -> None:
    assert select((0.0, 0.0), (3.0, 0.5), (math.inf,), num_selected=2) == [0, 1, 1]


def test_none_may_be_selected() -> None:
    assert select((0.9,), (0.8,), num_selected=0) == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_would_survive_better(seed: int) -> None:
    rng = random.Random(seed)
    rows = [tuple(rng.random() for _ in range(rng.randint(0, 3))) for _ in range(4)]
    budget = rng.randint(0, sum(map(len, rows)))

    def value(counts: tuple[int, ...]) -> float:
        return sum(
            math.prod(row[: j + 1]) for row, n in zip(rows, counts, strict=True) for j in range(n)
        )

    choices = itertools.product(*(range(len(row) + 1) for row in rows))
    best = max(value(counts) for counts in choices if sum(counts) <= budget)
    selected = select(*rows, num_selected=budget)
    assert sum(selected) == budget
    assert value(tuple(selected)) == pytest.approx(best)


def test_drafts_are_likely_together_or_not() -> None:
    assert is_likely((), 0.9)
    assert is_likely((0.5, 0.5), 0.25)
    assert not is_likely((0.5, 0.4), 0.25)
    assert is_likely((0.1, 0.1), 0.0)
