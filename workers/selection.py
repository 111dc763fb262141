"""Which drafts are verified where a step has no room for all: the likeliest, by their survival."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

_LEAST = 1e-6  # confidence: however unlikely, a draft is likelier than those behind it


class Offer(NamedTuple):
    """What a row has drafted, and how much of it may be verified at all."""

    confidences: Sequence[float]  # one a draft
    most: int


def is_likely(confidences: Sequence[float], least_survival: float) -> bool:
    """Whether drafts of a row are all right with that chance, so that more may follow."""
    return prod(confidences) >= least_survival


def select_drafts(offers: Sequence[Offer], num_selected: int | None) -> list[int]:
    """How many drafts of each offer are verified, `num_selected` in all at most.

    The survival of a draft is the product of the confidences up to it. It never rises along a row,
    so what is selected of a row is a beginning. Among equals the row comes first that stands first
    in the plan: every rank decides alike.

    In rejection mode a confidence must depend on the tokens before a draft and on q alone. Whether
    a draft is selected then depends on nothing else either: those behind it in its row come after
    it, and those of other rows were drawn with other noise.
    """
    wanted = [offer.most for offer in offers]
    if num_selected is None or sum(wanted) <= num_selected:
        return wanted
    ranked: list[tuple[float, int, int]] = []
    for index, (offer, count) in enumerate(zip(offers, wanted, strict=True)):
        survival = 1.0
        for place in range(count):
            survival *= min(max(offer.confidences[place], _LEAST), 1.0)
            ranked.append((-survival, index, place))
    ranked.sort()
    selected = [0] * len(offers)
    for _, index, _ in ranked[:num_selected]:
        selected[index] += 1
    return selected
