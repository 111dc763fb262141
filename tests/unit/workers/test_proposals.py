"""Rounds of proposals and outcomes on a proposal link, and what becomes of a lost one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import run_ranks, same_on_all

from outrider.catalog.proposers import DRAFT, NGRAM
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.rank_messages import (
    LinkOpened,
    OutcomeMail,
    ReleaseLink,
    RoundMail,
    RoundPart,
    StepPlans,
)
from outrider.scheduler.types import (
    Proposal,
    RowPlan,
    RowVerdict,
    StepPlan,
    TokenLogprobs,
    Verdict,
)
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.ranks import mailbox
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.mailbox import DraftMailbox, TargetMailbox
from outrider.workers.ranks.outcome_batches import MAX_BATCH, OutcomeBatches
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.packed_round import pack_round, unpack_round
from outrider.workers.ranks.proposal_link import ProposalLink

SOLE = SingleRankGroup()
CPU = torch.device("cpu")
VOCAB_SIZE = 100


def planned(row: int, depth: int, proposer: str = DRAFT) -> RowPlan:
    draft_tokens = int(proposer == DRAFT)
    return RowPlan(row, 1, 1, depth, depth, True, proposer, 0, (), 0, (), draft_tokens)


PLAN = StepPlan(2, 7, (planned(0, 3), planned(4, 2), planned(5, 4, NGRAM)))
ROUND = {
    0: Proposal(1, 20, [5, 6, 7], [0.5, 0.25, 1e-9]),
    4: Proposal(1, 2**40, [9], [1.0]),
}

LOGPROBS = (TokenLogprobs(7, -0.5, 1, ()),)
VERDICT = Verdict(
    *(2, 7),
    rows=(
        RowVerdict(0, 1, 20, 3, 3, 2, (7, 8, 9), LOGPROBS, LOGPROBS),
        RowVerdict(9, 1, 4, 0, 0, 0, ()),  # part of a prompt
    ),
    draft_s=0.5,
)
OUTCOME = PackedOutcome.of(VERDICT)
PACKED = pack_round(PLAN, ROUND)


def content(proposals: dict[int, Proposal] | None) -> dict[int, tuple[object, ...]] | None:
    if proposals is None:
        return None
    return {row: tuple(map(_plain, proposal)) for row, proposal in proposals.items()}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_a_round_comes_out_as_it_went_in() -> None:
    assert content(unpack_round(PLAN, pack_round(PLAN, ROUND).message, None)) == content(ROUND)


def test_the_size_of_a_message_depends_on_the_plan_alone() -> None:
    sizes = {pack_round(PLAN, part).message.shape for part in (ROUND, {4: ROUND[4]}, {})}
    assert len(sizes) == 1


def test_rows_the_draft_had_nothing_for_are_left_out() -> None:
    assert unpack_round(PLAN, pack_round(PLAN, {}).message, None) == {}


@pytest.mark.parametrize(("epoch", "step"), [(2, 8), (3, 7)])
def test_a_message_of_another_step_or_engine_is_dropped(epoch: int, step: int) -> None:
    other = StepPlan(epoch, step, PLAN.rows)
    assert unpack_round(PLAN, pack_round(other, ROUND).message, None) is None


def test_an_empty_message_is_a_lost_round() -> None:
    message = torch.zeros_like(PACKED.message)
    assert unpack_round(PLAN, message, None) is None


@dataclass
class Linked:
    """Both ends of a proposal link in this process; `engine` is that of the target's rank."""

    target: TargetMailbox
    draft: DraftMailbox
    engine: Channel


@contextmanager
def linked(group: Any = SOLE, number: int = 1) -> Iterator[Linked]:
    pairs = [socket.socketpair() for _ in range(3)]
    ends = [[Channel(sock, RANK_CODEC, heartbeat_s=0.05) for sock in pair] for pair in pairs]
    (near, far), (engine, own), (_, drafts_own) = ends
    target = TargetMailbox(group, RankInbox(own), CPU, VOCAB_SIZE)
    target.add(ProposalLink(number, near, None))
    assert isinstance(far.receive(10), LinkOpened)
    draft = DraftMailbox(SOLE, RankInbox(drafts_own), CPU)
    draft.use(ProposalLink(number, far, None))
    target.use(number)
    try:
        yield Linked(target, draft, engine)
    finally:
        for channel in [each for pair in ends for each in pair]:
            channel.close()


def test_a_round_travels_with_the_distributions_it_was_sampled_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_PART_BYTES", 50)  # of 132
    q = torch.rand(3, 11)
    with linked() as link:
        link.draft.post(PLAN, pack_round(PLAN, {0: ROUND[0]._replace(q=q), 4: ROUND[4]}), 0.0)
        received = link.target.take(PLAN)
    assert torch.equal(received.proposals(PLAN)[0].q, q)
    assert received.proposals(PLAN)[4].q is None


