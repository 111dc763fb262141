"""What a step plans and what its verdict changes: lookahead, preemption, plans in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduler_tools import Simulation, make_request, sample_id

from outrider.catalog import proposers as catalog
from outrider.catalog.proposers import DRAFT, NGRAM, info_of
from outrider.errors import CapacityError, OutriderError
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.planner import SchedulerLimits
from outrider.scheduler.request import RequestState
from outrider.scheduler.types import NO_PROPOSER, FinishReason, RowPlan, StepPlan, Ticket, Verdict


def planned(simulation: Simulation) -> StepPlan:
    plan = simulation.step()
    assert plan is not None
    return plan


def outcome(simulation: Simulation, plan: StepPlan) -> Verdict:
    """The workers' part of a step, for tests that apply by hand."""
    ticket: Ticket = simulation.workers.propose(plan)
    verdict = simulation.workers.verify(plan, ticket)
    simulation.workers.observe(verdict)
    return verdict


# -- prompts and budget ---------------------------------------------------------------------


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    simulation = Simulation(max_num_seqs=1, budget=5)
    simulation.add(make_request("a", list(range(12)), 1))
    chunks = [planned(simulation).rows[0] for _ in range(3)]
    assert [(chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (5, False),
        (5, False),
        (2, True),
    ]


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    simulation = Simulation(budget=8)
    simulation.add(make_request("old", [1, 2], 20))
    simulation.step()
    simulation.add(make_request("new", list(range(30)), 1))
    rows = planned(simulation).rows
    assert [(row.num_tokens, row.samples) for row in rows] == [(7, False), (1, True)]


def test_drafts_leave_one_token_of_the_budget_to_every_running_request() -> None:
    simulation = Simulation(max_num_seqs=4, budget=6)
    for name in "abcd":
        simulation.add(make_request(name, [1], 20, proposer=NGRAM, depth=5))
    simulation.step()
    rows = planned(simulation).rows
    assert sorted(row.depth for row in rows) == [0, 0, 1, 1]


def test_a_budget_below_the_number_of_rows_is_refused() -> None:
    with pytest.raises(CapacityError, match="max_num_batched_tokens is 3.*max_num_seqs .4."):
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=3)


def test_a_row_without_depth_gets_no_draft_work() -> None:
    simulation = Simulation()
    simulation.add(make_request("a", [1, 2, 3], 6, proposer=DRAFT, depth=0))
    while simulation.scheduler.has_work:
        row = planned(simulation).rows[0]
        assert (row.proposer, row.depth, row.draft_tokens) == (NO_PROPOSER, 0, 0)
    assert simulation.draft_pool.num_free == simulation.draft_pool.num_blocks


def test_drafts_never_reach_beyond_the_last_token() -> None:
    simulation = Simulation(acceptance=[0])
    simulation.add(make_request("a", [1, 2, 3], 4, proposer=NGRAM, depth=5))
    depths = []
    while simulation.scheduler.has_work:
        depths.append(planned(simulation).rows[0].depth)
    assert depths == [0, 2, 1, 0]


# -- lookahead ------------------------------------------------------------------------------


def test_lookahead_is_reserved_before_the_pass_and_returned_after_a_rejection() -> None:
    simulation = Simulation(block_size=2, acceptance=[0])
    simulation.add(make_request("a", [1, 2, 3], 20, proposer=DRAFT, depth=6))
    simulation.step()
    row = planned(simulation).rows[0]
    assert row.depth == 6
    assert row.target_start + len(row.target_blocks) == 5  # 4 tokens and 6 drafts
    assert simulation.target_pool.num_blocks - simulation.target_pool.num_free == 3


def test_accepted_drafts_keep_their_blocks() -> None:
    simulation = Simulation(block_size=2, acceptance=[6])
    simulation.add(make_request("a", [1, 2, 3], 20, proposer=DRAFT, depth=6))
    simulation.step()
    simulation.step()
    assert simulation.target_pool.num_blocks - simulation.target_pool.num_free == 5


