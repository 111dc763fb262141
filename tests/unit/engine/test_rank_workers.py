"""The engine's side of a group: how long it waits for an answer, and what a draft is told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from outrider.catalog.proposers import DRAFT
from outrider.engine.rank_group import RankError, RankGroup
from outrider.engine.rank_workers import RemoteDraft, RemoteTarget, StepTimeout
from outrider.errors import EngineDeadError
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.listener import Arrival
from outrider.links.rank_messages import (
    Adopt,
    CatchUpReport,
    DraftResult,
    Hello,
    Propose,
    RankFailed,
    Role,
    Stage,
    Verify,
    VerifyResult,
    WeightsLoaded,
)
from outrider.scheduler.types import (
    Agreement,
    DraftEvent,
    RowPlan,
    RowVerdict,
    StepPlan,
    Ticket,
    TokenLogprobs,
    Verdict,
)

STALL_S = 0.3
ROW = RowPlan(0, 1, 1, 3, 3, True, DRAFT, 0, (), 0, (), 1)
PLAN = StepPlan(1, 5, (ROW,))
LOGPROBS = (TokenLogprobs(7, -0.5, 1, tuple((i, -1.0) for i in range(20))),)
VERDICT = Verdict(1, 5, (RowVerdict(0, 1, 9, 3, 3, 2, (7, 8, 9), LOGPROBS, LOGPROBS),))


@dataclass
class Ranks:
    """A group, and the far ends of its links: ranks that by themselves send only heartbeats."""

    group: RankGroup
    ends: list[Channel]


@contextmanager
def linked(role: str, size: int = 1) -> Iterator[Ranks]:
    arrivals, ends = [], []
    for rank in range(size):
        near, far = socket.socketpair()
        hello = Hello(Role(role), rank, size, 1, "here")
        peer = f"{role} rank {rank}"
        arrivals.append(Arrival(hello, Channel(near, RANK_CODEC, heartbeat_s=0.05, peer=peer)))
        ends.append(Channel(far, RANK_CODEC, heartbeat_s=0.05))
    try:
        yield Ranks(RankGroup(role, role, arrivals, print, start_timeout_s=STALL_S), ends)
    finally:
        for channel in [*ends, *(arrival.channel for arrival in arrivals)]:
            channel.close()


def test_what_takes_a_rank_long_is_reported_while_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with linked("target", size=2) as ranks:
        first, second = ranks.ends
        for words in ("compiling CPU kernels (1 of 21)", "reading weights (layer 9 of 30)"):
            first.send(Stage(words))
        first.send(WeightsLoaded(1, None, "c", 0.5))
        second.send(WeightsLoaded(1, None, "c", 0.5))
        ranks.group.load(None)
        assert capsys.readouterr().out.splitlines() == [
            "target rank 0: weights loaded in 0.5 s",
            "target rank 1: weights loaded in 0.5 s",
        ], "what is over is not reported"
        reading = threading.Thread(target=ranks.group.load, args=(None,))
        reading.start()
        first.send(Stage("reading weights (layer 10 of 30)"))
        time.sleep(STALL_S / 3)
        for end in ranks.ends:
            end.send(WeightsLoaded(1, None, "c", 0.5))
        reading.join(60)
        line, *_ = capsys.readouterr().out.splitlines()
        assert line == "target rank 0: reading weights (layer 10 of 30)"


def joined_draft(ranks: Ranks, lost: list[str]) -> RemoteDraft:
    draft = RemoteDraft(lost.append, STALL_S)
    draft.join(ranks.group)
    assert draft.events() == [DraftEvent.LOST, DraftEvent.JOINED]
    draft.adopt(1, ())
    assert isinstance(ranks.ends[0].receive(5), Adopt)
    return draft


def draft_one_round(draft: RemoteDraft, ranks: Ranks) -> None:
    ranks.ends[0].send(DraftResult(1, 0.0, 1))
    assert draft.propose(PLAN).round == 1


def test_a_draft_that_hangs_but_sends_heartbeats_is_given_up() -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        draft_one_round(draft, ranks)
        assert draft.propose(PLAN).round is None
        assert draft.group is None
        [reason] = lost
        assert reason.startswith("draft rank 0 has not answered for 0.3 s") and "hangs" in reason


@pytest.mark.parametrize(
    "answer", [DraftResult(4, 0.0, 1), RankFailed("out of memory"), VerifyResult(VERDICT, False)]
)
def test_a_draft_that_answers_something_else_is_lost_and_nothing_more(answer: object) -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        ranks.ends[0].send(answer)
        assert draft.propose(PLAN).round is None
        assert draft.group is None and len(lost) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_target_that_hangs_but_sends_heartbeats_ends_the_engine(size: int) -> None:
    with linked("target", size) as ranks:
        target = RemoteTarget(ranks.group, lambda: None, STALL_S)
        ranks.ends[0].send(VerifyResult(VERDICT, False))
        assert target.verify(PLAN, Ticket(PLAN.step)).wait() == VERDICT
        assert isinstance(ranks.ends[0].receive(5), Verify)
        with pytest.raises(EngineDeadError, match="target rank 0 has not answered for 0.3 s"):
            target.verify(PLAN, Ticket(PLAN.step)).wait()


def test_plans_go_to_the_target_ahead_of_its_verdicts() -> None:
    with linked("target") as ranks:
        target = RemoteTarget(ranks.group, lambda: None, STALL_S)
        first = target.verify(PLAN, Ticket(PLAN.step))
        second = target.verify(PLAN, Ticket(PLAN.step))
        assert isinstance(ranks.ends[0].receive(5), Verify)
        assert isinstance(ranks.ends[0].receive(5), Verify)
        later = Verdict(1, 6, ())
        for verdict in (VERDICT, later):
            ranks.ends[0].send(VerifyResult(verdict, False))
        assert (first.wait(), second.wait()) == (VERDICT, later)


def test_only_a_plan_with_drafts_waits_for_the_verdicts_before_it() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        assert draft.needs_verdicts(PLAN)
        catching_up = ROW._replace(depth=0, num_verified=0, proposer="")
        assert not draft.needs_verdicts(StepPlan(1, 5, (catching_up,)))


def test_a_rank_that_hangs_while_it_starts_is_an_error() -> None:
    with linked("draft") as ranks, pytest.raises(RankError, match="has not answered for 0.3 s"):
        ranks.group.load(None)


def test_a_step_may_take_several_times_what_comparable_ones_took() -> None:
    patience = StepTimeout(1.0)
    patience.learn(10, 20.0)
    assert patience.limit_s(11) > 100


def test_the_first_step_of_a_size_may_take_longer() -> None:
    patience = StepTimeout(1.0)
    patience.learn(1, 0.1)
    assert patience.limit_s(500) > 10 * patience.limit_s(1)


def test_one_slow_step_is_forgotten_after_many_fast_ones() -> None:
    patience = StepTimeout(1.0)
    for seconds in [60.0, *[0.1] * 100]:
        patience.learn(1, seconds)
    assert patience.limit_s(1) == 2.0


def test_a_draft_is_not_told_the_logprobs_of_a_verdict() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft.observe(VERDICT)
        draft_one_round(draft, ranks)
        message = ranks.ends[0].receive(5)
        assert isinstance(message, Propose)
        [past] = message.past
        assert past.verdict is not None
        assert past.verdict.rows == (VERDICT.rows[0]._replace(logprobs=(), prompt_logprobs=()),)


CATCHING_UP = StepPlan(1, 6, (ROW._replace(depth=0, num_verified=0, proposer="", draft_tokens=9),))
PLAIN = StepPlan(1, 7, (ROW._replace(depth=0, num_verified=0, proposer="", draft_tokens=0),))
FOUND = (Agreement(0, 1, (True, False)),)


def caught_up_ticket(ranks: Ranks, draft: RemoteDraft) -> Ticket:
    """That of the first plan after the word that the draft has caught up has arrived."""
    deadline_s = time.monotonic() + 60
    while not (ticket := draft.propose(PLAIN)).agreements:
        assert time.monotonic() < deadline_s, "nobody listened"
    return ticket


def test_what_a_draft_caught_up_on_comes_with_a_later_verdict_and_is_not_waited_for() -> None:
    with linked("draft") as ranks, linked("target") as target_ranks:
        draft = joined_draft(ranks, [])
        assert draft.propose(CATCHING_UP) == Ticket(6)
        ranks.ends[0].send(CatchUpReport(0.5, FOUND))
        ticket = caught_up_ticket(ranks, draft)
        assert ticket == Ticket(7, draft_s=0.5, agreements=FOUND)
        assert draft.propose(PLAIN) == Ticket(7), "it is told once"
        target = RemoteTarget(target_ranks.group, lambda: None, STALL_S)
        target_ranks.ends[0].send(VerifyResult(VERDICT, False))
        assert target.verify(PLAN, ticket).wait().agreements == FOUND


def test_a_round_is_found_behind_what_was_caught_up_on_before() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft.propose(CATCHING_UP)
        ranks.ends[0].send(CatchUpReport(0.5, FOUND))
        ranks.ends[0].send(DraftResult(1, 0.25, 1))
        ticket = draft.propose(PLAN)
        assert (ticket.round, ticket.draft_s, ticket.agreements) == (1, 0.75, FOUND)


def test_a_round_costs_what_is_waited_for_it() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        later = threading.Timer(0.03, ranks.ends[0].send, (DraftResult(1, 0.001, 1),))
        later.start()
        ticket = draft.propose(PLAN)
        later.join()
        assert ticket.round == 1 and ticket.draft_s > 0.02


def test_catching_up_that_nobody_asked_for_is_an_error_of_the_draft() -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        ranks.ends[0].send(CatchUpReport(0.5, FOUND))
        assert draft.propose(PLAN).round is None
        assert draft.group is None and len(lost) == 1


def test_a_draft_that_ends_after_it_has_caught_up_is_noticed_while_nothing_is_planned() -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        draft.propose(CATCHING_UP)
        ranks.ends[0].send(CatchUpReport(0.5, FOUND))
        ranks.ends[0].close()
        deadline_s = time.monotonic() + 60
        while draft.group is not None:
            assert time.monotonic() < deadline_s, "its end was not noticed"
            draft.check()
        assert len(lost) == 1


def test_the_time_that_drafts_were_on_their_way_adds_up() -> None:
    with linked("target") as ranks:
        target = RemoteTarget(ranks.group, lambda: None, STALL_S)
        for transfer_s in (0.25, 0.5):
            ranks.ends[0].send(VerifyResult(VERDICT, False, transfer_s))
            target.verify(PLAN, Ticket(PLAN.step)).wait()
        assert target.transfer_s == 0.75
