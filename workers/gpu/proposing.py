"""Proposers on the target's device: they write drafts where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import ProposerSettings

if TYPE_CHECKING:
    from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
    from outrider.workers.gpu.passes import TargetPasses
    from outrider.workers.heads.runner import HeadRunner
    from outrider.workers.runner import Runner


class DeviceProposer(Protocol):
    """Enqueues a round without waiting; texts and lengths are those on the device."""

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        """The passes to capture before the first step."""
        ...

    def begin(self, row: int) -> None:
        """A new request takes the row: reset its state."""
        ...

    def draft(self, counts: Sequence[int]) -> None:
        """Write the draft tokens of its entries, deepest first, into the table of drafts, and their
        confidences into theirs. The first `counts[j]` entries draft token j."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """The inputs to build a device proposer. `draft` is set if there is a draft model, `head` if
    the target has a head."""

    state: DeviceRows
    entries: PassEntries  # its own rows of the step
    sizes: StepSizes
    settings: ProposerSettings
    passes: TargetPasses
    draft: Runner | None = None
    head: HeadRunner | None = None