def test_returned_blocks_are_announced_again_from_their_place_in_the_table() -> None:
    simulation = Simulation(block_size=2, acceptance=[0])
    simulation.add(make_request("a", [1, 2, 3], 20, proposer=DRAFT, depth=6))
    simulation.step()
    simulation.step()
    row = planned(simulation).rows[0]
    assert row.target_start == 3
    assert len(row.target_blocks) == 3  # 5 tokens and 6 drafts


@pytest.mark.parametrize("lag", [0, 1])
def test_after_full_acceptance_the_draft_catches_up_on_two_tokens(lag: int) -> None:
    simulation = Simulation(acceptance=[3], lag=lag)
    record = simulation.add(make_request("a", [1, 2, 3], 30, proposer=DRAFT, depth=3))
    simulation.drain()
    assert record.num_accepted == record.num_drafted > 0


def _text_only(computed: int, fed: int, drafted: int, accepted: int, base_len: int) -> int:
    """Of a proposer that keeps nothing of its drafts."""
    return computed + fed


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("max_behind", [2, 4])
def test_scheduler_and_workers_go_by_the_kv_rule_and_the_lag_of_the_registration(
    monkeypatch: pytest.MonkeyPatch, max_behind: int, lag: int
) -> None:
    """Three accepted drafts leave this proposer four tokens behind."""
    own = replace(info_of(DRAFT).traits, kv_rule=_text_only, max_behind=max_behind)
    monkeypatch.setitem(catalog._infos, DRAFT, replace(info_of(DRAFT), traits=own))
    simulation = Simulation(acceptance=[3 if max_behind == 4 else 1], lag=lag)
    record = simulation.add(make_request("a", [1, 2, 3], 30, proposer=DRAFT, depth=3))
    rows: list[RowPlan] = []
    while simulation.scheduler.has_work:
        plan = simulation.step()
        rows += [] if plan is None else plan.rows
    assert max(row.draft_tokens for row in rows if row.depth) == max_behind
    assert record.num_accepted > 0


def test_a_row_further_behind_than_its_proposer_may_be_does_not_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = replace(info_of(DRAFT).traits, kv_rule=_text_only)
    monkeypatch.setitem(catalog._infos, DRAFT, replace(info_of(DRAFT), traits=own))
    simulation = Simulation(acceptance=[3])
    simulation.add(make_request("a", [1, 2, 3], 30, proposer=DRAFT, depth=3))
    rows = [planned(simulation).rows[0] for _ in range(6)]
    assert [row.draft_tokens for row in rows] == [3, 1, 4, 1, 4, 1]
    assert [bool(row.depth) for row in rows] == [False, True] * 3


def test_a_draft_too_far_behind_for_the_budget_catches_up_before_it_drafts() -> None:
    simulation = Simulation(max_num_seqs=2, budget=4, num_blocks=32, draft_blocks=32)
    prompt = list(range(17))
    simulation.add(make_request("first", prompt, 4))
    simulation.drain()
    second = simulation.add(make_request("second", prompt, 20, proposer=DRAFT, depth=2))
    rows = [planned(simulation).rows[0] for _ in range(9)]
    assert second.num_cached_tokens == 16
    caught_up = [row.draft_tokens for row in rows if not row.depth]
    assert caught_up[:5] == [4, 4, 4, 4, 1], "the prompt first"
    assert max(caught_up[5:]) <= 4, "then what was written meanwhile"
    assert rows[-1].depth == 2


def test_without_draft_memory_a_row_decodes_plainly() -> None:
    simulation = Simulation(draft_blocks=1, block_size=4)
    record = simulation.add(make_request("a", list(range(9)), 8, proposer=DRAFT, depth=3))
    simulation.drain()
    assert record.num_drafted == 0


