"""Proposers on the target's device: they write drafts where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import ProposerSettings

if TYPE_CHECKING:
    from outrider.workers.gpu.passes import TargetPasses
    from outrider.workers.heads.runner import HeadRunner
    from outrider.workers.recorded.recording import RecordedPasses
    from outrider.workers.runner import Runner


class DeviceProposer(Protocol):
    """Enqueues a round; nothing is waited for, and texts and lengths are those of the device."""

    @property
    def recordings(self) -> Sequence[RecordedPasses]:
        """What is to be recorded before the first step."""
        ...

    def begin(self, row: int) -> None:
        """The row is somebody else's from now on."""
        ...

    def draft(self, counts: Sequence[int]) -> None:
        """Write drafts of its entries, deepest first, into the table of drafts, and how sure it is
        of each into that of confidences: the first `counts[j]` of them want draft j."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What a device proposer may be built from. `draft` is there where a draft model is, `head`
    where the target has one."""

    state: DeviceRows
    entries: PassEntries  # the rows of the step that are its own
    sizes: StepSizes
    settings: ProposerSettings
    passes: TargetPasses
    draft: Runner | None = None
    head: HeadRunner | None = None
