"""Answers of arms, token by token."""

from __future__ import annotations

from load_records import answered, failed

from outrider.loadtest.records import RequestRecord, ShiftPhase
from outrider.loadtest.results.answers import Difference, compare_answers


def both(ask: str, off: list[int], d2: list[int]) -> list[RequestRecord]:
    return [answered(ask, token_ids=off), answered(ask, arm="d2", token_ids=d2)]


def test_the_first_token_that_differs_is_named() -> None:
    records = [
        *both("a/0", [1, 2, 3], [1, 2, 3]),
        *both("a/1", [1, 2, 3], [1, 2, 4, 5]),
        *both("a/2", [1, 2, 3], [1, 2, 3, 4]),
    ]
    (found,) = compare_answers(records)
    assert found.different == [
        Difference("a/1", 2, 4, 3, "token"),
        Difference("a/2", 3, 4, 3, "token"),
    ]
    assert found.sentences() == [
        "1 of 3 answers of “d2” and “off” are the same token by token; 2 differ, the earliest at "
        "token 2 (request a/1)."
    ]


def test_text_is_compared_where_ids_are_missing_and_it_is_said() -> None:
    records = [
        answered("a/0", text="same"),
        answered("a/0", arm="d2", text="same", token_ids=[1]),
    ]
    (found,) = compare_answers(records)
    assert found.sentences() == [
        "All 1 answers of “d2” and “off” are the same character by character."
    ]
    (found,) = compare_answers([*records, *both("a/1", [1], [1])])
    assert "token by token (1 of them by their text)" in found.sentences()[0]


def test_missing_failed_and_discarded_answers_are_said_not_compared() -> None:
    records = [
        *both("a/0", [1], [1]),
        answered("a/1", token_ids=[1]),
        failed("reset", ask="a/1", arm="d2"),
        answered("a/2", arm="d2", token_ids=[1]),
        answered("a/2", token_ids=[2], phase=ShiftPhase.DISCARDED),
        answered("a/3"),
        answered("a/3", arm="d2"),
    ]
    (found,) = compare_answers(records)
    assert found.compared == 1
    assert found.sentences()[1:] == [
        "Only “d2” answered 1 request (a/2).",
        "Only “off” answered 1 request (a/1).",
        "No answers were kept of 1 request (a/3).",
    ]


def test_an_arm_that_answers_in_two_ways_is_told() -> None:
    records = [*both("a/0", [1, 2], [1, 2]), answered("a/0", token_ids=[1, 3], block=1)]
    (found,) = compare_answers(records)
    assert (found.same, found.inconsistent) == (1, ["a/0"])
    assert "gave different answers to 1 request (a/0)" in found.sentences()[1]


def test_the_first_arm_is_the_baseline_where_none_is_off() -> None:
    records = [answered("a/0", arm=arm, token_ids=[1]) for arm in ("x", "y", "z")]
    assert [(each.arm, each.baseline) for each in compare_answers(records)] == [
        ("y", "x"),
        ("z", "x"),
    ]
    assert compare_answers([]) == []