def test_drafts_shrink_to_the_last_block_before_anybody_is_preempted() -> None:
    simulation = Simulation(num_blocks=5, block_size=4, max_num_seqs=2)
    for name in "ab":
        simulation.add(make_request(name, [ord(name), 2, 3, 4, 5], 5, proposer=NGRAM, depth=6))
    simulation.step()
    rows = planned(simulation).rows
    assert [row.depth for row in rows] == [3, 2]
    simulation.drain()
    assert simulation.scheduler.num_preemptions == 0


def test_lookahead_leaves_the_block_another_row_needs_next() -> None:
    simulation = Simulation(num_blocks=4, block_size=4, max_num_seqs=2, acceptance=[0])
    simulation.add(make_request("a", [1, 2], 8, proposer=NGRAM, depth=6))
    simulation.add(make_request("b", [3, 4, 5, 6], 4))
    simulation.step()
    rows = planned(simulation).rows
    assert [row.depth for row in rows] == [1, 0]
    assert simulation.scheduler.num_preemptions == 0


# -- preemption -----------------------------------------------------------------------------


def tight(lag: int = 0, *, prefix_caching: bool = True) -> Simulation:
    """Three requests that all start but cannot all end together."""
    simulation = Simulation(
        num_blocks=9, block_size=2, max_num_seqs=3, lag=lag, prefix_caching=prefix_caching
    )
    for index, name in enumerate(("first", "second", "third")):
        prompt = [10 * index + offset for offset in range(3)]
        simulation.add(make_request(name, prompt, 12, arrival_s=float(index), seed=index))
    return simulation


def step_until_preemption(simulation: Simulation) -> None:
    while not simulation.scheduler.num_preemptions:
        simulation.step()


def test_preemption_takes_the_latest_arrival() -> None:
    simulation = tight()
    step_until_preemption(simulation)
    states = {name: record.request.num_preemptions for name, record in simulation.records.items()}
    assert states == {"first": 0, "second": 0, "third": 1}
    simulation.drain()


def test_preemption_takes_the_least_urgent_before_the_latest() -> None:
    simulation = Simulation(num_blocks=9, block_size=2, max_num_seqs=3)
    for index, priority in enumerate((5, 0, 0)):
        prompt = [10 * index + offset for offset in range(3)]
        name = f"priority {priority}, {index}"
        request = make_request(name, prompt, 12, arrival_s=float(index), priority=priority)
        simulation.add(request)
    step_until_preemption(simulation)
    preempted = [
        name for name, record in simulation.records.items() if record.request.num_preemptions
    ]
    assert preempted == ["priority 5, 0"]
    simulation.drain()


def test_a_preempted_request_resumes_from_the_prefix_cache() -> None:
    simulation = Simulation(num_blocks=12, block_size=2, max_num_seqs=2)
    simulation.add(make_request("old", [1, 2, 3], 10))
    young = simulation.add(make_request("young", list(range(10, 21)), 10, arrival_s=1.0))
    simulation.drain()
    assert young.request.num_preemptions == 1
    assert young.num_cached_tokens >= 8


def test_without_a_prefix_cache_a_preempted_request_is_computed_anew() -> None:
    simulation = tight(prefix_caching=False)
    simulation.drain()
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.records["third"].num_cached_tokens == 0


def test_a_request_preempted_in_flight_that_ends_there_gives_everything_back() -> None:
    simulation = Simulation(num_blocks=8, block_size=2, max_num_seqs=2, lag=1)
    simulation.add(make_request("old", [1, 2, 3], 12))
    simulation.add(make_request("young", [4, 5, 6], 12, arrival_s=1.0))
    for _ in range(3):
        simulation.step()
    young = simulation.records["young"]
    scheduler = simulation.scheduler
    plan = scheduler.plan(simulation.now_s)
    assert plan is not None and young.request.in_flight
    young.request.max_len = len(young.request.tokens) + 1
    young.expected = young.expected[: len(young.tokens) + 1]
    scheduler._running_requests.preempt(young.request)
    assert young.request.state is RequestState.PREEMPTED
    simulation.loop._unapplied.append(outcome(simulation, plan))
    simulation.drain()
    assert young.finish_reason == FinishReason.LENGTH


