"""A target rank: receives the proposals of a plan, verifies, and on rank 0 sends the verdict."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.errors import OutriderError
from outrider.links.channel import Channel
from outrider.links.rank_messages import AwaitingDraft, Join, StepPlans, VerifyResult
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.trace import TracedMethod
from outrider.workers.groups.collective import Collective
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.mailbox import NO_ROUND, ReceivedRound, TargetMailbox
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.proposal_link import LinkOpener

if TYPE_CHECKING:
    from outrider.workers.gpu.link_rings import LinkRings, RingShape

logger = logging.getLogger(__name__)

_POLL_S = 20e-6


class StartedStep(Protocol):
    """A step of a target worker: done, or running on its device."""

    @property
    def is_done(self) -> bool: ...

    def outcome(self) -> PackedOutcome:
        """Wait; what the draft needs of the verdict."""
        ...

    def verdict(self) -> Verdict: ...


class TargetRankWorker(Protocol):
    """What a target rank computes: `HostTarget`, or `DeviceTarget` on a GPU."""

    @property
    def ring_shape(self) -> RingShape | None:
        """Of the memory that its device can share with the draft's; None: it cannot."""
        ...

    def connect(self, rings: LinkRings | None) -> None:
        """Share this memory from the next step on; None: none."""
        ...

    def begin(self, plan: StepPlan) -> Ticket:
        """Apply the plan's row changes; returns the proposals made without a draft model."""
        ...

    def verify(self, plan: StepPlan, own: Ticket, drafted: ReceivedRound) -> StartedStep: ...

    def observe(self, verdict: Verdict) -> None:
        """Called once the verdict is sent, so that what this does delays no token."""
        ...


class _Pending(NamedTuple):
    plan: StepPlan
    step: StartedStep
    drafted: ReceivedRound


class TargetRank:
    """All ranks of the group run this in lockstep; they agree because each has the same data.

    A step is enqueued while the one before it runs; on one GPU also one with a round, behind a wait
    for it. The outcome of the step before goes to the draft before anything else.
    """

    def __init__(
        self,
        channel: Channel,
        inbox: RankInbox,
        group: Collective,
        links: LinkOpener,
        worker: TargetRankWorker,
        vocab_size: int,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._is_first = group.rank == 0
        self._links = links
        self._worker = worker
        self._mailbox = TargetMailbox(
            group, inbox, links.device, vocab_size, self._report_long_wait
        )
        self._pending: deque[_Pending] = deque()

    def traced_methods(self) -> list[TracedMethod]:
        return [
            TracedMethod(self._worker, "begin", "begin"),
            TracedMethod(self._mailbox, "take", "wait for proposals"),
            TracedMethod(self._worker, "verify", "verify"),
            TracedMethod(self._mailbox, "end", "send outcome"),
            TracedMethod(self._channel, "send", "send verdict"),
        ]

    def handle(self, message: object) -> None:
        if isinstance(message, StepPlans):
            for plan in message.plans:
                self._start(plan, message.link)
        elif isinstance(message, Join):
            # In a thread: joining a new draft takes a while, and it may die again.
            threading.Thread(target=self._join, args=(message.number,), daemon=True).start()
        else:
            raise OutriderError(f"a target rank cannot handle {type(message).__name__}")
        self._settle_until_next()

    def _start(self, plan: StepPlan, link: int) -> None:
        mailbox, drafted = self._mailbox, NO_ROUND
        if mailbox.use(link) or mailbox.has_lost_link:
            self._worker.connect(mailbox.rings)
        own = self._worker.begin(plan)
        # The draft needs the outcome of the step before for this round.
        while self._pending and (plan.has_round or self._pending[0].step.is_done):
            self._settle_oldest()
        if not self._pending:
            mailbox.begin(plan)
        if link and plan.has_round:
            drafted = mailbox.take(plan)
        self._pending.append(_Pending(plan, self._worker.verify(plan, own, drafted), drafted))

    def _settle_until_next(self) -> None:
        """Settle steps as they end, until the engine sends another message."""
        while self._pending:
            if self._pending[0].step.is_done:
                self._settle_oldest()
            elif self._inbox.has_message():
                return
            else:
                time.sleep(_POLL_S)

    def _settle_oldest(self) -> None:
        plan, step, drafted = self._pending.popleft()
        self._mailbox.end(plan, step.outcome())  # first: the draft may wait for it
        if self._pending:  # now the draft can have all outcomes before the next step
            self._mailbox.begin(self._pending[0].plan)
        verdict = step.verdict()
        if self._is_first:
            waited_s = drafted.draft_s + drafted.transfer_s
            timed = replace(verdict, draft_s=verdict.draft_s + waited_s)
            is_lost = self._mailbox.has_lost_link
            self._channel.send(VerifyResult(timed, is_lost, drafted.transfer_s, drafted.ahead))
        self._worker.observe(verdict)

    def _report_long_wait(self, step: int) -> None:
        """So that the engine sees whether the draft hangs."""
        if self._is_first:
            self._channel.send(AwaitingDraft(step))

    def _join(self, number: int) -> None:
        try:
            self._mailbox.add(self._links.listen(number))
        except (
            OutriderError,
            RuntimeError,
            OSError,
        ) as error:  # the engine hears of it from the draft
            logger.warning("cannot open proposal link %d: %s", number, error)
