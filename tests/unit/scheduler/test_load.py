"""A busy scheduler: no request is starved by drafts, by others or by ended requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scheduler_tools import Simulation, make_request, name_of

from outrider.catalog.proposers import DRAFT
from outrider.errors import CapacityError
from outrider.scheduler.depths import DepthChoice, DepthSnapshot
from outrider.scheduler.pool import BlockPool, Node
from outrider.scheduler.types import StepPlan


def crowd(num_rows: int, depth: int, *, lag: int, budget: int, **fields: int) -> Simulation:
    simulation = Simulation(
        num_blocks=4096,
        draft_blocks=4096,
        block_size=16,
        max_num_seqs=num_rows + fields.pop("free_rows", 0),
        budget=budget,
        lag=lag,
        acceptance=[0, 1, 2, 3],
    )
    for index in range(num_rows):
        request = make_request(f"r{index}", [1, 2, index], 400, proposer=DRAFT, depth=depth)
        simulation.add(request)
    return simulation


def stepped(simulation: Simulation) -> StepPlan:
    plan = simulation.step()
    assert plan is not None
    return plan


# -- the draft's own work --------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_rows_that_keep_step_all_draft_in_every_step(lag: int) -> None:
    """They cost the draft two tokens each, whatever plans in flight may commit."""
    simulation = crowd(48, 2, lag=lag, budget=48 * 3)
    stepped(simulation)
    stepped(simulation)
    for _ in range(20):
        rows = stepped(simulation).rows
        assert [row.depth for row in rows] == [2] * 48
        assert all(row.draft_tokens <= 2 for row in rows)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_row_that_fell_behind_catches_up_in_a_plain_step_beside_drafting_neighbours(
    lag: int,
) -> None:
    wants = {"r1": False}

    def policy(snapshot: DepthSnapshot) -> DepthChoice:
        depths = list(snapshot.max_depths)
        if not wants["r1"]:
            depths[1] = 0
        return DepthChoice(depths)

    simulation = Simulation(num_blocks=512, draft_blocks=512, lag=lag, choose_depths=policy)
    for index in range(3):
        simulation.add(make_request(f"r{index}", [1, 2, index], 200, proposer=DRAFT, depth=2))
    for _ in range(12):
        plan = stepped(simulation)
    assert [row.depth for row in plan.rows] == [2, 0, 2]
    assert plan.rows[1].draft_tokens == 0, "it has no drafts, so the draft computes nothing"
    wants["r1"] = True
    plan = stepped(simulation)
    assert [row.depth for row in plan.rows] == [2, 0, 2]
    assert plan.rows[1].draft_tokens > 2
    plan = stepped(simulation)
    assert [row.depth for row in plan.rows] == [2, 2, 2]
    simulation.drain()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_draft_that_comes_back_is_soon_drafting_for_all_again(lag: int) -> None:
    simulation = crowd(6, 3, lag=lag, budget=64)
    for _ in range(5):
        stepped(simulation)
    simulation.lose_draft()
    for _ in range(4):
        plan = stepped(simulation)
    assert not any(row.depth for row in plan.rows)
    simulation.regain_draft()
    for _ in range(8):
        plan = stepped(simulation)
    assert [row.depth for row in plan.rows] == [3] * 6


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_blocks", [50, 400])
def test_another_draft_has_a_pool_of_its_own_size(lag: int, num_blocks: int) -> None:
    simulation = crowd(6, 3, lag=lag, budget=64)
    for _ in range(5):
        stepped(simulation)
    simulation.lose_draft()
    for _ in range(4):
        stepped(simulation)
    simulation.scheduler.expect_draft(num_blocks)
    simulation.regain_draft()
    for _ in range(8):
        plan = stepped(simulation)
        simulation.scheduler.check_integrity()
        assert all(block < num_blocks for row in plan.rows for block in row.draft_blocks)
    assert simulation.scheduler.draft_pool.num_blocks == num_blocks
    assert any(row.depth for row in plan.rows)
    assert all(row.depth for row in plan.rows) == (num_blocks == 400)


# -- prompts and drafts ----------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_deep_drafts_do_not_keep_a_short_request_waiting(lag: int) -> None:
    simulation = crowd(16, 32, lag=lag, budget=512, free_rows=4)
    for _ in range(3):
        stepped(simulation)
    simulation.add(make_request("short", [7] * 8, 4))
    assert [name_of(init.sample_id) for init in stepped(simulation).admitted] == ["short"]


def test_a_long_prompt_advances_by_half_of_what_decoding_leaves() -> None:
    simulation = crowd(16, 32, lag=0, budget=512, free_rows=4)
    for _ in range(3):
        stepped(simulation)
    simulation.add(make_request("long", [7] * 4000, 4))
    for _ in range(4000 // 248 + 1):
        plan = stepped(simulation)
        assert any(row.num_tokens > 1 for row in plan.rows)
        assert sum(row.depth for row in plan.rows) > 200, "and drafts have the other half"
    assert plan.rows[0].samples, "the prompt is computed"


def test_without_drafts_prompts_have_the_whole_pass() -> None:
    simulation = crowd(4, 0, lag=0, budget=64, free_rows=4)
    stepped(simulation)
    simulation.add(make_request("long", [7] * 100, 4))
    assert stepped(simulation).rows[0].num_tokens == 60


# -- the queue -------------------------------------------------------------------------------


def test_a_resumed_request_is_let_in_however_many_wait() -> None:
    simulation = Simulation(max_num_seqs=1, max_waiting=1)
    for name in "ab":
        simulation.add(make_request(name, [1], 4))
        simulation.step()
    with pytest.raises(CapacityError, match="max_waiting"):
        simulation.add(make_request("c", [1], 4))
    simulation.add(make_request("resumed", [1], 4, output_ids=[5]), is_resumed=True)
    simulation.add(make_request("resumed before its first token", [1], 4), is_resumed=True)
    simulation.drain()


def test_samples_that_wait_for_a_siblings_prompt_count_as_waiting() -> None:
    simulation = Simulation(max_num_seqs=1, max_waiting=3)
    simulation.add(make_request("a/0", [1, 2], 4))
    for index in (1, 2):
        simulation.add(make_request(f"a/{index}", [1, 2], 4), after="a/0")
    assert simulation.scheduler.num_waiting == 3
    with pytest.raises(CapacityError, match="3 requests are waiting"):
        simulation.add(make_request("b", [1], 4))
    simulation.cancel("a/1")
    assert simulation.scheduler.num_waiting == 2
    simulation.drain()


def test_requests_that_ended_in_time_are_not_kept_until_their_deadline() -> None:
    simulation = Simulation()
    for index in range(200):
        simulation.add(make_request(f"r{index}", [1], 1, deadline_s=1e9))
        simulation.drain()
    assert simulation.scheduler.num_watched <= 32


def test_requests_cancelled_while_they_wait_do_not_pile_up() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add(make_request("running", [1], 200))
    simulation.step()
    for index in range(200):
        simulation.add(make_request(f"r{index}", [1], 4))
        simulation.cancel(f"r{index}")
    assert simulation.scheduler.num_waiting == 0
    assert simulation.scheduler.num_queue_entries <= 32
    simulation.drain()


def test_a_blocked_head_of_the_queue_is_not_matched_anew_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(num_blocks=16, block_size=4)
    simulation.add(make_request("running", [1] * 8, 40))
    simulation.step()
    simulation.add(make_request("blocked", [2] * 56, 4))
    matched: list[int] = []
    match = BlockPool.match

    def counted(
        pool: BlockPool, tokens: Sequence[int], root: Node, **options: bool
    ) -> tuple[list[int], Node]:
        matched.append(len(tokens))
        return match(pool, tokens, root, **options)

    monkeypatch.setattr(BlockPool, "match", counted)
    for _ in range(12):
        simulation.step()
    assert matched.count(56) <= 1
    simulation.drain()
    assert simulation.records["blocked"].finish_reason == "length"
