"""Target and draft in other processes, behind the step loop's protocols."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from outrider.catalog.proposers import DRAFT
from outrider.engine.rank_group import TRANSFER_SHARE, RankError, RankGroup
from outrider.errors import EngineDeadError, OutriderError
from outrider.links.rank_messages import (
    Adopt,
    CatchUpReport,
    DraftResult,
    PastStep,
    Propose,
    Verify,
    VerifyResult,
)
from outrider.scheduler.types import (
    Agreement,
    DraftEvent,
    Outcome,
    PendingVerdict,
    RowInit,
    StepPlan,
    Ticket,
    Verdict,
)

logger = logging.getLogger(__name__)

_MAX_PAST_STEPS = 64  # plans and verdicts batched before they are sent to an idle draft
_MARGIN = 10.0  # times the slowest comparable step
_DECAY = 0.9  # per step, of the slowest time: a compilation must not count for long
_FIRST_FACTOR = 10.0  # times `min_s`, for the first step of a size: kernels may be compiled
_UNKNOWN_TOKEN_S = 1.0  # per token of the very first step


class StepTimeout:
    """How long the engine waits for the answer to a step before it declares a rank hung.

    A rank whose main thread hangs still sends heartbeats from another thread, so only the missing
    answer shows it. The timeout follows from the duration of steps of similar size, and is at least
    `min_s`.
    """

    def __init__(self, min_s: float) -> None:
        self._min_s = min_s
        self._slowest_s: dict[int, float] = {}  # by size, a power of two of tokens
        self._token_s = 0.0  # the longest time per token, in a step of any size

    def limit_s(self, num_tokens: int) -> float:
        slowest_s = self._slowest_s.get(num_tokens.bit_length())
        if slowest_s is not None:
            return self._min_s + _MARGIN * slowest_s
        return _FIRST_FACTOR * self._min_s + num_tokens * (self._token_s or _UNKNOWN_TOKEN_S)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step of that many tokens took."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, _DECAY * self._slowest_s.get(size, 0.0))
        self._token_s = max(self._token_s, seconds / max(num_tokens, 1))


class RemoteTarget:
    """Sends each plan to all target ranks and takes the first rank's verdict. A target rank that
    is lost or hangs ends the engine."""

    lag = 1  # the ranks run a pass while the next is planned and sent
    max_depth: int | None = None

    def __init__(
        self, group: RankGroup, on_lost_round: Callable[[], None], stall_timeout_s: float
    ) -> None:
        self.group = group
        self._on_lost_round = on_lost_round
        self._timeout = StepTimeout(stall_timeout_s)
        # A round is up to two transfers, and the draft may hang during it.
        self._round_s = 2 * TRANSFER_SHARE * stall_timeout_s
        self._read_s = 0.0  # time of the last verdict
        self.transfer_s = 0.0  # that the ranks waited for draft tokens in transfer

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome:
        """Ranks run plans in order, so the next may be sent before this one's verdict is read."""
        num_tokens = sum(row.pass_tokens for row in plan.rows)
        round_s = 0.0 if ticket.round is None else self._round_s
        sent_s = time.monotonic()
        try:
            self.group.send(Verify(plan, ticket.round, ticket.draft_s))
        except RankError as error:
            raise EngineDeadError(str(error)) from error
        return PendingVerdict(
            lambda: _with_agreements(self._read(num_tokens, sent_s, round_s), ticket.agreements)
        )

    def _read(self, num_tokens: int, sent_s: float, round_s: float) -> Verdict:
        # The ranks start a plan when the one before it is done.
        start_s = max(sent_s, self._read_s)
        try:
            result = self.group.answer(self._timeout.limit_s(num_tokens) + round_s)
        except RankError as error:
            raise EngineDeadError(str(error)) from error
        self._read_s = time.monotonic()
        self._timeout.learn(num_tokens, self._read_s - start_s)
        if not isinstance(result, VerifyResult):
            raise OutriderError(f"the target sent {type(result).__name__} where a verdict was due")
        self.transfer_s += result.transfer_s
        if result.lost_round:
            self._on_lost_round()
        return result.verdict


