"""A draft rank: follows the text, drafts and sends its proposals to the target.

Catch-up comes after that, in parallel with the target's pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.errors import OutriderError
from outrider.links.channel import Channel
from outrider.links.rank_messages import Adopt, DraftGroupJoined, DraftReport, Join, StepPlans
from outrider.scheduler.types import Agreement, AheadCounts, RowInit, StepPlan
from outrider.trace import TracedMethod
from outrider.workers.groups.collective import Collective
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.mailbox import DraftMailbox
from outrider.workers.ranks.outcome_batches import OutcomeBatches
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.packed_round import PackedRound
from outrider.workers.ranks.proposal_link import LinkOpener

if TYPE_CHECKING:
    from outrider.workers.gpu.link_rings import LinkRings, RingShape


class DraftRankWorker(Protocol):
    """Follows the text and drafts: `HostDraft`, or `DeviceDraft` on a GPU."""

    @property
    def ring_shape(self) -> RingShape | None:
        """Of the memory that its device can share with the target's; None: it cannot."""
        ...

    def connect(self, rings: LinkRings | None) -> None:
        """Share this memory from the next step on; None: none."""
        ...

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None: ...

    def prepare(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None:
        """The one outcome that is missing before this plan is that of the plan before: do what can
        be done ahead of it, until it is there."""
        ...

    def follow(self, plan: StepPlan) -> None: ...

    def propose(self, plan: StepPlan) -> PackedRound: ...

    def take_ahead_counts(self) -> AheadCounts:
        """What drafting ahead came to since the last call."""
        ...

    def observe(self, outcome: PackedOutcome) -> None: ...

    def catch_up(self) -> tuple[float, tuple[Agreement, ...]]:
        """Compute what the last plan deferred; the seconds it took, and replayed acceptance."""
        ...


class DraftRank:
    """Its rows come from `Adopt` and later plans; its texts from those and the outcomes."""

    def __init__(
        self,
        channel: Channel,
        inbox: RankInbox,
        group: Collective,
        links: LinkOpener,
        worker: DraftRankWorker,
    ) -> None:
        self._channel = channel
        self._is_first = group.rank == 0
        self._links = links
        self._worker = worker
        self._mailbox = DraftMailbox(group, inbox, links.device)
        self._outcomes: OutcomeBatches[StepPlan] = OutcomeBatches()
        self._is_alone = group.size == 1  # else outcomes come in a collective, behind all else
        self._num_due = 0  # batches of outcomes that the target sends without being asked
        self._has_drafted = False  # in the last plan, so that its outcome comes alone
        self._has_caught_up = False  # in the last plan

    def traced_methods(self) -> list[TracedMethod]:
        return [
            TracedMethod(self._worker, "prepare", "prepare"),
            TracedMethod(self._worker, "propose", "draft"),
            TracedMethod(self._mailbox, "post", "send proposals"),
        ]

    def handle(self, message: object) -> None:
        if isinstance(message, StepPlans):
            for plan in message.plans:
                self._step(plan)
        elif isinstance(message, Adopt):
            self._worker.adopt(message.epoch, message.rows)
        elif isinstance(message, Join):
            link = self._links.dial(message.number)
            self._mailbox.use(link)
            self._worker.connect(link.rings)
            self._channel.send(DraftGroupJoined(link.backend))
        else:
            raise OutriderError(f"a draft rank cannot handle {type(message).__name__}")

    def _step(self, plan: StepPlan) -> None:
        uses_draft = plan.uses_draft
        self._num_due += bool(self._outcomes.before(uses_draft=uses_draft))
        if uses_draft:
            if self._has_drafted and self._is_alone:
                self._worker.prepare(plan, self._mailbox.has_outcome)
            self._observe_outcomes()
        start_s = time.perf_counter()
        self._worker.follow(plan)
        if uses_draft:
            drafted = self._worker.propose(plan)
            if plan.has_round:
                draft_s = time.perf_counter() - start_s
                self._mailbox.post(plan, drafted, draft_s, self._worker.take_ahead_counts())
            if plan.catches_up:
                self._catch_up(plan.step)
        self._has_drafted = uses_draft
        if self._outcomes.after(plan, uses_draft=uses_draft):
            self._num_due += 1
            if not uses_draft:
                self._observe_outcomes()

    def _observe_outcomes(self) -> None:
        for _ in range(self._num_due):
            for outcome in self._mailbox.receive(has_caught_up=self._has_caught_up):
                self._worker.observe(outcome)
        self._num_due = 0
        self._has_caught_up = False

    def _catch_up(self, step: int) -> None:
        caught_up_s, agreements = self._worker.catch_up()
        self._has_caught_up = True
        if self._is_first:
            self._channel.send(DraftReport(step, caught_up_s, agreements))
