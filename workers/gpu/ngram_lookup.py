"""n-gram lookup as a pass over the device's texts."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kernels.gpu.ngram import TrustTable, look_up
from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer

_SIZES = (1, 16, 64, 256)  # few: each row is a program of its own
_KERNELS = 1


class NgramLookupPasses(DeviceProposer):
    """The device's counterpart of `outrider.workers.proposers.ngram`."""

    def __init__(self, context: DeviceContext) -> None:
        self._state = context.state
        self._plan = context.entries
        self._settings = context.settings
        num_rows, device = context.sizes.rows, context.state.text.lengths.device
        self._trust = TrustTable.create(num_rows, device)
        sizes = [size for size in _SIZES if size < num_rows] + [num_rows]
        self._round = CapturedPasses(self._look_up, sizes, device, _KERNELS)

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        return [self._round]

    def begin(self, row: int) -> None:
        self._trust.begin(row)

    def draft(self, counts: Sequence[int]) -> None:
        self._round.run(counts[0])

    def _look_up(self, num_rows: int) -> None:
        settings, state = self._settings, self._state
        look_up(
            self._plan.entries[:, :num_rows],
            self._plan.totals,
            state.text,
            self._trust,
            state.confidences,
            settings.ngram_min,
            settings.ngram_max,
        )
