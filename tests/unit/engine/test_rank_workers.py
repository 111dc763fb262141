"""The engine's side of a group: how long it waits for an answer, and what a draft is sent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from outrider.catalog.proposers import DRAFT
from outrider.engine import rank_workers
from outrider.engine.rank_group import RankError, RankGroup
from outrider.engine.rank_workers import RemoteDraft, RemoteTarget, StepTimeout
from outrider.errors import EngineDeadError
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.listener import Arrival
from outrider.links.rank_messages import (
    Adopt,
    AwaitingDraft,
    DraftReport,
    Hello,
    RankFailed,
    ReleaseLink,
    Role,
    Stage,
    StepBounds,
    StepPlans,
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

BOUNDS = StepBounds(4, 64, 5, 128)


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
        ranks.group.load(None, BOUNDS)
        assert capsys.readouterr().out.splitlines() == [
            "target rank 0: weights loaded in 0.5 s",
            "target rank 1: weights loaded in 0.5 s",
        ], "what is over is not reported"
        reading = threading.Thread(target=ranks.group.load, args=(None, BOUNDS))
        reading.start()
        first.send(Stage("reading weights (layer 10 of 30)"))
        time.sleep(STALL_S / 3)
        for end in ranks.ends:
            end.send(WeightsLoaded(1, None, "c", 0.5))
        reading.join(60)
        line, *_ = capsys.readouterr().out.splitlines()
        assert line == "target rank 0: reading weights (layer 10 of 30)"


LINK = 3  # of the draft


def joined_draft(ranks: Ranks, lost: list[str]) -> RemoteDraft:
    draft = RemoteDraft(lambda link, reason: lost.append(f"{link}: {reason}"), STALL_S)
    draft.join(ranks.group, LINK)
    assert draft.events() == [DraftEvent.LOST, DraftEvent.JOINED]
    draft.adopt(1, ())
    assert isinstance(ranks.ends[0].receive(5), Adopt)
    return draft


def plan_of(step: int, **changes: object) -> StepPlan:
    return StepPlan(1, step, (ROW._replace(**changes),))  # type: ignore[arg-type]


def caught_up_on(step: int) -> StepPlan:
    return plan_of(step, depth=0, num_verified=0, proposer="", draft_tokens=9)


def plain(step: int) -> StepPlan:
    return plan_of(step, depth=0, num_verified=0, proposer="", draft_tokens=0)


def verdict_of(step: int) -> Verdict:
    return Verdict(1, step, ())


def until(condition: Callable[[], bool], draft: RemoteDraft) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        draft.check()


# -- the draft ------------------------------------------------------------------------------------


def test_plans_go_to_the_draft_ahead_of_verdicts_and_reports() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        assert draft.propose(plan_of(5)) == Ticket(5, link=LINK)
        assert draft.propose(plan_of(6)) == Ticket(6, link=LINK)
        assert ranks.ends[0].receive(5) == StepPlans(LINK, (plan_of(5),))
        assert ranks.ends[0].receive(5) == StepPlans(LINK, (plan_of(6),))


def test_plans_without_its_part_are_sent_with_the_next_that_has_one() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        for step in (5, 6):
            assert draft.propose(plain(step)) == Ticket(step, link=LINK)
        draft.propose(caught_up_on(7))
        assert ranks.ends[0].receive(5) == StepPlans(LINK, (plain(5), plain(6), caught_up_on(7)))


def test_an_idle_draft_is_sent_plans_before_they_are_many() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        for step in range(1, 65):
            draft.propose(plain(step))
        assert len(ranks.ends[0].receive(5).plans) == 64


def test_a_draft_that_hangs_but_sends_heartbeats_is_given_up() -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        draft._timeout.learn(4, 0.0)
        draft._timeout.learn(9, 0.0)
        draft.propose(caught_up_on(1))
        until(lambda: draft.group is None, draft)
        [reason] = lost
        assert reason.startswith(f"{LINK}: draft rank 0 has not answered for 0.3 s")
        assert "hangs" in reason
        assert draft.propose(plan_of(2)) == Ticket(2)
        assert draft.events() == [DraftEvent.LOST]


def test_a_draft_does_not_hang_while_it_waits_for_the_outcome_of_a_step() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft._timeout.learn(9, 0.0)
        draft.propose(caught_up_on(2))  # the target has not done step 1
        time.sleep(1.5 * STALL_S)
        draft.check()
        assert draft.seconds_left is None and draft.group is not None
        draft.observe(verdict_of(1))
        assert draft.seconds_left is not None
        until(lambda: draft.group is None, draft)


def test_a_draft_that_hangs_while_it_catches_up_is_noticed_while_verdicts_come() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft._timeout.learn(9, 0.0)
        draft.propose(caught_up_on(1))
        deadline_s = time.monotonic() + 60
        step = 1
        while draft.group is not None:
            assert time.monotonic() < deadline_s
            draft.observe(verdict_of(step))
            step += 1
            draft.propose(plain(step))
            time.sleep(STALL_S / 20)


def test_a_round_that_no_target_awaits_is_not_overdue() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft._timeout.learn(4, 0.0)
        draft.propose(plan_of(1))  # the target may be in a long pass that has its proposals
        time.sleep(1.5 * STALL_S)
        draft.check()
        assert draft.group is not None
        draft.check(is_awaited=True)
        assert draft.group is None


def test_a_draft_many_steps_behind_is_waited_for() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        for step in range(1, rank_workers._MAX_OWED + 2):
            draft.propose(caught_up_on(step))
            draft.observe(verdict_of(step))
        later = threading.Timer(0.1, ranks.ends[0].send, (DraftReport(1, 0.0, ()),))
        later.start()
        start_s = time.monotonic()
        draft.propose(plain(40))
        later.join()
        assert time.monotonic() - start_s > 0.05 and draft.group is not None


def test_a_failure_of_any_rank_of_a_draft_is_its_loss() -> None:
    lost: list[str] = []
    with linked("draft", 2) as ranks:
        draft = joined_draft(ranks, lost)
        ranks.ends[1].send(RankFailed("out of memory"))
        ranks.ends[1].close()
        until(lambda: draft.group is None, draft)
        assert "out of memory" in lost[0]


@pytest.mark.parametrize(
    "answer",
    [DraftReport(4, 0.0, ()), RankFailed("out of memory"), VerifyResult(VERDICT)],
)
def test_a_draft_that_sends_something_else_is_lost_and_nothing_more(answer: object) -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        draft.propose(PLAN)
        ranks.ends[0].send(answer)
        until(lambda: draft.group is None, draft)
        assert len(lost) == 1


def test_a_report_that_is_not_due_is_an_error_of_the_draft() -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        ranks.ends[0].send(DraftReport(5, 0.0, ()))
        until(lambda: draft.group is None, draft)
        assert len(lost) == 1


def test_catching_up_is_reported_with_the_next_verdict_and_once() -> None:
    found = (Agreement(0, 1, (True, False)),)
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft.propose(caught_up_on(1))
        ranks.ends[0].send(DraftReport(1, 0.5, found))
        until(lambda: not draft._owed, draft)
        verdict = draft.with_reports(verdict_of(1))
        assert (verdict.draft_s, verdict.agreements) == (0.5, found)
        assert draft.with_reports(verdict_of(2)) == verdict_of(2)
        assert draft.num_rounds == 0


def test_a_verdict_shows_that_the_round_is_done_and_a_report_that_it_has_caught_up() -> None:
    both = StepPlan(1, 2, (ROW, *caught_up_on(2).rows))
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft.propose(plan_of(1))
        draft.propose(both)
        draft.propose(plan_of(3))
        draft.observe(verdict_of(1))
        assert draft.num_rounds == 1
        draft.observe(verdict_of(2))
        draft.observe(verdict_of(3))
        assert (draft.num_rounds, draft._owed[0].step) == (1, 2)
        ranks.ends[0].send(DraftReport(2, 0.5, ()))
        until(lambda: not draft._owed, draft)
        assert draft.seconds_left is None and draft.num_rounds == 3


def test_a_report_may_come_before_the_verdicts_of_rounds_before_it() -> None:
    with linked("draft") as ranks:
        draft = joined_draft(ranks, [])
        draft.propose(plan_of(1))
        draft.propose(caught_up_on(2))
        ranks.ends[0].send(DraftReport(2, 0.5, ()))
        until(lambda: not draft._owed, draft)
        assert draft.num_rounds == 1


def test_rounds_are_counted_for_the_present_draft() -> None:
    lost: list[str] = []
    with linked("draft") as ranks, linked("draft") as others:
        draft = joined_draft(ranks, lost)
        draft.propose(plan_of(1))
        draft.observe(verdict_of(1))
        assert draft.num_rounds == 1
        draft.join(others.group, LINK + 1)
        assert draft.events() == [DraftEvent.LOST, DraftEvent.JOINED]
        assert (draft.num_rounds, draft.link) == (0, LINK + 1)
        assert lost == [f"{LINK}: None"], "it is not restarted: another has its place"


def test_a_draft_that_ends_is_noticed_while_nothing_is_planned() -> None:
    lost: list[str] = []
    with linked("draft") as ranks:
        draft = joined_draft(ranks, lost)
        ranks.ends[0].close()
        until(lambda: draft.group is None, draft)
        assert len(lost) == 1


# -- the target -----------------------------------------------------------------------------------


def without_draft() -> RemoteDraft:
    return RemoteDraft(lambda link, reason: None, STALL_S)


@pytest.mark.parametrize("size", [1, 2])
def test_a_target_that_hangs_but_sends_heartbeats_ends_the_engine(size: int) -> None:
    with linked("target", size) as ranks:
        target = RemoteTarget(ranks.group, without_draft(), STALL_S)
        ranks.ends[0].send(VerifyResult(VERDICT))
        assert target.verify(PLAN, Ticket(PLAN.step)).wait() == VERDICT
        assert ranks.ends[0].receive(5) == StepPlans(0, (PLAN,))
        with pytest.raises(EngineDeadError, match="target rank 0 has not answered for 0.3 s"):
            target.verify(PLAN, Ticket(PLAN.step)).wait()


def test_plans_go_to_the_target_ahead_of_its_verdicts() -> None:
    with linked("target") as ranks:
        target = RemoteTarget(ranks.group, without_draft(), STALL_S)
        first = target.verify(PLAN, Ticket(PLAN.step))
        second = target.verify(PLAN, Ticket(PLAN.step))
        assert isinstance(ranks.ends[0].receive(5), StepPlans)
        assert isinstance(ranks.ends[0].receive(5), StepPlans)
        later = Verdict(1, 6, ())
        for verdict in (VERDICT, later):
            ranks.ends[0].send(VerifyResult(verdict))
        assert (first.wait(), second.wait()) == (VERDICT, later)


def test_a_target_that_waits_for_a_hung_draft_does_not_hang() -> None:
    with linked("draft") as drafts, linked("target") as targets:
        lost: list[str] = []
        draft = joined_draft(drafts, lost)
        target = RemoteTarget(targets.group, draft, STALL_S)

        def lose(link: int, reason: str | None) -> None:
            targets.group.send_to_first(ReleaseLink(link))
            lost.append(str(reason))

        draft._on_lost = lose
        draft._timeout.learn(4, 0.0)
        target._timeout.learn(4, 0.0)
        plan = plan_of(1)
        outcome = target.verify(plan, draft.propose(plan))
        far = targets.ends[0]
        assert far.receive(5) == StepPlans(LINK, (plan,))

        def rank() -> None:
            far.send(AwaitingDraft(1))
            assert far.receive(30) == ReleaseLink(LINK)
            far.send(VerifyResult(verdict_of(1)))

        released = threading.Thread(target=rank)
        released.start()
        assert outcome.wait() == verdict_of(1)
        released.join(30)
        assert draft.group is None and len(lost) == 1


def test_a_draft_whose_link_the_target_lost_is_given_up() -> None:
    lost: list[str] = []
    with linked("draft") as drafts, linked("target") as targets:
        draft = joined_draft(drafts, lost)
        target = RemoteTarget(targets.group, draft, STALL_S)
        outcomes = []
        for step in (1, 2):
            plan = plan_of(step)
            outcomes.append(target.verify(plan, draft.propose(plan)))
            targets.ends[0].send(VerifyResult(verdict_of(step), lost_link=True))
        assert outcomes[0].wait() == verdict_of(1)
        assert draft.group is None
        assert outcomes[1].wait() == verdict_of(2), "of the same link"
        assert len(lost) == 1


def test_a_rank_that_hangs_while_it_starts_is_an_error() -> None:
    with linked("draft") as ranks, pytest.raises(RankError, match="has not answered for 0.3 s"):
        ranks.group.load(None, BOUNDS)


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


def test_the_time_that_drafts_were_on_their_way_adds_up() -> None:
    with linked("target") as ranks:
        target = RemoteTarget(ranks.group, without_draft(), STALL_S)
        for transfer_s in (0.25, 0.5):
            ranks.ends[0].send(VerifyResult(VERDICT, False, transfer_s))
            target.verify(PLAN, Ticket(PLAN.step)).wait()
        assert target.transfer_s == 0.75
