"""Target and draft in other processes, behind the protocols of the step loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from outrider.engine.rank_group import TRANSFER_SHARE, RankError, RankGroup
from outrider.errors import EngineDeadError, OutriderError
from outrider.links.rank_messages import (
    Adopt,
    CaughtUp,
    Drafted,
    Judged,
    Past,
    Propose,
    Verify,
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
from outrider.workers.proposers.registry import has_round

logger = logging.getLogger(__name__)

_MOST_PAST = 64  # plans and verdicts kept back from an idle draft before it is told of them
_MARGIN = 10.0  # times the slowest comparable step
_FADE = 0.9  # of what a slow step still counts after the next: a compilation is soon forgotten
_FIRST = 10.0  # times the least limit, for the first step of a size: kernels may be compiled
_UNKNOWN_TOKEN_S = 1.0  # a token of the very first step


class Patience:
    """How long the engine waits for the answer to a step before it takes a rank for hung.

    A rank whose main thread hangs still sends heartbeats, from another thread; only the answer
    that does not come tells. Limits follow from how long steps of about as many tokens took;
    `least_s` is the shortest of them.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._slowest_s: dict[int, float] = {}  # by size, a power of two of tokens
        self._token_s = 0.0  # the most a token took, in a step of any size

    def limit_s(self, num_tokens: int) -> float:
        slowest_s = self._slowest_s.get(num_tokens.bit_length())
        if slowest_s is not None:
            return self._least_s + _MARGIN * slowest_s
        return _FIRST * self._least_s + num_tokens * (self._token_s or _UNKNOWN_TOKEN_S)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens was answered after so long."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, _FADE * self._slowest_s.get(size, 0.0))
        self._token_s = max(self._token_s, seconds / max(num_tokens, 1))


