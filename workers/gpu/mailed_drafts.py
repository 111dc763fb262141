"""Drafts that another process sends: the host copies them where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from outrider.scheduler.types import StepPlan
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer
from outrider.workers.gpu.stream_word import StreamWord
from outrider.workers.ranks.packed_round import RoundArrays, drafted_rows

NO_DRAFT = -2
"""In the place of a draft token that was not sent: no target chooses it."""

_NOT_MAILED = -3  # in the place of other proposers' drafts


class MailedDrafts(DeviceProposer):
    """Stands for a draft model in a rank of its own. A step may be enqueued before its round has
    come: `expect`, then `put`. The step before must have ended by then."""

    def __init__(self, context: DeviceContext) -> None:
        self._drafted = context.state.drafted
        self._word = StreamWord(self._drafted.device)
        is_cuda = self._drafted.is_cuda
        self._mail = torch.zeros_like(self._drafted)
        self._staged = torch.zeros(self._drafted.shape, dtype=torch.int32, pin_memory=is_cuda)
        self._tokens = self._staged[0].numpy()
        self._confidences = self._staged[1].view(torch.float32).numpy()
        self._is_expected = False
        self._take = CapturedPasses(lambda size: self._take_mail(), [1], self._drafted.device)

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        return [self._take]

    def draft(self, counts: Sequence[int]) -> None:
        """Nothing to do: the copy of the round is enqueued."""

    def expect(self) -> bool:
        """Enqueue the copy of a round that `put` has yet to bring; False if this device cannot
        wait."""
        if self._word.can_wait:
            self._word.wait()
            self._copy()
            self._is_expected = True
        return self._is_expected

    def put(self, plan: StepPlan, drafted: RoundArrays | None) -> Mapping[int, int]:
        """The plan's round; None: it is lost. Returns how many drafts a row has, by row, where it
        is fewer than planned."""
        counts: dict[int, int] = {}
        self._tokens[:] = _NOT_MAILED
        if drafted is not None:
            depth = drafted.tokens.shape[1]
            self._tokens[drafted.rows, :depth] = np.where(
                drafted.tokens < 0, NO_DRAFT, drafted.tokens
            )
            self._confidences[drafted.rows, :depth] = drafted.confidences
            counts = dict(zip(drafted.rows.tolist(), drafted.counts.tolist(), strict=True))
        found = [(row.row, counts.get(row.row, 0), row.depth) for row in drafted_rows(plan)]
        fewer = {row: count for row, count, depth in found if count < depth}
        for row, count in fewer.items():
            self._tokens[row, count:] = NO_DRAFT
            self._confidences[row, count:] = 0
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
        self._mail.copy_(self._staged, non_blocking=True)
        self._take.run(1)

    def _take_mail(self) -> None:
        is_mailed = self._mail[0] != _NOT_MAILED
        self._drafted.copy_(torch.where(is_mailed, self._mail, self._drafted))
