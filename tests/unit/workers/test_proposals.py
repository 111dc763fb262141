"""Rounds of proposals as messages of a size the plan tells, and what becomes of a lost one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from rank_threads import run_ranks, same_on_all
from rendezvous import SECRET, OpenRendezvous

from outrider.catalog.proposers import DRAFT, NGRAM
from outrider.scheduler.types import Proposal, RowPlan, StepPlan
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.ranks.proposal_link import (
    ProposalInbox,
    ProposalLink,
    pack_round,
    unpack_round,
)

CPU = torch.device("cpu")


def planned(row: int, depth: int, proposer: str = DRAFT) -> RowPlan:
    return RowPlan(row, 1, 1, depth, depth, True, proposer, 0, (), 0, (), 1)


PLAN = StepPlan(2, 7, (planned(0, 3), planned(4, 2), planned(5, 4, NGRAM)))
NUMBER = 41  # of the round
ROUND = {
    0: Proposal(1, 20, [5, 6, 7], [0.5, 0.25, 1e-9]),
    4: Proposal(1, 2**40, [9], [1.0]),
}


def content(proposals: dict[int, Proposal] | None) -> dict[int, tuple[object, ...]] | None:
    if proposals is None:
        return None
    return {row: tuple(map(_plain, proposal)) for row, proposal in proposals.items()}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_a_round_comes_out_as_it_went_in() -> None:
    assert content(unpack_round(PLAN, NUMBER, pack_round(PLAN, NUMBER, ROUND), None)) == content(
        ROUND
    )


def test_the_size_of_a_message_depends_on_the_plan_alone() -> None:
    sizes = {pack_round(PLAN, NUMBER, part).shape for part in (ROUND, {4: ROUND[4]}, {})}
    assert len(sizes) == 1


def test_rows_the_draft_had_nothing_for_are_left_out() -> None:
    assert unpack_round(PLAN, NUMBER, pack_round(PLAN, NUMBER, {}), None) == {}


@pytest.mark.parametrize(("epoch", "number"), [(2, 42), (3, 41)])
def test_a_message_of_another_round_or_engine_is_dropped(epoch: int, number: int) -> None:
    other = StepPlan(epoch, 7, PLAN.rows)
    assert unpack_round(PLAN, NUMBER, pack_round(other, number, ROUND), None) is None


def test_an_empty_message_is_a_lost_round() -> None:
    message = torch.zeros_like(pack_round(PLAN, NUMBER, ROUND))
    assert unpack_round(PLAN, NUMBER, message, None) is None


def linked_pair() -> tuple[ProposalLink, ProposalLink]:
    """Both ends of a proposal group, met through a board."""
    made: dict[bool, ProposalLink] = {}
    with OpenRendezvous() as board:

        def make(is_target: bool) -> None:
            made[is_target] = ProposalLink(board.store(), 1, CPU, 10.0, is_target=is_target)

        threads = [threading.Thread(target=make, args=(side,)) for side in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return made[True], made[False]


def test_a_round_travels_with_the_distributions_it_was_sampled_from() -> None:
    target, draft = linked_pair()
    greeting = threading.Thread(target=draft.greet)
    greeting.start()
    target.await_greeting()
    greeting.join(30)
    q = torch.rand(3, 11)
    proposals = {0: ROUND[0]._replace(q=q), 4: ROUND[4]}
    draft.send(PLAN, NUMBER, proposals)
    inbox = ProposalInbox(SingleRankGroup(), CPU)
    inbox.connect(target)
    received = inbox.take(PLAN, NUMBER)
    assert received is not None and received[0].q is not None
    assert torch.equal(received[0].q, q)
    assert received[4].q is None
    assert (draft.backend, draft.num_sends) == ("gloo", 1)


def test_every_rank_gets_what_the_first_received() -> None:
    target, draft = linked_pair()
    draft.send(PLAN, NUMBER, {0: ROUND[0]._replace(q=torch.ones(3, 5)), 4: ROUND[4]})

    def take(group: object) -> object:
        inbox = ProposalInbox(group, CPU)  # type: ignore[arg-type]
        if group.rank == 0:  # type: ignore[attr-defined]
            inbox.connect(target)
        return content(inbox.take(PLAN, NUMBER))

    received = same_on_all(run_ranks(3, take))
    assert received is not None
    assert received[0][2] == [5, 6, 7]  # type: ignore[index]


def test_ranks_agree_that_a_round_is_lost() -> None:
    def take(group: object) -> object:
        return ProposalInbox(group, CPU).take(PLAN, NUMBER)  # type: ignore[arg-type]

    assert run_ranks(2, take) == [None, None]


# Meets the test in a proposal group, then dies where a draft would send.
DYING_DRAFT = """
import os, signal, sys, torch
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.ranks.proposal_link import ProposalLink
store = LinkStore(sys.argv[1], sys.argv[2], 30.0)
link = ProposalLink(store, 1, torch.device("cpu"), 10.0, is_target=False)
link.greet()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.model
def test_a_draft_that_dies_after_announcing_costs_its_round_and_nothing_else() -> None:
    with OpenRendezvous() as board:
        command = [sys.executable, "-c", DYING_DRAFT, board.address, SECRET]
        process = subprocess.Popen(command, env=dict(os.environ))
        try:
            link = ProposalLink(board.store(), 1, CPU, 10.0, is_target=True)
            link.await_greeting()
            inbox = ProposalInbox(SingleRankGroup(), CPU)
            inbox.connect(link)
            assert inbox.take(PLAN, NUMBER) is None
            assert inbox.take(PLAN, NUMBER) is None, "a lost link stays lost"
        finally:
            process.kill()
            process.wait()