def test_no_other_request_is_preempted_while_a_verdict_will_free_blocks() -> None:
    simulation = Simulation(num_blocks=9, block_size=2, max_num_seqs=3, lag=1)
    for index, name in enumerate(("first", "second", "third")):
        prompt = [10 * index + offset for offset in range(3)]
        simulation.add(make_request(name, prompt, 12, arrival_s=float(index)))
    step_until_preemption(simulation)
    second = simulation.records["second"].request
    assert simulation.scheduler.num_preemptions == 1
    assert second.state is RequestState.RUNNING
    simulation.drain()


# -- plans in flight ------------------------------------------------------------------------


def test_a_lag_of_one_keeps_two_plans_in_flight() -> None:
    simulation = Simulation(lag=1)
    simulation.add(make_request("a", [1, 2, 3], 20))
    scheduler = simulation.scheduler
    assert scheduler.plan(0.0) is not None
    assert scheduler.plan(0.0) is not None
    assert scheduler.plan(0.0) is None


def test_what_ends_in_flight_keeps_row_and_blocks_until_its_plan_returns() -> None:
    simulation = Simulation()
    simulation.add(make_request("a", [1, 2, 3], 20))
    scheduler = simulation.scheduler
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.cancel(sample_id("a"))
    scheduler.check_integrity()
    assert simulation.target_pool.num_free < simulation.target_pool.num_blocks
    scheduler.apply(outcome(simulation, plan))
    assert simulation.target_pool.num_free == simulation.target_pool.num_blocks
    scheduler.check_integrity()


def test_tokens_that_arrive_after_a_cancellation_are_not_reported() -> None:
    simulation = Simulation()
    simulation.add(make_request("a", [1, 2, 3], 20))
    plan = simulation.scheduler.plan(0.0)
    assert plan is not None
    simulation.scheduler.cancel(sample_id("a"))
    simulation.scheduler.apply(outcome(simulation, plan))
    reasons = [update.finish_reason for update in simulation.scheduler.take_updates()]
    assert reasons == [FinishReason.CANCELLED]


def test_a_verdict_out_of_order_is_refused_and_changes_nothing() -> None:
    simulation = Simulation(lag=1)
    simulation.add(make_request("a", [1, 2, 3], 20))
    scheduler = simulation.scheduler
    plans = [scheduler.plan(0.0), scheduler.plan(0.0)]
    assert plans[0] is not None and plans[1] is not None
    verdicts = [outcome(simulation, plan) for plan in plans if plan is not None]
    with pytest.raises(OutriderError, match="step 2 where 0/1 was expected"):
        scheduler.apply(verdicts[1])
    for verdict in verdicts:
        scheduler.apply(verdict)
    assert scheduler.stats.committed_tokens == 2


def test_a_verdict_of_no_plan_is_refused() -> None:
    simulation = Simulation()
    with pytest.raises(OutriderError, match="where none was expected"):
        simulation.scheduler.apply(Verdict(0, 1, ()))


@pytest.mark.parametrize("change", [{"generation": 9}, {"base_len": 7}])
def test_a_verdict_for_another_state_of_the_row_is_refused(change: dict[str, Any]) -> None:
    simulation = Simulation()
    simulation.add(make_request("a", [1, 2, 3], 20))
    plan = simulation.scheduler.plan(0.0)
    assert plan is not None
    verdict = outcome(simulation, plan)
    wrong = replace(verdict, rows=(verdict.rows[0]._replace(**change),))
    with pytest.raises(OutriderError, match="expected 1 at 3"):
        simulation.scheduler.apply(wrong)


