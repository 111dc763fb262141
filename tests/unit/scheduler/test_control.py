"""What the controller keeps between steps: costs, load, probes, and that policies change live."""

from __future__ import annotations

import dataclasses
import random

import pytest
from scheduler_tools import Simulation, make_request

from outrider.catalog.proposers import DRAFT, traits
from outrider.errors import ConfigError
from outrider.scheduler.control import DecodeRows, SpeculationControl, StepRecord
from outrider.scheduler.costs import CostTable, LiveCosts, StepCosts
from outrider.scheduler.depths import Candidate, DepthChoice, DepthSnapshot
from outrider.scheduler.policies import POLICIES
from outrider.scheduler.request import Request
from outrider.scheduler.types import Agreement, Verdict

COSTS = StepCosts(
    CostTable((1, 16, 64, 512), (4e-3, 4.1e-3, 5e-3, 12e-3), True),
    CostTable((16, 64), (1e-4, 2e-4), True),
    CostTable((16, 64), (1e-4, 2e-4), True),
    prefill_s=1e-6,
)

TABLE = {False: dataclasses.replace(COSTS.verify, is_padded=False), True: COSTS.verify}


def control(**fields: float) -> SpeculationControl:
    made = SpeculationControl("goodput", COSTS, seats=64, **fields)  # type: ignore[arg-type]
    made.add_proposers(traits(has_draft_model=True))
    return made


# -- costs ----------------------------------------------------------------------------------------


def test_a_table_goes_on_beyond_its_last_size_as_before_it() -> None:
    table = CostTable((1, 2, 4), (1.0, 1.5, 2.5))
    assert [table.at(size) for size in (0, 1, 2, 3, 4, 8)] == [0.0, 1.0, 1.5, 2.0, 2.5, 4.5]


def test_a_padded_pass_costs_what_the_next_size_does() -> None:
    table = CostTable((1, 8, 16), (1.0, 2.0, 3.0), is_padded=True)
    assert [table.at(size) for size in (1, 2, 8, 9, 16)] == [1.0, 2.0, 2.0, 3.0, 3.0]


def test_costs_follow_what_steps_take() -> None:
    costs, rng = LiveCosts(COSTS), random.Random(3)
    for _ in range(200):
        costs.observe_verify(60, 0.0, 10e-3 * rng.uniform(0.95, 1.05))
    assert costs.now.verify.at(60) == pytest.approx(10e-3, rel=0.05)
    assert costs.now.verify.at(16) > 6e-3, "and sizes not seen follow the others"


def test_a_step_that_something_else_held_up_changes_nothing() -> None:
    costs = LiveCosts(COSTS)
    for number in range(100):
        costs.observe_verify(60, 0.0, 1.0 if number % 10 == 5 else 5e-3)
    assert costs.now.verify.at(60) == pytest.approx(5e-3, rel=0.02)


def test_larger_passes_never_look_cheaper_than_smaller_ones() -> None:
    costs = LiveCosts(COSTS)
    for _ in range(100):
        costs.observe_verify(16, 0.0, 8e-3)
        costs.observe_verify(60, 0.0, 5e-3)
    assert costs.now.verify.at(60) >= costs.now.verify.at(16)


def test_what_was_dear_while_the_machine_was_slow_is_forgotten_once_it_is_not() -> None:
    costs = LiveCosts(COSTS)
    for _ in range(50):
        costs.observe_verify(1, 0.0, 8e-3)
        costs.observe_verify(60, 0.0, 10e-3)
        costs.observe_draft(costs.now.first_draft.at(16), 2e-4)
    assert costs.now.verify.at(60) > 9e-3 and costs.now.first_draft.at(16) > 1.8e-4
    for _ in range(2000):
        costs.observe_verify(1, 0.0, 4e-3)
    assert costs.now.verify.at(60) < 5.5e-3 and costs.now.first_draft.at(16) < 1.1e-4


# -- prompts --------------------------------------------------------------------------------------


