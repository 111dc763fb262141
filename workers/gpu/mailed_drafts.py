"""Drafts that another process sends: the host copies them where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.scheduler.types import StepPlan
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer
from outrider.workers.ranks.packed_round import RoundArrays, drafted_rows

NO_DRAFT = -2
"""In the place of a draft token that was not sent: no target chooses it."""


class MailedDrafts(DeviceProposer):
    """Stands for a draft model in a rank of its own."""

    def __init__(self, context: DeviceContext) -> None:
        self._state = context.state
        self._shape = tuple(self._state.text.drafts.shape)
        self.offered: dict[int, int] = {}
        """By row: how many drafts the last round has, where it is fewer than planned."""

    def draft(self, counts: Sequence[int]) -> None:
        """Nothing to do: `put` has."""

    def put(self, plan: StepPlan, drafted: RoundArrays | None) -> None:
        """Enqueue the copy of the plan's round; None: it is lost. Drafts of other rows are void, so
        call it before other proposers draft."""
        tokens = np.full(self._shape, NO_DRAFT, dtype=np.int32)
        confidences = np.zeros(self._shape, dtype=np.float32)
        self.offered = {}
        if drafted is None:
            self.offered = {row.row: 0 for row in drafted_rows(plan)}
        else:
            depth = drafted.tokens.shape[1]
            is_there = np.arange(depth) < drafted.counts[:, None]
            tokens[drafted.rows, :depth] = np.where(is_there, drafted.tokens, NO_DRAFT)
            confidences[drafted.rows, :depth] = np.where(is_there, drafted.confidences, 0)
            self._note_fewer(plan, drafted)
        self._state.set_drafts(torch.from_numpy(tokens), torch.from_numpy(confidences))

    def _note_fewer(self, plan: StepPlan, drafted: RoundArrays) -> None:
        planned = drafted_rows(plan)
        depths = [row.depth for row in planned]
        rows, counts = drafted.rows.tolist(), drafted.counts.tolist()
        if rows == [row.row for row in planned] and counts == depths:
            return
        found = dict(zip(rows, counts, strict=True))
        self.offered = {
            row.row: found.get(row.row, 0) for row in planned if found.get(row.row, 0) != row.depth
        }
