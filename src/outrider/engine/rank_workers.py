"""Target and draft in other processes, behind the step loop's protocols."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.engine.rank_group import TRANSFER_SHARE, RankError, RankGroup
from outrider.errors import EngineDeadError, OutriderError
from outrider.links.channel import Channel, wait_any
from outrider.links.codec import RANK_CODEC
from outrider.links.rank_messages import (
    Adopt,
    AwaitingDraft,
    DraftReport,
    StepPlans,
    VerifyResult,
)
from outrider.scheduler.types import (
    NONE_AHEAD,
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

_MAX_UNSENT = 64  # plans that an idle draft is not sent yet
_MAX_OWED = 16  # steps that a draft may be behind
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

    def __init__(self, group: RankGroup, draft: RemoteDraft, stall_timeout_s: float) -> None:
        self.group = group
        self._draft = draft
        self._timeout = StepTimeout(stall_timeout_s)
        # For announced distributions: as long as a rank waits for them, and for its verdict.
        self._round_s = 2 * TRANSFER_SHARE * stall_timeout_s
        self._read_s = 0.0  # time of the last verdict
        self.transfer_s = 0.0  # that the ranks waited for proposals beyond the time to draft them
        self.ahead = NONE_AHEAD  # of all rounds

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome:
        """Ranks run plans in order, so the next may be sent before this one's verdict is read."""
        sent_s = time.monotonic()
        try:
            self.group.send_encoded(
                self._draft.sent_alone(plan) or RANK_CODEC.encode(StepPlans(ticket.link, (plan,)))
            )
        except RankError as error:
            raise EngineDeadError(str(error)) from error
        return PendingVerdict(lambda: self._read(plan, ticket.link, sent_s))

    def _read(self, plan: StepPlan, link: int, sent_s: float) -> Verdict:
        num_tokens = sum(row.pass_tokens for row in plan.rows)
        limit_s = self._timeout.limit_s(num_tokens)
        if link and plan.has_round:
            limit_s += self._round_s
        # The ranks start a plan when the one before it is done.
        start_s = max(sent_s, self._read_s)
        result = self._answer(limit_s)
        if isinstance(result, AwaitingDraft):
            self._await_draft(link)
            result = self._answer(limit_s)
        self._read_s = time.monotonic()
        if not isinstance(result, VerifyResult):
            raise OutriderError(f"the target sent {type(result).__name__} where a verdict was due")
        self._timeout.learn(num_tokens, self._read_s - start_s - result.verdict.draft_s)
        self.transfer_s += result.transfer_s
        self.ahead = self.ahead.plus(result.ahead)
        if result.lost_link:
            self._draft.give_up(link)
        return self._draft.with_reports(result.verdict)

    def _answer(self, limit_s: float) -> object:
        try:
            return self.group.answer(limit_s)
        except RankError as error:
            raise EngineDeadError(str(error)) from error

    def _await_draft(self, link: int) -> None:
        """The ranks wait for proposals: until they answer, or the draft is lost, which releases
        them. It is lost, too, if it takes too long, or if what it has sent does not arrive."""
        arrives_s = time.monotonic() + self._round_s
        while self._draft.group is not None:
            left_s = self._draft.seconds_left
            if left_s is None:
                left_s = max(arrives_s - time.monotonic(), 0.0)
                if left_s == 0.0:
                    self._draft.give_up(link)
                    return
            if self.group.has_answer(self._draft.channels, left_s):
                return
            self._draft.check(is_awaited=True)


class _Owed(NamedTuple):
    """A step that the draft has not done yet, as far as the engine knows."""

    step: int
    num_tokens: int
    has_round: bool
    has_report: bool  # else the target's verdict shows that it is done
    sent_s: float


