"""The fake workers are an adversary: each kind of broken plan must be noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduler_tools import Simulation, make_request

from outrider.catalog.proposers import DRAFT, traits
from outrider.engine.step import StepLoop
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.pool import BlockPool
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Agreement, StepPlan, Ticket, Verdict
from outrider.testing.fake_kv import BrokenPlan, FakeKV, text_hashes
from outrider.testing.fake_workers import FakeWorkers

HASHES = text_hashes([1, 2, 3, 4])


def kv_with_row(num_tokens: int = 4) -> FakeKV:
    """Row 0 has its four tokens in blocks 0 and 1."""
    kv = FakeKV("target", 4, 2)
    kv.open(0, 0)
    kv.extend_table(0, 0, [0, 1])
    kv.write(0, 0, HASHES[:num_tokens])
    kv.computed[0] = num_tokens
    return kv


def test_a_row_reads_what_it_wrote() -> None:
    kv_with_row().read(0, HASHES)


def test_reading_kv_of_another_text_is_noticed() -> None:
    with pytest.raises(BrokenPlan, match="another text in block 0"):
        kv_with_row().read(0, text_hashes([9, 2, 3, 4]))


def test_reading_what_was_never_written_is_noticed() -> None:
    with pytest.raises(BrokenPlan, match="another text in block 1"):
        kv_with_row(num_tokens=3).read(0, HASHES)


def test_a_position_without_a_block_is_noticed() -> None:
    with pytest.raises(BrokenPlan, match="no block for position 4"):
        kv_with_row().write(0, 4, [7])


def test_giving_away_a_block_with_valid_kv_is_noticed() -> None:
    kv = kv_with_row()
    kv.open(1, 0)
    with pytest.raises(BrokenPlan, match="block 1 holds KV of row 0"):
        kv.extend_table(1, 0, [1])


def test_returned_lookahead_may_go_to_another_row_but_not_be_used_again() -> None:
    kv = kv_with_row(num_tokens=2)
    kv.open(1, 0)
    kv.extend_table(1, 0, [1])
    with pytest.raises(BrokenPlan, match="no block for position 2"):
        kv.write(0, 2, [7])


def test_writing_into_a_shared_prefix_is_noticed() -> None:
    kv = kv_with_row()
    kv.open(1, 2)
    kv.extend_table(1, 0, [0, 2])
    kv.read(1, HASHES[:2])
    with pytest.raises(BrokenPlan, match="writes block 0 of rows"):
        kv.write(0, 1, [7])


def test_a_cached_prefix_of_another_text_is_noticed() -> None:
    kv = kv_with_row()
    kv.open(1, 2)
    kv.extend_table(1, 0, [1])
    with pytest.raises(BrokenPlan, match="another text in block 1"):
        kv.read(1, HASHES[:2])


def test_a_gap_in_a_table_is_noticed() -> None:
    with pytest.raises(BrokenPlan, match="would have a gap"):
        kv_with_row().extend_table(0, 3, [2])


def test_replacing_valid_kv_is_noticed() -> None:
    with pytest.raises(BrokenPlan, match="valid KV is replaced"):
        kv_with_row().extend_table(0, 1, [2])


def plan_to_break() -> tuple[Simulation, StepPlan]:
    simulation = Simulation(budget=8)
    simulation.add(make_request("a", [1, 2, 3], 20, proposer=DRAFT, depth=2))
    simulation.step()
    plan = simulation.scheduler.plan(0.0)
    assert plan is not None
    return simulation, plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation": 5}, "another generation"),
        ({"row": 3}, "never admitted"),
        ({"num_tokens": 2}, "5 of 4 computed"),
        ({"samples": False}, "samples at 4 of 4"),
        ({"num_verified": 8}, "8 may be"),
        ({"depth": 0}, "depth and proposer disagree"),
        ({"draft_tokens": 0}, "drafts from 0 tokens"),
        ({"draft_tokens": 9}, "drafts from 9 tokens"),
        ({"depth": 0, "proposer": "", "draft_tokens": 9}, "9 for the draft; 8 may be"),
        ({"target_blocks": (0,), "target_start": 1}, "already|valid KV|holds KV"),
    ],
)
def test_a_broken_row_is_noticed(change: dict[str, Any], message: str) -> None:
    simulation, plan = plan_to_break()
    broken = replace(plan, rows=(plan.rows[0]._replace(**change),))
    with pytest.raises(BrokenPlan, match=message):
        simulation.workers.verify(broken, simulation.workers.propose(broken))


def test_a_row_named_twice_is_noticed() -> None:
    simulation, plan = plan_to_break()
    with pytest.raises(BrokenPlan, match="repeats a row"):
        simulation.workers.propose(replace(plan, rows=plan.rows * 2))


def test_admitting_a_row_in_use_is_noticed() -> None:
    simulation, plan = plan_to_break()
    init = simulation.records["a"].request.row_init()
    with pytest.raises(BrokenPlan, match="still in use"):
        simulation.workers.propose(replace(plan, admitted=(init,)))


def test_a_generation_that_comes_again_is_noticed() -> None:
    simulation, plan = plan_to_break()
    init = simulation.records["a"].request.row_init()
    with pytest.raises(BrokenPlan, match="has generation 1 again"):
        simulation.workers.propose(replace(plan, released=(init.row,), admitted=(init,)))


def test_releasing_an_unused_row_is_noticed() -> None:
    simulation, plan = plan_to_break()
    with pytest.raises(BrokenPlan, match="released but not in use"):
        simulation.workers.propose(replace(plan, released=(5,)))


def test_a_new_epoch_drops_all_rows() -> None:
    simulation, plan = plan_to_break()
    with pytest.raises(BrokenPlan, match="never admitted"):
        simulation.workers.propose(replace(plan, epoch=1))


@pytest.mark.parametrize("num_accepted", range(5))
def test_the_script_decides_how_many_drafts_are_accepted(num_accepted: int) -> None:
    simulation = Simulation(acceptance=[num_accepted])
    simulation.add(make_request("a", [1, 2], 40, proposer=DRAFT, depth=4))
    simulation.step()
    simulation.step()
    assert simulation.scheduler.stats.accepted_tokens == num_accepted


def test_an_acceptance_rate_is_met_on_average() -> None:
    simulation = Simulation(acceptance=0.5, num_blocks=150, draft_blocks=150)
    record = simulation.add(make_request("a", [1, 2], 400, proposer=DRAFT, depth=1))
    simulation.drain()
    assert 0.4 < record.num_accepted / record.num_drafted < 0.6


def test_the_step_loop_runs_on_the_fake_workers_alone() -> None:
    """They are a target and a source of proposals, as the protocols of the loop have it."""
    workers = FakeWorkers(64, 64, 4, max_num_batched_tokens=16, acceptance=0.5)
    limits = SchedulerLimits(4, 16, 1, 10.0, None)
    scheduler = Scheduler(
        limits, BlockPool(64, 4, True), BlockPool(64, 4, True), traits(has_draft_model=True)
    )
    loop = StepLoop(scheduler, proposers=workers, target=workers)
    prompt, num_tokens = list(range(20)), 30
    request = make_request("a", prompt, num_tokens, proposer=DRAFT, depth=3)
    scheduler.add(request)
    tokens: list[int] = []
    while scheduler.has_work:
        tokens += [token for update in loop.step(0.0) for token in update.token_ids]
    text = text_hashes(prompt)[-1]
    assert tokens == workers.model.continuation(text, request.seed, num_tokens)
    assert scheduler.stats.drafted_tokens > scheduler.stats.accepted_tokens > 0


def test_what_a_row_only_catches_up_on_is_written_with_the_next_plan() -> None:
    """As real drafts do, whose first tokens must not wait: it may not be read before."""
    simulation = Simulation(num_blocks=8, draft_blocks=8)
    simulation.add(make_request("a", [1, 2, 3, 4], 20, proposer=DRAFT, depth=2))
    simulation.step()
    kv = simulation.workers.draft_kv
    hashes = text_hashes([1, 2, 3, 4])
    with pytest.raises(BrokenPlan, match="another text"):
        kv.read(0, hashes)
    simulation.step()
    kv.read(0, hashes)


def caught_up_output(acceptance: float | list[int]) -> list[Agreement]:
    """Agreements of a request that resumes with output which the draft has not computed."""
    simulation = Simulation(acceptance=acceptance)
    found: list[Agreement] = []
    verify = simulation.workers.verify

    def watched(plan: StepPlan, ticket: Ticket) -> Verdict:
        verdict = verify(plan, ticket)
        found.extend(verdict.agreements)
        return verdict

    simulation.workers.verify = watched  # type: ignore[method-assign]
    output = list(range(20))
    simulation.add(
        make_request("a", [1, 2, 3], max_len=40, output_ids=output, proposer=DRAFT, depth=2)
    )
    simulation.drain()
    return found


@pytest.mark.parametrize(("acceptance", "is_right"), [(1.0, True), (0.0, False), ([3], True)])
def test_agreement_of_output_that_is_caught_up_on_is_reported(
    acceptance: float | list[int], is_right: bool
) -> None:
    [found] = caught_up_output(acceptance)
    assert found.hits == (is_right,) * 21


def test_only_as_many_drafts_are_verified_as_a_plan_selects() -> None:
    simulation = Simulation(acceptance=1.0)
    for name in ("a", "b"):
        simulation.add(make_request(name, [1, ord(name)], 20, proposer=DRAFT, depth=4))
    simulation.step()
    simulation.step()
    plan = simulation.scheduler.plan(0.0)
    assert plan is not None and [row.depth for row in plan.rows] == [4, 4]
    workers = simulation.workers
    selected = replace(plan, num_selected=3)
    verdict = workers.verify(selected, workers.propose(selected))
    assert [row.num_drafted for row in verdict.rows] == [4, 4]
    assert sum(row.num_verified for row in verdict.rows) == 3
    assert [row.num_accepted for row in verdict.rows] == [row.num_verified for row in verdict.rows]
    simulation.scheduler.apply(verdict)
    simulation.drain()


def test_a_selection_of_drafts_is_what_counts_for_the_pass() -> None:
    simulation, plan = plan_to_break()
    wide = plan.rows[0]._replace(depth=9, num_verified=9)
    broken = replace(plan, rows=(wide,), num_selected=8)
    with pytest.raises(BrokenPlan, match="9 tokens, 0 for the draft; 8 may be"):
        simulation.workers.propose(broken)
