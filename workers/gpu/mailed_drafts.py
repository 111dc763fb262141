"""Drafts that another rank sends: they are copied to where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.scheduler.types import StepPlan
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
from outrider.workers.gpu.link_rings import LinkRings
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer
from outrider.workers.gpu.readback import PinnedRing
from outrider.workers.ranks.packed_round import RoundArrays, drafted_rows

NO_DRAFT = -2
"""In the place of a draft token that was not sent: no target chooses it."""


class MailedDrafts(DeviceProposer):
    """Stands for a draft model in a rank of its own. A step may be enqueued before its round has
    come: `expect`, then `put`, by which the step before must have ended."""

    def __init__(self, context: DeviceContext) -> None:
        self._drafted = context.state.drafted
        device = self._drafted.device
        self._mail = torch.zeros_like(self._drafted)
        self._staged = PinnedRing(self._mail)
        # By row, whether the round has its drafts: others keep those of other proposers.
        self._is_mailed = torch.zeros(len(self._drafted[0]), 1, dtype=torch.int32, device=device)
        self._staged_rows = PinnedRing(self._is_mailed)
        self._expected: LinkRings | None = None
        self._take = CapturedPasses(lambda size: self._take_mail(), [1], device)

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        return [self._take]

    def draft(self, counts: Sequence[int]) -> None:
        """Nothing to do: the copy of the round is enqueued."""

    def expect(self, plan: StepPlan, rings: LinkRings) -> None:
        """Enqueue the copy of a round that the rings have yet to get, from `put` or a device."""
        self._select_rows(plan)
        rings.rounds.expect(plan.step, self._mail)
        self._take.run(1)
        self._expected = rings

    def put(self, plan: StepPlan, drafted: RoundArrays | None) -> Mapping[int, int]:
        """The plan's round; None: it is lost. Returns how many drafts a row has, by row, where it
        is fewer than planned."""
        found = {} if drafted is None else dict(zip(*_counts(drafted), strict=True))
        planned = {row.row: row.depth for row in drafted_rows(plan)}
        fewer = {row: found.get(row, 0) for row, depth in planned.items()}
        fewer = {row: count for row, count in fewer.items() if count < planned[row]}
        rings, self._expected = self._expected, None
        if rings is None:
            self._copy(plan, self._table(drafted, fewer))
        elif rings.is_shared and rings.rounds.has(plan.step):
            return {}  # from the draft's device
        else:
            rings.rounds.fill(plan.step, self._table(drafted, fewer))
        return fewer

    def _table(self, drafted: RoundArrays | None, fewer: Mapping[int, int]) -> NDArray[np.int32]:
        table = np.zeros(self._mail.shape, dtype=np.int32)
        tokens, confidences = table[0], table[1].view(np.float32)
        if drafted is not None:
            depth = drafted.tokens.shape[1]
            tokens[drafted.rows, :depth] = drafted.tokens
            confidences[drafted.rows, :depth] = drafted.confidences
        for row, count in fewer.items():
            tokens[row, count:] = NO_DRAFT
            confidences[row, count:] = 0
        return table

    def _copy(self, plan: StepPlan, table: NDArray[np.int32]) -> None:
        self._select_rows(plan)
        staged = self._staged.take()
        staged.numpy()[:] = table
        self._mail.copy_(staged, non_blocking=True)
        self._take.run(1)

    def _select_rows(self, plan: StepPlan) -> None:
        staged = self._staged_rows.take()
        staged.zero_()
        staged.numpy()[[row.row for row in drafted_rows(plan)]] = 1
        self._is_mailed.copy_(staged, non_blocking=True)

    def _take_mail(self) -> None:
        is_mailed = self._is_mailed != 0
        self._drafted.copy_(torch.where(is_mailed, self._mail, self._drafted))


def _counts(drafted: RoundArrays) -> tuple[list[int], list[int]]:
    return drafted.rows.tolist(), drafted.counts.tolist()
