"""Target and draft in other processes, behind the protocols of the step loop."""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections import deque
from collections.abc import Callable

from outrider.engine.patience import Patience
from outrider.engine.rank_group import TRANSFER_SHARE, RankError, RankGroup
from outrider.errors import EngineDeadError, OutriderError
from outrider.links.rank_messages import Adopt, Drafted, Judged, Past, Propose, Verify
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Outcome, ProposerKind, StepPlan, Verdict
from outrider.workers.proposers.base import Ticket

logger = logging.getLogger(__name__)

_MOST_IN_FLIGHT = 2
_MOST_PAST = 64  # plans and verdicts kept back from an idle draft before it is told of them


class RemoteTarget:
    """Sends a plan to all target ranks; the first one's verdict counts. Without it nothing goes on,
    so a rank that is lost, or hangs, ends the engine."""

    def __init__(
        self, group: RankGroup, on_lost_round: Callable[[], None], stall_timeout_s: float
    ) -> None:
        self.group = group
        self._on_lost_round = on_lost_round
        self._patience = Patience(stall_timeout_s)
        # A round is up to two transfers, and the draft may hang in the middle of it.
        self._round_s = 2 * TRANSFER_SHARE * stall_timeout_s

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        num_tokens = sum(row.num_tokens + row.depth for row in plan.rows)
        limit_s = self._patience.limit_s(num_tokens)
        if ticket.round is not None:
            limit_s += self._round_s
        start_s = time.monotonic()
        try:
            self.group.send(Verify(plan, ticket.round, ticket.draft_s))
            judged = self.group.answer(limit_s)
        except RankError as error:
            raise EngineDeadError(str(error)) from error
        self._patience.learn(num_tokens, time.monotonic() - start_s)
        if not isinstance(judged, Judged):
            raise OutriderError(f"the target sent {type(judged).__name__} where a verdict was due")
        if judged.lost_round:
            self._on_lost_round()
        return judged.verdict


class RemoteDraft:
    """A draft group that may go and come back; see `ProposalSource` in `outrider.engine.step`.

    Rounds are announced before the target is told to receive them, so a dead draft is noticed
    here and the target never waits for it. What a draft need not know at once is kept back: a
    plan without drafts costs it nothing.
    """

    def __init__(self, on_lost: Callable[[str], None], stall_timeout_s: float) -> None:
        self.num_losses = 0
        self.num_sends = 0
        self.group: RankGroup | None = None
        self._on_lost = on_lost
        self._stall_timeout_s = stall_timeout_s
        self._patience = Patience(stall_timeout_s)  # with the present group
        self._num_tokens = 0  # it was told to compute since its last answer
        self._arrivals: queue.SimpleQueue[RankGroup] = queue.SimpleQueue()
        self._past: list[Past] = []
        self._last_verdicts: deque[Verdict] = deque(maxlen=_MOST_IN_FLIGHT)

    def join(self, group: RankGroup) -> None:
        """A started group, its proposal link standing, takes part from the next plan on."""
        self._arrivals.put(group)

    def sync(self, scheduler: Scheduler) -> None:
        try:
            group = self._arrivals.get_nowait()
        except queue.Empty:
            if self.group is None and scheduler.has_draft:
                scheduler.lose_draft()
            return
        self._welcome(group, scheduler)

    def _welcome(self, group: RankGroup, scheduler: Scheduler) -> None:
        if scheduler.has_draft:
            scheduler.lose_draft()
        if self.group is not None:  # replaced before its loss was noticed
            self.group.close()
        self.num_sends = 0
        self.group = group
        self._patience = Patience(self._stall_timeout_s)
        self._num_tokens = 0
        rows = scheduler.regain_draft()
        # The rows' texts are as applied; verdicts that are known but not applied come after them.
        first = len(self._last_verdicts) - scheduler.num_in_flight
        self._past = [Past(None, verdict) for verdict in list(self._last_verdicts)[first:]]
        self._tell(Adopt(scheduler.epoch, rows))

    def check(self) -> None:
        """Notice a loss while nothing is drafted."""
        if self.group is not None:
            try:
                self.group.check()
            except RankError as error:
                self._lose(error)

    def give_up(self) -> None:
        """Its proposals do not reach the target: whatever the reason, it has to start anew."""
        if self.group is not None:
            self._lose(RankError("its announced proposals did not arrive."))

    def propose(self, plan: StepPlan) -> Ticket:
        if self.group is None:
            return Ticket(plan.step)
        if not any(row.draft_tokens for row in plan.rows):
            self._note(Past(plan, None))
            return Ticket(plan.step)
        past, self._past = tuple(self._past), []
        self._num_tokens += sum(row.draft_tokens + row.depth for row in plan.rows)
        self._tell(Propose(past, plan))
        if any(row.proposer is ProposerKind.DRAFT for row in plan.rows):
            return self._await_round(plan)
        return Ticket(plan.step)  # it only catches up, beside the target's own pass

    def observe(self, outcome: Outcome) -> None:
        verdict = _without_logprobs(outcome.wait())
        self._last_verdicts.append(verdict)
        if self.group is not None:
            self._note(Past(None, verdict))

    def _await_round(self, plan: StepPlan) -> Ticket:
        if self.group is None:
            return Ticket(plan.step)
        start_s = time.monotonic()
        try:
            drafted = self.group.answer(self._patience.limit_s(self._num_tokens))
            if not isinstance(drafted, Drafted) or drafted.step != plan.step:
                raise RankError(f"it sent {drafted!r:.200} where round {plan.step} was due.")
        except RankError as error:
            self._lose(error)
            return Ticket(plan.step)
        self._patience.learn(self._num_tokens, time.monotonic() - start_s)
        self._num_tokens = 0
        self.num_sends = drafted.num_sends
        return Ticket(plan.step, draft_s=drafted.draft_s, round=drafted.step)

    def _note(self, past: Past) -> None:
        self._past.append(past)
        if len(self._past) >= _MOST_PAST:
            self._tell(Propose(tuple(self._past), None))
            self._past = []

    def _tell(self, message: object) -> None:
        assert self.group is not None
        try:
            self.group.send(message)
        except RankError as error:
            self._lose(error)

    def _lose(self, error: RankError) -> None:
        assert self.group is not None
        logger.warning("decoding goes on without the draft: %s", error)
        self.group.close()
        self.group = None
        self.num_losses += 1
        self._past = []
        self._on_lost(str(error))


def _without_logprobs(verdict: Verdict) -> Verdict:
    """What a draft needs of a verdict; log-probabilities are most of one that has them."""
    if not any(row.logprobs or row.prompt_logprobs for row in verdict.rows):
        return verdict
    rows = tuple(row._replace(logprobs=(), prompt_logprobs=()) for row in verdict.rows)
    return dataclasses.replace(verdict, rows=rows)
