"""A target rank: receives the proposals of a plan, verifies, and on rank 0 sends the verdict."""

from __future__ import annotations

import logging
import threading
import time

from outrider.errors import OutriderError
from outrider.kernels.ops import Ops
from outrider.links.channel import Channel
from outrider.links.rank_messages import Join, RankSettings, Verify, VerifyResult
from outrider.scheduler.types import Ticket
from outrider.workers.groups.collective import Collective
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.base import ProposerContext, ProposerSettings
from outrider.workers.proposers.registry import build_proposers
from outrider.workers.ranks.proposal_link import ProposalInbox, ProposalLink
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode
from outrider.workers.target import LocalTarget

logger = logging.getLogger(__name__)


class TargetRank:
    """All ranks of the group run this in lockstep; they agree because each has the same data.

    Proposers without a model run here, in every rank: they depend on the text alone. So does a
    head: hidden states are the same in all ranks, bit for bit.
    """

    def __init__(
        self,
        channel: Channel,
        group: Collective,
        store: LinkStore,
        runner: Runner,
        head: HeadRunner | None,
        ops: Ops,
        settings: RankSettings,
    ) -> None:
        rows = RowTable(runner.num_rows)
        self._channel = channel
        self._is_first = group.rank == 0
        self._store = store
        self._device = runner.device
        self._transfer_timeout_s = settings.transfer_timeout_s
        verification = verification_mode(settings.verification)
        self._worker = LocalTarget(rows, runner, ops, verification)
        own = ProposerSettings(settings.ngram_min, settings.ngram_max)
        context = ProposerContext(rows, own, ops, verification, head=head)
        self._proposers = build_proposers(context)
        self._inbox = ProposalInbox(group, runner.device)

    def handle(self, message: object) -> None:
        if isinstance(message, Verify):
            self._verify(message)
        elif isinstance(message, Join):
            # In a thread: joining a new draft takes a while, and it may die again.
            threading.Thread(target=self._join, args=(message.number,), daemon=True).start()
        else:
            raise OutriderError(f"a target rank cannot handle {type(message).__name__}")

    def _verify(self, message: Verify) -> None:
        own = self._proposers.propose(message.plan)
        proposals = dict(own.proposals)
        drafted, transfer_s = None, 0.0
        if message.round is not None:
            start_s = time.perf_counter()
            drafted = self._inbox.take(message.plan, message.round)
            transfer_s = time.perf_counter() - start_s
            proposals |= drafted or {}
        draft_s = message.draft_s + transfer_s
        ticket = Ticket(message.plan.step, proposals, draft_s, agreements=own.agreements)
        verdict = self._worker.verify(message.plan, ticket)
        if self._is_first:
            is_lost = message.round is not None and drafted is None
            self._channel.send(VerifyResult(verdict, is_lost, transfer_s))
        self._proposers.observe(verdict)  # after the verdict: a head's extension delays no token

    def _join(self, number: int) -> None:
        try:
            link = ProposalLink(
                self._store, number, self._device, self._transfer_timeout_s, is_target=True
            )
            self._inbox.connect(link)  # before the greeting: after it the draft announces rounds
            link.await_greeting()
        except RuntimeError as error:  # the draft died again: its link tells the engine
            logger.warning("cannot form proposal group %d: %s", number, error)