def test_prompts_get_what_the_time_limit_of_a_step_leaves() -> None:
    limited = control(step_limit_s=8e-3)
    found = limited.prompt_room(8, 500)
    assert COSTS.verify.at(8 + found) <= 8e-3 or found == 16
    assert limited.prompt_room(0, 500) == 500, "without rows that decode"
    assert control().prompt_room(8, 500) == 500


# -- policies -------------------------------------------------------------------------------------


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'clever'.*goodput, threshold, trim, fixed, off"):
        SpeculationControl("clever")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lag", [0, 1])
def test_every_policy_ends_every_request_with_its_plain_text(policy: str, lag: int) -> None:
    simulation = Simulation(
        num_blocks=256, draft_blocks=256, lag=lag, choose_depths=policy, costs=COSTS
    )
    for number in range(6):
        simulation.add(make_request(f"r{number}", [1, 2, number], 40, proposer=DRAFT, depth=4))
    simulation.drain()  # which compares every text with the model's


def test_off_neither_drafts_nor_computes_anything_for_the_draft() -> None:
    simulation = Simulation(num_blocks=256, draft_blocks=256, choose_depths="off", costs=COSTS)
    for number in range(4):
        simulation.add(make_request(f"r{number}", [1, 2, number], 30, proposer=DRAFT, depth=4))
    simulation.drain()
    rows = [row for plan in simulation.plans for row in plan.rows]
    assert not any(row.depth or row.draft_tokens or row.draft_blocks for row in rows)


def test_a_policy_changed_in_between_holds_from_the_next_step() -> None:
    simulation = Simulation(num_blocks=256, draft_blocks=256, choose_depths="fixed", costs=COSTS)
    simulation.add(make_request("r", [1, 2, 3], 200, proposer=DRAFT, depth=4))
    for _ in range(5):
        simulation.step()
    assert simulation.plans[-1].rows[0].depth == 4
    simulation.scheduler.control.max_depth = 2
    simulation.step()
    assert simulation.plans[-1].rows[0].depth == 2
    simulation.scheduler.control.set_policy("off")
    simulation.step()
    assert simulation.plans[-1].rows[0].depth == 0
    simulation.drain()


def test_while_nothing_is_drafted_a_draft_is_probed_now_and_then() -> None:
    made = control()
    request = make_request("r", [1, 2, 3], 100, proposer=DRAFT, depth=4)
    rows = DecodeRows([request], [DRAFT], [4], [30], 40)
    made.set_policy("goodput")
    made._previous_batch_depth = 0
    assert not made.probes(rows), "no time was saved up for it"
    made._probe_budget_s = 1.0
    assert list(made.probes(rows)) == [0]
    asked = [made.probes(rows) for _ in range(4)]
    assert not asked[-1], "and soon that is spent"


