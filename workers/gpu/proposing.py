"""Proposers on the target's device: they write drafts where the target's pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.workers.gpu.plan_buffers import PassEntries, StepSizes
from outrider.workers.gpu.state import DeviceRows

if TYPE_CHECKING:
    from outrider.workers.recorded.recording import RecordedPasses
    from outrider.workers.runner import Runner


class DeviceProposer(Protocol):
    """Enqueues a round; nothing is waited for, and texts and lengths are those of the device."""

    @property
    def recordings(self) -> Sequence[RecordedPasses]:
        """What is to be recorded before the first step."""
        ...

    def draft(self, num_rows: int) -> None:
        """Write drafts of the first `num_rows` of its entries into the table of drafts."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What a device proposer may be built from. `draft` is there where a draft model is."""

    state: DeviceRows
    entries: PassEntries  # the rows of the step that are its own
    sizes: StepSizes
    draft: Runner | None = None