class RemoteDraft:
    """A draft group that may be lost and rejoin; see `ProposalSource` in `outrider.engine.step`.

    The draft announces a round before the target gets the plan to receive it, so a dead draft is
    normally detected here; the target waits only for an announced transfer, up to a time limit.
    Plans without draft tokens are batched and sent later: they cost the draft nothing.
    """

    def __init__(self, on_lost: Callable[[str], None], stall_timeout_s: float) -> None:
        self.num_losses = 0
        self.num_sends = 0
        self.group: RankGroup | None = None
        self._on_lost = on_lost
        self._stall_timeout_s = stall_timeout_s
        self._timeout = StepTimeout(stall_timeout_s)  # of the present group
        self._catching_up: deque[int] = deque()  # tokens to catch up on, by plan, unanswered yet
        self._caught_up_s = 0.0  # reported since the last ticket, with the agreements
        self._agreements: tuple[Agreement, ...] = ()
        self._arrivals: queue.SimpleQueue[RankGroup] = queue.SimpleQueue()
        self._is_joined = True  # as far as the step loop knows; it starts so
        self._past: list[PastStep] = []
        self._round = 0  # of drafts, counted over all groups

    def join(self, group: RankGroup) -> None:
        """A started group, connected to the target, takes part from the next plan on."""
        self._arrivals.put(group)

    def events(self) -> Sequence[DraftEvent]:
        arrival = None
        with contextlib.suppress(queue.Empty):
            arrival = self._arrivals.get_nowait()
        events = []
        if self._is_joined and (arrival is not None or self.group is None):
            self._is_joined = False
            events.append(DraftEvent.LOST)
        if arrival is not None:
            if self.group is not None:  # replaced before its loss was noticed
                self.group.close()
            self.num_sends = 0
            self.group = arrival
            self._timeout = StepTimeout(self._stall_timeout_s)
            self._catching_up.clear()
            self._is_joined = True
            events.append(DraftEvent.JOINED)
        return events

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Send the rows as of the last applied verdict; later verdicts follow."""
        self._past = []
        if self.group is not None:
            self._send(Adopt(epoch, tuple(rows)))

    def needs_verdicts(self, plan: StepPlan) -> bool:
        """To draft it must know where each text ends; to catch up it needs applied tokens only."""
        return self.group is not None and _has_round(plan)

    def check(self) -> None:
        """Detect a loss while nothing is drafted."""
        self._poll()
        if self.group is not None:
            try:
                self.group.check()
            except RankError as error:
                self._lose(error)

    def give_up(self) -> None:
        """Its draft tokens do not reach the target, so it must be restarted."""
        if self.group is not None:
            self._lose(RankError("its announced draft tokens did not arrive."))

    def propose(self, plan: StepPlan) -> Ticket:
        self._poll()
        if self.group is None:
            return self._ticket(plan)
        if not any(row.draft_tokens for row in plan.rows):
            self._note(PastStep(plan, None))
            return self._ticket(plan)
        past, self._past = tuple(self._past), []
        later = sum(row.draft_tokens for row in plan.rows if not row.depth)
        if not _has_round(plan):  # it only catches up, during the target's pass
            self._send(Propose(past, plan), later)
            return self._ticket(plan)
        self._round += 1
        own = sum(row.draft_tokens + row.depth for row in plan.rows if row.depth)
        num_tokens = sum(self._catching_up) + own
        self._send(Propose(past, plan, self._round), later)
        drafted = self._await_round(num_tokens)
        if drafted is None:
            return self._ticket(plan)
        self.num_sends = drafted.num_sends
        return self._ticket(plan, drafted)

    def observe(self, verdict: Verdict) -> None:
        if self.group is not None:
            self._note(PastStep(None, _without_logprobs(verdict)))

    def _await_round(self, num_tokens: int) -> DraftResult | None:
        """The announcement of the round, or None if the draft is lost. Its time is the time waited:
        that includes waking the draft, but not catching up before the round."""
        if self.group is None:
            return None
        start_s, caught_up_s = time.monotonic(), self._caught_up_s
        deadline_s = start_s + self._timeout.limit_s(num_tokens)
        try:
            while isinstance(answer := self.group.answer(_left_s(deadline_s)), CatchUpReport):
                self._learn(answer)
            if not isinstance(answer, DraftResult) or answer.round != self._round:
                raise RankError(f"it sent {answer!r:.200} where round {self._round} was due.")
        except RankError as error:
            self._lose(error)
            return None
        waited_s = time.monotonic() - start_s
        self._timeout.learn(num_tokens, waited_s)
        waited_s -= self._caught_up_s - caught_up_s
        return dataclasses.replace(answer, draft_s=max(answer.draft_s, waited_s))

    def _poll(self) -> None:
        """Take the catch-up results that have arrived."""
        try:
            while self.group is not None and self._catching_up:
                message = self.group.poll()
                if message is None:
                    return
                if not isinstance(message, CatchUpReport):
                    raise RankError(f"it sent {message!r:.200} where no message was due.")
                self._learn(message)
        except RankError as error:
            self._lose(error)

    def _learn(self, caught_up: CatchUpReport) -> None:
        if not self._catching_up:
            raise RankError("it reported a catch-up that was not requested.")
        self._catching_up.popleft()
        self._caught_up_s += caught_up.draft_s
        self._agreements += caught_up.agreements

    def _ticket(self, plan: StepPlan, drafted: DraftResult | None = None) -> Ticket:
        draft_s, agreements = self._caught_up_s, self._agreements
        self._caught_up_s, self._agreements = 0.0, ()
        if drafted is None:
            return Ticket(plan.step, draft_s=draft_s, agreements=agreements)
        draft_s += drafted.draft_s
        return Ticket(plan.step, draft_s=draft_s, round=drafted.round, agreements=agreements)

    def _note(self, past: PastStep) -> None:
        self._past.append(past)
        if len(self._past) >= _MAX_PAST_STEPS:
            self._send(Propose(tuple(self._past), None))
            self._past = []

    def _send(self, message: object, num_later: int = 0) -> None:
        """`num_later` of its tokens are caught up on, and reported, after all else."""
        assert self.group is not None
        if num_later:
            self._catching_up.append(num_later)
        try:
            self.group.send(message)
        except RankError as error:
            self._lose(error)

    def _lose(self, error: RankError) -> None:
        assert self.group is not None
        logger.warning("decoding continues without the draft: %s", error)
        self.group.close()
        self.group = None
        self.num_losses += 1
        self._past = []
        self._catching_up.clear()
        self._on_lost(str(error))


def _has_round(plan: StepPlan) -> bool:
    """Whether the draft model drafts for any row of the plan."""
    return any(row.proposer == DRAFT for row in plan.rows)


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), 0.0)


def _with_agreements(verdict: Verdict, agreements: tuple[Agreement, ...]) -> Verdict:
    """Append the draft's agreements to those of the target's own proposers."""
    if not agreements:
        return verdict
    return dataclasses.replace(verdict, agreements=(*verdict.agreements, *agreements))


def _without_logprobs(verdict: Verdict) -> Verdict:
    """Drop log-probabilities, which a draft does not need and which are most of a verdict."""
    if not any(row.logprobs or row.prompt_logprobs for row in verdict.rows):
        return verdict
    rows = tuple(row._replace(logprobs=(), prompt_logprobs=()) for row in verdict.rows)
    return dataclasses.replace(verdict, rows=rows)
