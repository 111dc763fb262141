"""Drafts that another process sends: the host copies them where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.scheduler.types import RowPlan, StepPlan
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer
from outrider.workers.gpu.stream_word import StreamWord
from outrider.workers.ranks.packed_round import RoundArrays, drafted_rows

NO_DRAFT = -2
"""In the place of a draft token that was not sent: no target chooses it."""


class MailedDrafts(DeviceProposer):
    """Stands for a draft model in a rank of its own. A step may be enqueued before its round has
    come: `expect`, then `put`. The step before must have ended by then."""

    def __init__(self, context: DeviceContext) -> None:
        self._drafted = context.state.drafted
        self._word = StreamWord(self._drafted.device)
        is_cuda = self._drafted.is_cuda
        self._staged = torch.zeros(self._drafted.shape, dtype=torch.int32, pin_memory=is_cuda)
        self._tokens = self._staged[0].numpy()
        self._confidences = self._staged[1].view(torch.float32).numpy()
        self._is_expected = False

    def draft(self, counts: Sequence[int]) -> None:
        """Nothing to do: the copy of the round is enqueued."""

    def expect(self) -> bool:
        """Enqueue the copy of a round that `put` has yet to bring; False if this device cannot
        wait. Call before other proposers draft: drafts of all rows are replaced."""
        if self._word.can_wait:
            self._word.wait()
            self._copy()
            self._is_expected = True
        return self._is_expected

    def put(self, plan: StepPlan, drafted: RoundArrays | None) -> Mapping[int, int]:
        """The plan's round; None: it is lost. Returns how many drafts a row has, by row, where it
        is fewer than planned."""
        planned = drafted_rows(plan)
        fewer: dict[int, int] = {}
        if drafted is None:
            fewer = {row.row: 0 for row in planned}
            self._tokens[list(fewer)] = NO_DRAFT
            self._confidences[list(fewer)] = 0
        else:
            depth = drafted.tokens.shape[1]
            self._tokens[drafted.rows, :depth] = drafted.tokens
            self._confidences[drafted.rows, :depth] = drafted.confidences
            fewer = self._void_missing(planned, drafted)
        if self._is_expected:
            self._is_expected = False
            self._word.release()
        else:
            self._copy()
        return fewer

    def release(self) -> None:
        """Let a step end whose round will not come."""
        self._word.release()

    def _copy(self) -> None:
        self._drafted.copy_(self._staged, non_blocking=True)

    def _void_missing(self, planned: Sequence[RowPlan], drafted: RoundArrays) -> dict[int, int]:
        rows, counts = drafted.rows.tolist(), drafted.counts.tolist()
        if rows == [row.row for row in planned] and counts == [row.depth for row in planned]:
            return {}
        found = dict(zip(rows, counts, strict=True))
        fewer: dict[int, int] = {}
        for row in planned:
            count = found.get(row.row, 0)
            if count < row.depth:
                fewer[row.row] = count
                self._tokens[row.row, count:] = NO_DRAFT
                self._confidences[row.row, count:] = 0
        return fewer