@pytest.mark.parametrize(
    "proposals",
    [
        {1: ROUND[0]},  # a row that was not planned
        {5: ROUND[4]},  # one that another proposer drafts for
        {0: ROUND[0]._replace(generation=2)},
        {4: ROUND[0]},  # more drafts than planned
        {0: ROUND[0]._replace(tokens=[5, VOCAB_SIZE, 7])},
        {0: ROUND[0]._replace(tokens=[5, -2, 7])},
    ],
)
def test_a_malformed_round_is_lost_and_its_link_closed(proposals: dict[int, Proposal]) -> None:
    with linked() as link:
        link.draft.post(PLAN, pack_round(PLAN, proposals), 0.0)
        assert link.target.take(PLAN).proposals(PLAN) == {}
        assert link.target.has_lost_link


@pytest.mark.parametrize(("at", "value"), [(3, -1), (3, 3), (9, -1), (9, 4)])
def test_a_round_with_a_wrong_count_is_lost(at: int, value: int) -> None:
    message = PACKED.message.clone()
    message[at] = value  # of rows, or of the first row's drafts
    with linked() as link:
        link.draft.post(PLAN, PACKED._replace(message=message), 0.0)
        assert link.target.take(PLAN).proposals(PLAN) == {}
        assert link.target.has_lost_link


def test_a_round_costs_the_draft_its_time_and_the_transfer_the_rest() -> None:
    with linked() as link:
        later = threading.Timer(0.05, link.draft.post, (PLAN, PACKED, 0.01))
        later.start()
        received = link.target.take(PLAN)
        later.join()
        assert received.draft_s == 0.01 and received.transfer_s > 0.03
        link.draft.was_idle = False
        link.draft.post(PLAN, PACKED, 0.0)
        assert link.target.take(PLAN).transfer_s == 0, "it was catching up"


def test_every_rank_gets_what_the_first_received() -> None:
    def take(group: Any) -> object:
        if group.rank:
            other = TargetMailbox(group, RankInbox(idle), CPU, VOCAB_SIZE)
            other.use(1)
            return content(dict(other.take(PLAN).proposals(PLAN)))
        with linked(group) as link:
            rows = {0: ROUND[0]._replace(q=torch.ones(3, 5)), 4: ROUND[4]}
            link.draft.post(PLAN, pack_round(PLAN, rows), 0.0)
            return content(dict(link.target.take(PLAN).proposals(PLAN)))

    near, _far = socket.socketpair()
    with Channel(near, RANK_CODEC) as idle:
        received: Any = same_on_all(run_ranks(3, take))
    assert received[0][2] == [5, 6, 7]


def test_ranks_agree_that_a_round_is_lost() -> None:
    near, _far = socket.socketpair()
    with Channel(near, RANK_CODEC) as idle:

        def take(group: Any) -> object:
            target = TargetMailbox(group, RankInbox(idle), CPU, VOCAB_SIZE)
            target.use(1)  # which was never opened
            return dict(target.take(PLAN).proposals(PLAN))

        assert run_ranks(2, take) == [{}, {}]


def test_a_released_round_is_lost_and_later_messages_of_the_engine_are_not() -> None:
    with linked() as link:
        link.engine.send(StepPlans(1, (PLAN,)))
        threading.Timer(0.05, link.engine.send, (ReleaseLink(1),)).start()
        assert link.target.take(PLAN).proposals(PLAN) == {}
        assert link.target.has_lost_link
        assert link.target._inbox.receive() == StepPlans(1, (PLAN,))


def test_a_long_wait_is_reported_once_and_shared_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_WAIT_S", 0.05)

    def take(group: Any) -> object:
        waits: list[int] = []
        if group.rank:
            other = TargetMailbox(group, RankInbox(idle), CPU, VOCAB_SIZE, waits.append)
            other.use(1)
            return content(dict(other.take(PLAN).proposals(PLAN))), waits
        with linked(group) as link:
            link.target._on_long_wait = waits.append
            threading.Timer(0.3, link.draft.post, (PLAN, PACKED, 0.0)).start()
            return content(dict(link.target.take(PLAN).proposals(PLAN))), waits

    near, _far = socket.socketpair()
    with Channel(near, RANK_CODEC) as idle:
        received: Any = same_on_all(run_ranks(2, take))
    assert received == (content(ROUND), [PLAN.step])


def test_a_draft_that_hangs_between_the_parts_of_a_round_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_PART_BYTES", 50)
    with linked() as link:
        channel = link.draft._link.channel  # type: ignore[union-attr]
        send = channel.send
        monkeypatch.setattr(
            channel, "send", lambda each: None if isinstance(each, RoundPart) else send(each)
        )
        link.draft.post(PLAN, pack_round(PLAN, {0: ROUND[0]._replace(q=torch.rand(3, 11))}), 0.0)
        threading.Timer(0.05, link.engine.send, (ReleaseLink(1),)).start()
        assert link.target.take(PLAN).proposals(PLAN) == {}


