"""Which outcomes travel together from the target to the draft.

Both ends derive it from the plans alone. After a step in which the draft took part, its outcome is
sent at once: the draft needs it for the next round. Outcomes of other steps wait for the next step
with a part for the draft, or until there are many.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MAX_BATCH = 64


class OutcomeBatches(Generic[T]):
    """`before` and `after` each step return the batch that is due then; empty: none is."""

    def __init__(self) -> None:
        self._open: list[T] = []

    def before(self, *, uses_draft: bool) -> list[T]:
        return self._take() if uses_draft else []

    def after(self, outcome: T, *, uses_draft: bool) -> list[T]:
        self._open.append(outcome)
        return self._take() if uses_draft or len(self._open) >= MAX_BATCH else []

    def _take(self) -> list[T]:
        taken, self._open = self._open, []
        return taken
