"""A target rank: receives the proposals of a plan, verifies, and on rank 0 sends the verdict."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from outrider.errors import OutriderError
from outrider.kernels.ops import Ops
from outrider.links.channel import Channel
from outrider.links.rank_messages import AwaitingDraft, Join, RankSettings, StepPlans, VerifyResult
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.trace import TracedMethod
from outrider.workers.groups.collective import Collective
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.base import ProposerContext, Proposers, ProposerSettings
from outrider.workers.proposers.registry import build_proposers
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.mailbox import NO_ROUND, TargetMailbox
from outrider.workers.ranks.proposal_link import LinkOpener
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode
from outrider.workers.target import LocalTarget

logger = logging.getLogger(__name__)


class TargetPass(Protocol):
    """Verifies a plan: a `LocalTarget`, or a fake."""

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict: ...


def build_target(
    runner: Runner, head: HeadRunner | None, ops: Ops, settings: RankSettings
) -> tuple[LocalTarget, Proposers]:
    """What a target rank computes: the pass, and proposals without a draft model."""
    rows, verification = RowTable(runner.num_rows), verification_mode(settings.verification)
    own = ProposerSettings(settings.ngram_min, settings.ngram_max)
    context = ProposerContext(rows, own, ops, verification, head=head)
    return LocalTarget(rows, runner, ops, verification), build_proposers(context)


class TargetRank:
    """All ranks of the group run this in lockstep; they agree because each has the same data.

    Proposers without a model run here, in every rank: they depend on the text alone. So does a
    head: hidden states are the same in all ranks, bit for bit.
    """

    def __init__(
        self,
        channel: Channel,
        inbox: RankInbox,
        group: Collective,
        links: LinkOpener,
        worker: TargetPass,
        proposers: Proposers,
    ) -> None:
        self._channel = channel
        self._is_first = group.rank == 0
        self._links = links
        self._worker = worker
        self._proposers = proposers
        self._mailbox = TargetMailbox(group, inbox, links.device, self._report_long_wait)

    def traced_methods(self) -> list[TracedMethod]:
        return [
            TracedMethod(self._mailbox, "take", "wait for proposals"),
            TracedMethod(self._worker, "verify", "verify"),
            TracedMethod(self._mailbox, "end", "send outcome"),
            TracedMethod(self._channel, "send", "send verdict"),
        ]

    def handle(self, message: object) -> None:
        if isinstance(message, StepPlans):
            for plan in message.plans:
                self._verify(plan, message.link)
        elif isinstance(message, Join):
            # In a thread: joining a new draft takes a while, and it may die again.
            threading.Thread(target=self._join, args=(message.number,), daemon=True).start()
        else:
            raise OutriderError(f"a target rank cannot handle {type(message).__name__}")

    def _verify(self, plan: StepPlan, link: int) -> None:
        mailbox = self._mailbox
        mailbox.use(link)
        mailbox.begin(plan)
        own = self._proposers.propose(plan)
        drafted = mailbox.take(plan) if link and plan.has_round else NO_ROUND
        ticket = Ticket(
            plan.step,
            {**own.proposals, **drafted.proposals},
            own.draft_s + drafted.draft_s + drafted.transfer_s,
            agreements=own.agreements,
        )
        verdict = self._worker.verify(plan, ticket)
        mailbox.end(plan, verdict)  # first: the draft may wait for it
        if self._is_first:
            is_lost = mailbox.has_lost_link
            self._channel.send(VerifyResult(verdict, is_lost, drafted.transfer_s))
        self._proposers.observe(verdict)  # after the verdict: a head's extension delays no token

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