@pytest.mark.parametrize("packed", [b"", b"1234", bytes(80)])
def test_a_malformed_round_is_lost_and_nothing_more(packed: bytes) -> None:
    with linked() as link:
        link.draft._link.channel.send(RoundMail(PLAN.step, 0.0, True, packed))  # type: ignore[union-attr]
        assert link.target.take(PLAN).proposals(PLAN) == {}
        assert link.target.has_lost_link


def test_outcomes_that_come_late_keep_no_rank_of_a_draft_in_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_WAIT_S", 0.05)
    near, _far = socket.socketpair()
    with Channel(near, RANK_CODEC) as idle, linked() as link:
        threading.Timer(0.3, link.target.end, (PLAN, OUTCOME)).start()

        def receive(group: Any) -> object:
            if group.rank:
                return verdicts(DraftMailbox(group, RankInbox(idle), CPU))
            link.draft._group = group
            found = verdicts(link.draft)
            assert len(group.calls) > 3, "it was shared that nothing has come"
            return found

        outcomes: Any = same_on_all(run_ranks(2, receive))
    assert outcomes[0].rows[0].tokens == (7, 8, 9)


def test_a_release_of_an_earlier_link_ends_no_wait() -> None:
    with linked(number=2) as link:
        link.engine.send(ReleaseLink(1))
        threading.Timer(0.05, link.draft.post, (PLAN, PACKED, 0.0)).start()
        assert content(dict(link.target.take(PLAN).proposals(PLAN))) == content(ROUND)


@pytest.mark.parametrize("sent", ["another step", "an outcome", "nothing more"])
def test_a_draft_that_sends_something_else_is_lost_and_nothing_more(sent: str) -> None:
    with linked() as link:
        channel = link.draft._link.channel  # type: ignore[union-attr]
        if sent == "another step":
            link.draft.post(replace(PLAN, step=9), PACKED, 0.0)
        elif sent == "an outcome":
            channel.send(OutcomeMail(()))
        else:
            channel.close()
        assert link.target.take(PLAN).proposals(PLAN) == {}
        assert link.target.has_lost_link
        assert link.target.take(PLAN).proposals(PLAN) == {}, "a lost link stays lost"
        link.target.end(PLAN, OUTCOME)  # and nothing fails for it


def test_a_draft_gets_what_was_committed_and_no_logprobs() -> None:
    with linked() as link:
        link.target.begin(PLAN)
        link.target.end(PLAN, OUTCOME)
        [outcome] = link.draft.receive()
    sampled = VERDICT.rows[0]._replace(logprobs=(), prompt_logprobs=())
    assert outcome.verdict() == Verdict(2, 7, (sampled,))


def verdicts(draft: DraftMailbox) -> list[Verdict]:
    return [each.verdict() for each in draft.receive()]


def test_all_ranks_of_a_draft_get_the_outcomes() -> None:
    near, _far = socket.socketpair()
    with Channel(near, RANK_CODEC) as idle, linked() as link:
        link.target.end(PLAN, OUTCOME)

        def receive(group: Any) -> object:
            if group.rank:
                return verdicts(DraftMailbox(group, RankInbox(idle), CPU))
            link.draft._group = group
            return verdicts(link.draft)

        outcomes: Any = same_on_all(run_ranks(2, receive))
    [outcome] = outcomes
    assert outcome.rows[0].tokens == (7, 8, 9)


def test_heartbeats_of_an_idle_link_block_no_outcome() -> None:
    sockets = socket.socketpair()
    sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    near, far = (Channel(each, RANK_CODEC, heartbeat_s=0.001) for each in sockets)
    engine, own = (Channel(each, RANK_CODEC) for each in socket.socketpair())
    draft = RankInbox(own)
    mail = DraftMailbox(SOLE, draft, CPU)
    mail.use(ProposalLink(1, far, None))
    with near, far, engine, own:
        waiting = threading.Thread(target=draft.receive)
        waiting.start()
        time.sleep(1.0)  # the heartbeats of a day
        for _ in range(20):
            near.send(OutcomeMail((OUTCOME.to_bytes(),)))
            time.sleep(0.02)
        assert near._send_failure is None and not near._unsent
        engine.send(StepPlans(1, ()))
        waiting.join(10)
        assert not waiting.is_alive()
        assert [each.step for each in mail.receive()] == [VERDICT.step]


# -- which outcomes travel together ---------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=300))
def test_both_ends_see_the_same_batches_and_no_outcome_is_late(uses_draft: list[bool]) -> None:
    sender: OutcomeBatches[int] = OutcomeBatches()
    receiver: OutcomeBatches[int] = OutcomeBatches()
    sent: list[list[int]] = []
    expected: list[list[int]] = []
    for step, uses in enumerate(uses_draft):
        sent += filter(None, [sender.before(uses_draft=uses)])
        expected += filter(None, [receiver.before(uses_draft=uses)])
        assert sent == expected
        if uses:
            assert [each for batch in sent for each in batch] == list(range(step))
        sent += filter(None, [sender.after(step, uses_draft=uses)])
        expected += filter(None, [receiver.after(step, uses_draft=uses)])
        assert sum(map(len, sent)) > step - MAX_BATCH
