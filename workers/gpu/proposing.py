"""Proposers on the target's device: they write drafts where the target's pass reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.scheduler.types import StepPlan, Verdict
from outrider.workers.gpu.plan_buffers import PassEntries, PassShare, StepSizes
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.proposers.base import ProposerContext

if TYPE_CHECKING:
    from outrider.workers.cuda_graphs.captured_passes import CapturedPasses
    from outrider.workers.gpu.drafting import DraftRounds
    from outrider.workers.gpu.passes import TargetPasses
    from outrider.workers.sampling.rows import RowSampler


class LateResult(Protocol):
    """What a proposer computed after a step's outcome was enqueued. The step's verdict does not
    wait for it: that of a later step reports it, once its own work has ended."""

    def added_to(self, verdict: Verdict) -> Verdict: ...


class DeviceProposer(ABC):
    """Enqueues its work without waiting; texts and lengths are those on the device. Every proposer
    implements `draft`; the rest has defaults for those without such a part."""

    rounds: DraftRounds | None = None
    """Its rounds, to be timed; None: drafting costs nothing."""

    @property
    def captured_passes(self) -> Sequence[CapturedPasses]:
        """The passes to capture before the first step."""
        return ()

    def begin(self, row: int) -> None:
        """A new request takes the row: reset its state."""

    @abstractmethod
    def draft(self, counts: Sequence[int]) -> None:
        """Write the draft tokens of its entries, deepest first, into the table of drafts, and their
        confidences into theirs. The first `counts[j]` entries draft token j."""

    # -- state beside the target's -------------------------------------------------------------

    def after_target_pass(self, plan: StepPlan, num_tokens: int, num_logits: int) -> None:
        """The target's pass, of this many tokens and logits, and its outcome are enqueued: now
        `extend`, if the plan has rows to do it for."""

    def extend(self, num_tokens: int, num_logits: int) -> None:
        """Run what every such pass of the target needs; timed as part of it."""

    def take_late_results(self) -> Sequence[LateResult]:
        """Those no verdict has reported yet. All end before work enqueued from now on."""
        return ()

    # -- KV in the draft pool ------------------------------------------------------------------

    catch_up_pass: CapturedPasses | None = None
    """The pass over known text, to be timed."""

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Append blocks of the draft pool to the row's table, on the device and on the host."""

    def plan_catch_up(self, plan: StepPlan) -> PassShare:
        """The entries of the step's pass over known text of rows that do not draft."""
        return PassShare()

    def catch_up(self) -> None:
        """Enqueue what was planned; its entries are on the device."""


class NoDrafts(DeviceProposer):
    """In the place of a proposer with KV where there is none."""

    def draft(self, counts: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceContext(ProposerContext):
    """The inputs to build a device proposer: those of its counterpart on the host, and its places
    on the device."""

    samplers: Mapping[int, RowSampler]
    computed: dict[int, int]  # see `Proposer.computed`
    state: DeviceRows
    entries: PassEntries  # its own rows of the step
    catch_up: PassEntries  # rows that catch up, of a proposer with KV
    sizes: StepSizes
    passes: TargetPasses | None = None  # where there is a target
