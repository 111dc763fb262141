"""Rounds of speculation, read from whose each token is."""

from __future__ import annotations

from collections.abc import Iterable


def rounds_by_accepted(is_drafted: Iterable[bool]) -> list[int]:
    """Entry j: how many rounds of one text accepted exactly j drafts.

    A token of the target's own closes a round. The last round has none if the text ended within
    its drafts.
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
    """Add entry by entry, lengthening `total` where it is the shorter one."""
    for position, number in enumerate(more):
        if position == len(total):
            total.append(0)
        total[position] += number


def _count(counts: list[int], accepted: int) -> None:
    if accepted >= len(counts):
        counts.extend([0] * (accepted + 1 - len(counts)))
    counts[accepted] += 1
