"""A draft without tensors for a draft rank: it guesses a fake model's text, and checks that it
knows the text that it drafts from."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from outrider.catalog.proposers import DRAFT, kv_rule_of
from outrider.scheduler.types import (
    NONE_AHEAD,
    Agreement,
    AheadCounts,
    Proposal,
    RowInit,
    StepPlan,
    Verdict,
)
from outrider.testing.fake_kv import require, text_hashes
from outrider.testing.fake_model import FakeModel
from outrider.workers.rows import RowTable


class FakeDraft:
    """Each guess is right with probability `acceptance`; each call takes up to `delay_s`."""

    def __init__(
        self,
        model: FakeModel,
        num_rows: int,
        rng: random.Random,
        acceptance: float = 0.7,
        delay_s: float = 0.0,
    ) -> None:
        self._model = model
        self._rows = RowTable(num_rows)
        self._rng = rng
        self._acceptance = acceptance
        self._delay_s = delay_s
        self._computed: dict[int, int] = {}
        self._drafted: dict[int, int] = {}

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        self._rows.adopt(epoch, rows)
        self._computed = {init.row: init.draft_cached for init in rows}
        self._drafted = {}

    def follow(self, plan: StepPlan) -> None:
        self._rows.begin(plan)
        self._computed |= dict.fromkeys(plan.draft_released, 0)
        self._computed |= {init.row: init.draft_cached for init in plan.admitted}

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        self._pause()
        proposals: dict[int, Proposal] = {}
        for planned in plan.rows:
            if not planned.draft_tokens:
                continue
            row, tokens = planned.row, self._rows[planned.row].tokens
            self._computed[row] = min(self._computed[row] + planned.draft_tokens, len(tokens))
            if planned.depth:
                require(self._computed[row] == len(tokens), f"row {row} drafts without its text")
                guesses = self._guess(row, tokens, planned.depth)
                confidences = [0.5] * len(guesses)
                proposals[row] = Proposal(planned.generation, len(tokens), guesses, confidences)
                self._drafted[row] = len(guesses)
        return proposals

    def observe(self, verdict: Verdict) -> None:
        self._rows.commit(verdict)
        for row in verdict.rows:
            drafted = self._drafted.pop(row.row, None)
            if drafted is not None and self._rows.is_current(row.row, row.generation):
                terms = (row.base_len, 0, drafted, row.num_accepted, row.base_len)
                self._computed[row.row] = kv_rule_of(DRAFT)(*terms)

    def draft_ahead(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None:
        """Branches of a fake would change nothing; it is late for the outcome now and then."""
        if plan.num_branches and not has_outcome():
            self._pause()

    def take_ahead_counts(self) -> AheadCounts:
        return NONE_AHEAD

    def catch_up(self) -> None:
        self._pause()

    def take_agreements(self) -> tuple[Agreement, ...]:
        return ()

    def _guess(self, row: int, tokens: Sequence[int], depth: int) -> list[int]:
        text = text_hashes(tokens)[-1]
        right = self._model.continuation(text, self._rows[row].init.seed, depth)
        wrong = self._model.vocab_size - 1
        return [t if self._rng.random() < self._acceptance else wrong - t for t in right]

    def _pause(self) -> None:
        if self._delay_s and self._rng.random() < 0.5:
            time.sleep(self._rng.random() * self._delay_s)
