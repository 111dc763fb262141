"""What a draft rank computes on a CPU, or under rejection sampling: from the host's texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings
from outrider.scheduler.types import Agreement, AheadCounts, Proposal, RowInit, StepPlan, Verdict
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.packed_round import PackedRound, pack_round
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode
from outrider.workers.scratch_rows import ScratchRows

if TYPE_CHECKING:
    from outrider.workers.gpu.link_rings import LinkRings


class DraftWorker(Protocol):
    """Follows the text and drafts: a `DraftProposer`, or a fake."""

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None: ...

    def follow(self, plan: StepPlan) -> None: ...

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]: ...

    def observe(self, verdict: Verdict) -> None: ...

    def draft_ahead(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None: ...

    def take_ahead_counts(self) -> AheadCounts: ...

    def catch_up(self) -> None: ...

    def take_agreements(self) -> tuple[Agreement, ...]: ...


class HostDraft:
    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    @classmethod
    def build(
        cls, runner: Runner, ops: Ops, settings: RankSettings, scratch: ScratchRows | None
    ) -> HostDraft:
        rows, verification = RowTable(runner.num_rows), verification_mode(settings.verification)
        return cls(DraftProposer(rows, runner, ops, verification, scratch))

    ring_shape = None

    def connect(self, rings: LinkRings | None) -> None:
        """Nothing: messages bring everything."""

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        self._draft.adopt(epoch, rows)

    def prepare(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None:
        self._draft.draft_ahead(plan, has_outcome)

    def follow(self, plan: StepPlan) -> None:
        self._draft.follow(plan)

    def propose(self, plan: StepPlan) -> PackedRound:
        return pack_round(plan, self._draft.propose(plan))

    def take_ahead_counts(self) -> AheadCounts:
        return self._draft.take_ahead_counts()

    def observe(self, outcome: PackedOutcome) -> None:
        self._draft.observe(outcome.verdict())

    def catch_up(self) -> tuple[float, tuple[Agreement, ...]]:
        start_s = time.perf_counter()
        self._draft.catch_up()
        agreements = self._draft.take_agreements()
        return time.perf_counter() - start_s, agreements
