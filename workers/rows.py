"""The text of every row on the workers.

Workers in one process share one table: proposers see what the target commits. A worker in its own
process keeps its own table and advances it by the same plans and verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import OutriderError
from outrider.scheduler.types import RowInit, RowVerdict, StepPlan, Verdict


class Row:
    """One request on the workers: its parameters and its committed text."""

    __slots__ = ("init", "tokens")

    def __init__(self, init: RowInit) -> None:
        self.init = init
        self.tokens = list(init.token_ids)


class RowTable:
    """Rows by number; plans begin and end them, verdicts extend them."""

    def __init__(self, num_rows: int) -> None:
        self._rows: list[Row | None] = [None] * num_rows
        self._epoch = -1
        self._begun = -1
        self._committed = -1

    def __getitem__(self, row: int) -> Row:
        entry = self._rows[row]
        if entry is None:
            raise OutriderError(f"row {row} is planned but was never admitted")
        return entry

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's row changes. The first worker that sees a plan does it."""
        if plan.epoch < self._epoch:
            raise OutriderError(
                f"a plan of epoch {plan.epoch} came after one of epoch {self._epoch}: its engine "
                "has been replaced."
            )
        if plan.epoch > self._epoch:  # a new engine: drop the rows of the old one
            self._rows = [None] * len(self._rows)
            self._epoch, self._begun, self._committed = plan.epoch, -1, -1
        if plan.step <= self._begun:
            return
        self._begun = plan.step
        for row in plan.released:
            self._rows[row] = None
        for init in plan.admitted:
            self._rows[init.row] = Row(init)

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Replace all rows by these, as a worker that joins late does."""
        self._rows = [None] * len(self._rows)
        self._epoch, self._begun, self._committed = epoch, -1, -1
        for init in rows:
            self._rows[init.row] = Row(init)

    def is_current(self, row: int, generation: int) -> bool:
        entry = self._rows[row]
        return entry is not None and entry.init.generation == generation

    def commit(self, verdict: Verdict) -> None:
        """Append what the target committed. Idempotent: an old verdict changes nothing."""
        if verdict.epoch != self._epoch or verdict.step <= self._committed:
            return
        self._committed = verdict.step
        for row in verdict.rows:
            if self.is_current(row.row, row.generation):
                self._extend(row)

    def _extend(self, verdict: RowVerdict) -> None:
        tokens = self[verdict.row].tokens
        if verdict.base_len != len(tokens):
            raise OutriderError(
                f"row {verdict.row}: verdict at {verdict.base_len}, text is {len(tokens)} long"
            )
        tokens += verdict.tokens
