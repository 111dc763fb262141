"""Selects the draft tokens to verify when a step has no room for all: the likeliest to survive."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

_MIN_CONFIDENCE = 1e-6  # keeps a draft token likelier than those after it


class Offer(NamedTuple):
    """The draft tokens of a row, and how many of them may be verified."""

    confidences: Sequence[float]  # one per draft token
    max_verified: int


def is_likely(confidences: Sequence[float], least_survival: float) -> bool:
    """Whether all draft tokens of a row survive with at least that probability."""
    return prod(confidences) >= least_survival


def select_drafts(offers: Sequence[Offer], num_selected: int | None) -> list[int]:
    """How many draft tokens of each offer are verified, at most `num_selected` in all.

    The survival of a draft token is the product of the confidences up to it. It never rises along a
    row, so a prefix of each row is selected. Ties go to the row that is earlier in the plan, so
    every rank decides alike.

    In rejection mode a confidence must depend only on the tokens before a draft token and on q.
    Whether it is selected then depends on nothing else: later tokens of its row rank after it, and
    those of other rows were drawn with other noise.
    """
    counts = [offer.max_verified for offer in offers]
    if num_selected is None or sum(counts) <= num_selected:
        return counts
    ranked: list[tuple[float, int, int]] = []
    for index, (offer, count) in enumerate(zip(offers, counts, strict=True)):
        survival = 1.0
        for place in range(count):
            survival *= min(max(offer.confidences[place], _MIN_CONFIDENCE), 1.0)
            ranked.append((-survival, index, place))
    ranked.sort()
    selected = [0] * len(offers)
    for _, index, _ in ranked[:num_selected]:
        selected[index] += 1
    return selected