class RemoteDraft:
    """A draft group that may be lost and rejoin; see `ProposalSource` in `outrider.engine.step`.

    It gets plans ahead, like the target, and outcomes straight from the target. Nothing waits for
    its reports of catching up, unless it is many steps behind. Plans without a part for it are
    batched and sent later: they cost the draft nothing.
    """

    def __init__(self, on_lost: Callable[[int, str | None], None], stall_timeout_s: float) -> None:
        """`on_lost` gets the number of the proposal link, on which nothing more will arrive, and
        the reason, or None for a draft that another has replaced."""
        self.num_losses = 0
        self.num_rounds = 0  # of the present group
        self.group: RankGroup | None = None
        self.link = 0  # its number
        self._on_lost = on_lost
        self._stall_timeout_s = stall_timeout_s
        self._timeout = StepTimeout(stall_timeout_s)  # of the present group
        self._arrivals: queue.SimpleQueue[tuple[RankGroup, int]] = queue.SimpleQueue()
        self._is_joined = True  # as far as the step loop knows; it starts so
        self._unsent: list[StepPlan] = []
        self._last_sent: tuple[tuple[StepPlan, ...], bytes] = ((), b"")
        self._owed: deque[_Owed] = deque()
        self._observed = 0  # the last step with a verdict: the draft can do the one after it
        self._unblocked_s = 0.0  # when that was, or when it last reported a step
        self._caught_up_s = 0.0  # reported since the last verdict, with the agreements
        self._agreements: tuple[Agreement, ...] = ()

    def join(self, group: RankGroup, link: int) -> None:
        """A started group, connected to the target, takes part from the next plan on."""
        self._arrivals.put((group, link))

    @property
    def channels(self) -> Sequence[Channel]:
        return () if self.group is None else self.group.channels

    # -- as the step loop calls it ------------------------------------------------------------

    def events(self) -> Sequence[DraftEvent]:
        arrival = None
        with contextlib.suppress(queue.Empty):
            arrival = self._arrivals.get_nowait()
        events = []
        if self._is_joined and (self.group is None or arrival is not None):
            self._is_joined = False
            events.append(DraftEvent.LOST)
        if arrival is not None:
            self._drop()
            self.group, self.link = arrival
            self._timeout = StepTimeout(self._stall_timeout_s)
            self.num_rounds = 0
            self._is_joined = True
            events.append(DraftEvent.JOINED)
        return events

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """Send the rows as of the last verdict; no plan is in flight."""
        if self.group is not None:
            self._send(RANK_CODEC.encode(Adopt(epoch, tuple(rows))))

    def propose(self, plan: StepPlan) -> Ticket:
        self._keep_pace()
        if self.group is None:
            return Ticket(plan.step)
        self._unsent.append(plan)
        if plan.uses_draft:
            num_tokens = sum(row.draft_tokens + row.depth for row in plan.rows if row.draft_tokens)
            owed = _Owed(
                *(plan.step, num_tokens, plan.has_round, plan.catches_up), time.monotonic()
            )
            self._owed.append(owed)
        if plan.uses_draft or len(self._unsent) >= _MAX_UNSENT:
            plans, self._unsent = tuple(self._unsent), []
            self._last_sent = plans, RANK_CODEC.encode(StepPlans(self.link, plans))
            self._send(self._last_sent[1])
        return Ticket(plan.step, link=0 if self.group is None else self.link)

    def _keep_pace(self) -> None:
        """Check it, and wait for one that is many steps of catching up behind: it would not read
        what is sent to it."""
        self.check()
        while self.group is not None and len(self._owed) > _MAX_OWED:
            wait_any(self.channels, self.seconds_left)
            self.check()

    def sent_alone(self, plan: StepPlan) -> bytes | None:
        """The encoded `StepPlans` of this plan, if it has been sent no other with it."""
        plans, payload = self._last_sent
        return payload if self.group is not None and len(plans) == 1 and plans[0] is plan else None

    def observe(self, verdict: Verdict) -> None:
        """The target has sent it to the draft, and has had its proposals."""
        self._observed = verdict.step
        self._settle(verdict.draft_s)
        if self._owed and self._owed[0].step == verdict.step + 1:
            self._unblocked_s = time.monotonic()

    # -- reports and losses -------------------------------------------------------------------

    @property
    def seconds_left(self) -> float | None:
        """Until the oldest step that it owes is overdue; None if it owes none that it can do."""
        if not self._owed or self._owed[0].step > self._observed + 1:
            return None
        limit_s = self._timeout.limit_s(self._owed[0].num_tokens)
        return max(self._began_s + limit_s - time.monotonic(), 0.0)

    @property
    def _began_s(self) -> float:
        """When it could begin the oldest step that it owes."""
        return max(self._owed[0].sent_s, self._unblocked_s)

    def check(self, *, is_awaited: bool = False) -> None:
        """Take what it has reported, and detect that it is lost or hangs; does not wait.

        A round that is not reported is overdue only if the target says that it awaits it: it may
        have come long ago.
        """
        try:
            while self.group is not None and (message := self.group.poll()) is not None:
                self._take(message)
            if self.group is None or self.seconds_left != 0.0:
                return
            if is_awaited or self._owed[0].has_report:
                raise self.group.hung(time.monotonic() - self._began_s)
        except RankError as error:
            self._lose(error)

    def give_up(self, link: int) -> None:
        """Its proposals do not reach the target, so it must be restarted."""
        if self.group is not None and link == self.link:
            self._lose(RankError("its proposals did not arrive."))

    def with_reports(self, verdict: Verdict) -> Verdict:
        """Add what it has reported since the last verdict: time and agreements of catching up."""
        spent_s, agreements = self._caught_up_s, self._agreements
        if not spent_s and not agreements:
            return verdict
        self._caught_up_s, self._agreements = 0.0, ()
        return dataclasses.replace(
            verdict,
            draft_s=verdict.draft_s + spent_s,
            agreements=(*verdict.agreements, *agreements),
        )

    def _settle(self, draft_s: float | None = None) -> None:
        """Drop the rounds that verdicts show to be done; the last took this long, if known."""
        while self._owed and self._owed[0].step <= self._observed and not self._owed[0].has_report:
            owed = self._done()
            if draft_s is not None:
                self._timeout.learn(owed.num_tokens, draft_s)

    def _done(self) -> _Owed:
        owed = self._owed.popleft()
        self.num_rounds += owed.has_round
        return owed

    def _take(self, message: object) -> None:
        reported = next((each for each in self._owed if each.has_report), None)
        if (
            reported is None
            or not isinstance(message, DraftReport)
            or message.step != reported.step
        ):
            raise RankError(f"it sent {message!r:.200} where no message was due.")
        while self._done() is not reported:
            pass  # rounds before it, whose verdicts are on their way
        self._settle()
        self._unblocked_s = time.monotonic()
        self._timeout.learn(reported.num_tokens, message.caught_up_s)
        self._caught_up_s += message.caught_up_s
        self._agreements += message.agreements

    def _send(self, payload: bytes) -> None:
        assert self.group is not None
        try:
            self.group.send_encoded(payload)
        except RankError as error:
            self._lose(error)

    def _lose(self, error: RankError) -> None:
        logger.warning("decoding continues without the draft: %s", error)
        self.num_losses += 1
        self._drop(str(error))

    def _drop(self, reason: str | None = None) -> None:
        """Close the present group, if there is one; it is restarted if there is a reason."""
        if self.group is None:
            return
        self.group.close()
        self.group = None
        self._unsent = []
        self._owed.clear()
        self._on_lost(self.link, reason)
