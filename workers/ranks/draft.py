"""A draft rank: follows the text and drafts; the first rank sends and announces the round. Catch-up
comes after that, in parallel with the target's pass."""

from __future__ import annotations

import time

from outrider.errors import OutriderError
from outrider.kernels.ops import Ops
from outrider.links.channel import Channel
from outrider.links.rank_messages import (
    Adopt,
    CatchUpReport,
    DraftGroupJoined,
    DraftResult,
    Join,
    Propose,
    RankSettings,
)
from outrider.workers.groups.collective import Collective
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.ranks.proposal_link import ProposalLink
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode


class DraftRank:
    """Its rows come from `Adopt` and later plans; its texts from those and the verdicts."""

    def __init__(
        self,
        channel: Channel,
        group: Collective,
        store: LinkStore,
        runner: Runner,
        ops: Ops,
        settings: RankSettings,
    ) -> None:
        rows = RowTable(runner.num_rows)
        self._channel = channel
        self._is_first = group.rank == 0
        self._store = store
        self._device = runner.device
        self._draft = DraftProposer(rows, runner, ops, verification_mode(settings.verification))
        self._transfer_timeout_s = settings.transfer_timeout_s
        self._link: ProposalLink | None = None

    def handle(self, message: object) -> None:
        if isinstance(message, Propose):
            self._propose(message)
        elif isinstance(message, Adopt):
            self._draft.adopt(message.epoch, message.rows)
        elif isinstance(message, Join):
            self._join(message)
        else:
            raise OutriderError(f"a draft rank cannot handle {type(message).__name__}")

    def _propose(self, message: Propose) -> None:
        start_s = time.perf_counter()
        for past in message.past:
            if past.plan is not None:
                self._draft.follow(past.plan)
            if past.verdict is not None:
                self._draft.observe(past.verdict)
        plan = message.plan
        if plan is None:
            return
        self._draft.follow(plan)
        proposals = self._draft.propose(plan)
        if self._is_first and message.round is not None:
            assert self._link is not None, "a round is requested before the proposal group exists"
            # Post before announcing: the process that the message wakes may take this core.
            self._link.send(plan, message.round, proposals)
            draft_s = time.perf_counter() - start_s
            self._channel.send(DraftResult(message.round, draft_s, self._link.num_sends))
        if any(row.draft_tokens and not row.depth for row in plan.rows):
            self._catch_up()

    def _catch_up(self) -> None:
        start_s = time.perf_counter()
        self._draft.catch_up()
        agreements = self._draft.take_agreements()
        if self._is_first:
            self._channel.send(CatchUpReport(time.perf_counter() - start_s, agreements))

    def _join(self, message: Join) -> None:
        self._link = ProposalLink(
            self._store,
            message.number,
            self._device,
            self._transfer_timeout_s,
            is_target=False,
        )
        self._link.greet()
        self._channel.send(DraftGroupJoined(self._link.backend))