def test_time_to_ask_the_draft_is_saved_by_rows_whose_depth_is_the_policys_only() -> None:
    made = control()

    def saved(name: str, depth: int, *, is_fixed: bool = False) -> float:
        request = make_request(
            name, [1, 2, 3], 100, proposer=DRAFT, depth=depth, is_depth_fixed=is_fixed
        )
        rows = DecodeRows([request], [DRAFT], [depth], [30], 40)
        choice = made.choose(1, 8, 0, 0, rows)
        before_s = made._probe_budget_s
        record = StepRecord(1, 1, 0, 0, choice, 0, 1, 0, 40)
        made.observe_step(record, Verdict(1, 1, (), 0.0, 4e-3), 1, 0, 0)
        return made._probe_budget_s - before_s

    assert saved("off", 0) == saved("its own", 4, is_fixed=True) == 0
    assert saved("auto", 4) == pytest.approx(0.006 * 4e-3)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_probes_take_corrects_what_a_draft_is_thought_to_cost(is_late: bool) -> None:
    """On a GPU it is reported with the step after."""
    made = control()
    made.set_costs(COSTS)
    plain = DepthChoice([0])
    for step in range(400):
        catches_up = 32 if step % 4 == 0 else 0
        is_reported = step % 4 == int(is_late)
        record = StepRecord(step, 1, 0, 0, plain, 0, 1, catches_up, 40)
        draft_s = 3 * COSTS.catch_up_s(32) if is_reported else 0.0
        made.observe_step(record, Verdict(1, step, (), draft_s, 4e-3), 1, 0, 0)
    assert made.costs.now.catch_up_s(32) == pytest.approx(3 * COSTS.catch_up_s(32), rel=0.05)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_that_were_refused_are_weighed_again_once_something_is_learned(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed = []

    def refuse(snapshot: DepthSnapshot) -> DepthChoice:
        weighed.append(snapshot.step)
        return DepthChoice([0] * len(snapshot.max_depths))

    monkeypatch.setitem(POLICIES, "goodput", refuse)
    made = SpeculationControl("goodput", COSTS, seats=64)
    made.add_proposers(traits(has_draft_model=True))

    def request_named(name: str, *, is_fixed: bool = False) -> Request:
        return make_request(name, [1, 2, 3], 100, proposer=DRAFT, depth=4, is_depth_fixed=is_fixed)

    requests = [request_named(f"r{number}") for number in range(num_rows)]
    request = requests[-1]

    def choose(*steps: int, prompt_tokens: int = 0) -> list[int]:
        weighed.clear()
        count = len(requests)
        for step in steps:
            rows = DecodeRows(list(requests), [DRAFT] * count, [4] * count, [30] * count, 40)
            assert made.choose(step, 8, prompt_tokens, 0, rows).depths == [0] * count
        return list(weighed)

    assert choose(*range(1, 13)) == [1, 9], "now and then in any case"
    assert made.steps_without == 12
    made.observe_agreement(request, Agreement(0, 0, (True, False)))
    assert choose(13, 14) == [13]
    made.observe_round(request, 2, 1)
    assert choose(15, 16) == [15]
    made.set_costs(COSTS)
    assert choose(17, 18) == [17]
    requests[-1] = request_named("another")
    assert choose(19, 20) == [19]
    requests.append(request_named("one more"))
    assert choose(21, 22) == [21]
    assert choose(23, 24, prompt_tokens=5) == [23, 24], "as prompts change what a step costs"
    requests[-1] = request_named("its own depth", is_fixed=True)
    assert choose(25, 26) == [25, 26]
    requests[-1] = request_named("again")
    made.selection_gain = 0.2
    assert choose(32, 33, 34) == [32, 33], "as in a step in which nothing may be selected"
    made.end(requests.pop())
    if requests:
        assert choose(35, 36) == [35]
    made.set_policy(refuse)
    assert choose(37, 38) == [37, 38], "as one's own policy may go by the step"


def test_threshold_tries_again_now_and_then_where_hardly_any_draft_was_right() -> None:
    made = SpeculationControl("threshold", COSTS, seats=64)
    made.add_proposers(traits(has_draft_model=True))
    made.acceptance = 0.39
    request = make_request("r", [1, 2, 3], 1000, proposer=DRAFT, depth=4)
    rows = DecodeRows([request], [DRAFT], [4], [0], 40)
    drafted = [max(made.choose(step, 8, 0, 0, rows).depths) for step in range(1, 513)]
    assert 0 < sum(map(bool, drafted)) < 0.1 * len(drafted)
    assert max(drafted) == 1


def test_rows_that_accept_nothing_stop_drafting_and_the_others_go_on() -> None:
    simulation = Simulation(
        num_blocks=512,
        draft_blocks=512,
        choose_depths="goodput",
        costs=COSTS,
        acceptance=0.0,
    )
    for number in range(8):
        simulation.add(make_request(f"r{number}", [1, 2, number], 150, proposer=DRAFT, depth=4))
    for _ in range(100):
        simulation.step()
    last = simulation.plans[-20:]
    assert sum(row.depth for plan in last for row in plan.rows) == 0
    simulation.drain()


def test_costs_that_are_known_late_let_the_policy_weigh() -> None:
    late = SpeculationControl("goodput", seats=8)
    late.add_proposers(traits(has_draft_model=True))
    request = make_request("r", [1, 2, 3], 100, proposer=DRAFT, depth=4)
    rows = DecodeRows([request], [DRAFT], [4], [1], 30)
    assert late.choose(1, 64, 0, 0, rows).chosen is None, "nothing was weighed"
    late.set_costs(COSTS)
    assert late.choose(2, 64, 0, 0, rows).chosen is not None


@pytest.mark.parametrize(
    ("num_rows", "fixed", "can_stop"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_a_row_by_itself_stops_drafting_when_it_is_unsure_but_not_where_chances_are_learned(
    num_rows: int, fixed: bool, can_stop: bool
) -> None:
    drafting = CostTable((1,), (1e-4,))
    unpadded = StepCosts(CostTable((1, 8), (4e-3, 5e-3)), drafting, drafting)
    made = SpeculationControl("goodput", unpadded, can_select=True)
    made.add_proposers(traits(has_draft_model=True))
    rows = DecodeRows()
    for number in range(num_rows):
        rows.requests.append(make_request(f"r{number}", [1, 2], 40, proposer=DRAFT, depth=4))
        rows.requests[-1].is_depth_fixed = fixed
    rows.proposers, rows.max_depths, rows.behind = (
        [DRAFT] * num_rows,
        [4] * num_rows,
        [1] * num_rows,
    )
    choices = [made.choose(step, 100, 0, 0, rows) for step in range(1, 9)]
    assert [choice.least_survival > 0 for choice in choices] == [can_stop] * 7 + [False]
    assert all(max(choice.depths) > 0 for choice in choices)


def test_a_step_that_may_stop_teaches_what_it_verified_and_drafted() -> None:
    made = control()
    seen: list[int] = []
    drafted: list[float] = []
    made.costs.observe_verify = lambda tokens, *_: seen.append(tokens)  # type: ignore[method-assign]
    made.costs.observe_draft = lambda *seconds: drafted.extend(seconds)  # type: ignore[method-assign]
    record = StepRecord(
        1, 1, 0, 0, DepthChoice([4], None, Candidate(2, 4, 4, 2.0, 1e-4, 4e-3), least_survival=0.2),
        4, 5, 0, 20,
    )  # fmt: skip
    made.observe_step(record, Verdict(1, 1, (), 1e-4, 4e-3), 2, 1, 1)
    assert seen == [2]
    assert drafted == [made.costs.now.drafting_s(1), 1e-4]
    made.observe_step(record, Verdict(1, 1, (), 2e-4, 4e-3), 3, 2, 2)
    assert seen[1:] == [3]
    assert drafted[2:] == [made.costs.now.drafting_s(2), 2e-4]


def test_a_step_teaches_what_was_verified_where_less_was_offered_than_planned() -> None:
    seen: list[int] = []
    record = StepRecord(1, 2, 3, 0, DepthChoice([4, 4]), 8, 13, 0, 20)
    for is_padded, expected in ((False, 2 + 3 + 1), (True, 13)):
        made = SpeculationControl("goodput", dataclasses.replace(COSTS, verify=TABLE[is_padded]))
        made.costs.observe_verify = lambda tokens, *_: seen.append(tokens)  # type: ignore[method-assign]
        made.observe_step(record, Verdict(1, 1, (), 0.0, 4e-3), 3, 1, 1)
        assert seen.pop() == expected, "a padded pass is as large as planned"


def test_only_a_policy_that_chooses_leaves_prompts_room_that_drafts_may_want() -> None:
    made = control()
    made._previous_batch_depth = 0
    assert made.last_chosen_depth == 1
    for policy in ("fixed", "trim", "off"):
        made.set_policy(policy)
        assert made.last_chosen_depth is None, policy


def test_what_a_client_allows_gives_it_no_more_drafts_than_its_neighbours() -> None:
    made = control()
    made.load.is_complete = True
    short, long = (make_request(name, [1, 2], limit) for name, limit in (("a", 60), ("b", 9000)))
    rows = DecodeRows(requests=[short, long])
    assert len(set(made._remaining(rows, num_waiting=0))) == 1
    short.tokens += [5] * 10
    behind, ahead = made._remaining(rows, num_waiting=0)
    assert 0 < behind < ahead, "the one that has written less is assumed to have more to write"
    assert made._remaining(rows, num_waiting=1) == ()