def test_a_row_is_reused_under_a_new_generation_and_released_in_the_plan() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add(make_request("a", [1, 2, 3], 1))
    first = planned(simulation)
    simulation.add(make_request("b", [4, 5, 6], 1))
    second = planned(simulation)
    assert second.released == (first.rows[0].row,)
    assert second.rows[0].row == first.rows[0].row
    assert second.rows[0].generation > first.rows[0].generation


# -- ends and reports -----------------------------------------------------------------------


def test_a_stop_among_accepted_drafts_cuts_what_follows() -> None:
    simulation = Simulation(acceptance=[5])
    text = simulation.add(make_request("probe", [1, 2, 3], 12)).expected
    stop = text[3]
    request = make_request("a", [1, 2, 3], 12, stop_ids=[stop], proposer=NGRAM, depth=5)
    record = simulation.add(request)
    simulation.drain()
    assert record.tokens == text[: text.index(stop) + 1]
    assert record.finish_reason == FinishReason.STOP


def test_stop_ids_do_not_count_before_min_tokens() -> None:
    simulation = Simulation()
    params = SamplingParams(max_tokens=None, min_tokens=5)
    record = simulation.add(make_request("a", [1, 2, 3], 12, stop_ids=range(50), params=params))
    simulation.drain()
    assert len(record.tokens) == 6


def with_prompt_logprobs(name: str, prompt: list[int], arrival_s: float) -> Simulation:
    simulation = Simulation(num_blocks=11, block_size=2, max_num_seqs=2, budget=4)
    simulation.add(make_request("old", [90, 91, 92], 14))
    params = SamplingParams(max_tokens=None, prompt_logprobs=0)
    simulation.add(make_request(name, prompt, 8, arrival_s=arrival_s, params=params))
    return simulation


def test_prompt_logprobs_are_reported_once_although_the_prompt_is_computed_twice() -> None:
    prompt = list(range(7))
    simulation = with_prompt_logprobs("young", prompt, 1.0)
    simulation.drain()
    young = simulation.records["young"]
    assert young.request.num_preemptions > 0
    assert [logprob.token_id for logprob in young.prompt_logprobs] == prompt[1:]


def test_prompt_logprobs_ignore_the_prefix_cache() -> None:
    simulation = Simulation(block_size=2)
    prompt = list(range(7))
    simulation.add(make_request("warm", prompt))
    simulation.drain()
    params = SamplingParams(max_tokens=None, prompt_logprobs=0)
    record = simulation.add(make_request("a", prompt, params=params))
    simulation.drain()
    assert record.num_cached_tokens == 0
    assert [logprob.token_id for logprob in record.prompt_logprobs] == prompt[1:]


def test_a_second_request_finds_the_first_ones_prompt_in_both_caches() -> None:
    simulation = Simulation(block_size=4)
    prompt = list(range(13))
    for name in ("first", "second"):
        simulation.add(make_request(name, prompt, proposer=DRAFT, depth=2))
        plan = planned(simulation)
        simulation.drain()
    assert (plan.admitted[0].target_cached, plan.admitted[0].draft_cached) == (12, 12)
    assert (plan.rows[0].target_start, plan.rows[0].draft_start) == (0, 0)
    assert len(plan.rows[0].target_blocks) == 4


def test_blocks_of_a_request_with_nan_logits_are_never_cache_hits() -> None:
    simulation = Simulation(budget=8, block_size=4)
    scheduler, prompt = simulation.scheduler, list(range(13))
    simulation.add(make_request("first", prompt, 4))
    planned(simulation)  # whose blocks are published with its first chunk
    plan = scheduler.plan(0.0)
    assert plan is not None and simulation.target_pool.num_published == 2
    verdict = outcome(simulation, plan)
    broken = verdict.rows[0]._replace(is_broken=True)
    scheduler.apply(replace(verdict, rows=(broken,)))
    scheduler.check_integrity()
    assert simulation.target_pool.num_free == simulation.target_pool.num_blocks
    assert simulation.target_pool.match(prompt)[0] == []
