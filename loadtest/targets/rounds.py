"""Reconstructs speculation rounds from the origin of each token."""

from __future__ import annotations

from collections.abc import Iterable


def rounds_by_accepted(is_drafted: Iterable[bool]) -> list[int]:
    """Entry j: the number of rounds of one sample that accepted exactly j draft tokens.

    A token of the target's own ends a round; the last round may lack it.
    """
    counts: list[int] = []
    run = 0
    for drafted in is_drafted:
        if drafted:
            run += 1
        else:
            _count(counts, run)
            run = 0
    if run:
        _count(counts, run)
    return counts


def add_counts(total: list[int], more: Iterable[int]) -> None:
    """Adds elementwise; extends `total` as needed."""
    for position, number in enumerate(more):
        if position == len(total):
            total.append(0)
        total[position] += number


def _count(counts: list[int], accepted: int) -> None:
    if accepted >= len(counts):
        counts.extend([0] * (accepted + 1 - len(counts)))
    counts[accepted] += 1