class RemoteTarget:
    """Sends a plan to all target ranks; the first one's verdict counts. Without it nothing goes on,
    so a rank that is lost, or hangs, ends the engine."""

    lag = 1  # the ranks work on a pass while the next is planned and sent
    max_depth: int | None = None

    def __init__(
        self, group: RankGroup, on_lost_round: Callable[[], None], stall_timeout_s: float
    ) -> None:
        self.group = group
        self._on_lost_round = on_lost_round
        self._patience = Patience(stall_timeout_s)
        # A round is up to two transfers, and the draft may hang in the middle of it.
        self._round_s = 2 * TRANSFER_SHARE * stall_timeout_s
        self._read_s = 0.0  # when the last verdict was
        self.transfer_s = 0.0  # that the ranks waited for drafts on their way

    def verify(self, plan: StepPlan, ticket: Ticket) -> Outcome:
        """The ranks take plans in order, so another may be sent before the first one's verdict is
        read."""
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
        # The ranks came to it when the plan before it was done.
        start_s = max(sent_s, self._read_s)
        try:
            judged = self.group.answer(self._patience.limit_s(num_tokens) + round_s)
        except RankError as error:
            raise EngineDeadError(str(error)) from error
        self._read_s = time.monotonic()
        self._patience.learn(num_tokens, self._read_s - start_s)
        if not isinstance(judged, Judged):
            raise OutriderError(f"the target sent {type(judged).__name__} where a verdict was due")
        self.transfer_s += judged.transfer_s
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
        self._catching_up: deque[int] = deque()  # tokens, by plan, until it says that it has
        self._caught_up_s = 0.0  # it told of since the last ticket, and what it found out
        self._agreements: tuple[Agreement, ...] = ()
        self._arrivals: queue.SimpleQueue[RankGroup] = queue.SimpleQueue()
        self._is_told = True  # whether the loop takes it to be there, as it does at first
        self._past: list[Past] = []
        self._round = 0  # of drafts, counted over all groups

    def join(self, group: RankGroup) -> None:
        """A started group, its proposal link standing, takes part from the next plan on."""
        self._arrivals.put(group)

    def events(self) -> Sequence[DraftEvent]:
        arrival = None
        with contextlib.suppress(queue.Empty):
            arrival = self._arrivals.get_nowait()
        events = []
        if self._is_told and (arrival is not None or self.group is None):
            self._is_told = False
            events.append(DraftEvent.LOST)
        if arrival is not None:
            if self.group is not None:  # replaced before its loss was noticed
                self.group.close()
            self.num_sends = 0
            self.group = arrival
            self._patience = Patience(self._stall_timeout_s)
            self._catching_up.clear()
            self._is_told = True
            events.append(DraftEvent.JOINED)
        return events

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        """The rows' texts are as applied; every verdict that is applied later is told then."""
        self._past = []
        if self.group is not None:
            self._tell(Adopt(epoch, tuple(rows)))

    def needs_verdicts(self, plan: StepPlan) -> bool:
        """To draft it must know where each text ends; what it only catches up on is applied."""
        return self.group is not None and has_round(plan)

    def check(self) -> None:
        """Notice a loss while nothing is drafted."""
        self._listen()
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
        self._listen()
        if self.group is None:
            return self._ticket(plan)
        if not any(row.draft_tokens for row in plan.rows):
            self._note(Past(plan, None))
            return self._ticket(plan)
        past, self._past = tuple(self._past), []
        later = sum(row.draft_tokens for row in plan.rows if not row.depth)
        if not has_round(plan):  # it only catches up, beside the target's own pass
            self._tell(Propose(past, plan), later)
            return self._ticket(plan)
        self._round += 1
        own = sum(row.draft_tokens + row.depth for row in plan.rows if row.depth)
        num_tokens = sum(self._catching_up) + own
        self._tell(Propose(past, plan, self._round), later)
        drafted = self._await_round(num_tokens)
        if drafted is None:
            return self._ticket(plan)
        self.num_sends = drafted.num_sends
        return self._ticket(plan, drafted)

    def observe(self, verdict: Verdict) -> None:
        if self.group is not None:
            self._note(Past(None, _without_logprobs(verdict)))

    def _await_round(self, num_tokens: int) -> Drafted | None:
        """The word that the round is there, or None if the draft is lost. What it took is what was
        waited for it: a step pays for waking the draft, too, if not for catching up before."""
        if self.group is None:
            return None
        start_s, caught_up_s = time.monotonic(), self._caught_up_s
        deadline_s = start_s + self._patience.limit_s(num_tokens)
        try:
            while isinstance(answer := self.group.answer(_left_s(deadline_s)), CaughtUp):
                self._learn(answer)
            if not isinstance(answer, Drafted) or answer.round != self._round:
                raise RankError(f"it sent {answer!r:.200} where round {self._round} was due.")
        except RankError as error:
            self._lose(error)
            return None
        waited_s = time.monotonic() - start_s
        self._patience.learn(num_tokens, waited_s)
        waited_s -= self._caught_up_s - caught_up_s
        return dataclasses.replace(answer, draft_s=max(answer.draft_s, waited_s))

    def _listen(self) -> None:
        """Take what it said of catching up, if it has."""
        try:
            while self.group is not None and self._catching_up:
                message = self.group.heard()
                if message is None:
                    return
                if not isinstance(message, CaughtUp):
                    raise RankError(f"it sent {message!r:.200} where nothing else was asked for.")
                self._learn(message)
        except RankError as error:
            self._lose(error)

    def _learn(self, caught_up: CaughtUp) -> None:
        if not self._catching_up:
            raise RankError("it caught up where there was nothing to catch up on.")
        self._catching_up.popleft()
        self._caught_up_s += caught_up.draft_s
        self._agreements += caught_up.agreements

    def _ticket(self, plan: StepPlan, drafted: Drafted | None = None) -> Ticket:
        draft_s, agreements = self._caught_up_s, self._agreements
        self._caught_up_s, self._agreements = 0.0, ()
        if drafted is None:
            return Ticket(plan.step, draft_s=draft_s, agreements=agreements)
        draft_s += drafted.draft_s
        return Ticket(plan.step, draft_s=draft_s, round=drafted.round, agreements=agreements)

    def _note(self, past: Past) -> None:
        self._past.append(past)
        if len(self._past) >= _MOST_PAST:
            self._tell(Propose(tuple(self._past), None))
            self._past = []

    def _tell(self, message: object, num_later: int = 0) -> None:
        """`num_later` tokens of it are caught up on, and told of, after everything else."""
        assert self.group is not None
        if num_later:
            self._catching_up.append(num_later)
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
        self._catching_up.clear()
        self._on_lost(str(error))


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), 0.0)


def _with_agreements(verdict: Verdict, agreements: tuple[Agreement, ...]) -> Verdict:
    """What the draft has found, behind what the target's own proposers have."""
    if not agreements:
        return verdict
    return dataclasses.replace(verdict, agreements=(*verdict.agreements, *agreements))


def _without_logprobs(verdict: Verdict) -> Verdict:
    """What a draft needs of a verdict; log-probabilities are most of one that has them."""
    if not any(row.logprobs or row.prompt_logprobs for row in verdict.rows):
        return verdict
    rows = tuple(row._replace(logprobs=(), prompt_logprobs=()) for row in verdict.rows)
    return dataclasses.replace(verdict, rows=rows)
