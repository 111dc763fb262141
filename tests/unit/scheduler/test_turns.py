"""Requests that cannot share a step with others: whose turn it is, and what others pay for it."""

from __future__ import annotations

import pytest
from scheduler_tools import Simulation, make_request, name_of

from outrider.catalog.proposers import NGRAM
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.turns import LEAST_SHARE, Turns
from outrider.scheduler.types import Exclusive, RequestSpec, StepPlan

ALWAYS = SamplingParams(max_tokens=None, logprobs=1)
IN_PROMPT = SamplingParams(max_tokens=None, prompt_logprobs=1)


def exclusive(spec: RequestSpec) -> Exclusive:
    """Stands for what workers cannot do."""
    if spec.params.logprobs is not None:
        return Exclusive.ALWAYS
    return Exclusive.NEVER if spec.params.prompt_logprobs is None else Exclusive.PROMPT


def names_in(simulation: Simulation, plan: StepPlan) -> set[str]:
    holders = {
        record.request.row: name_of(record.request.sample_id) for record in simulation.live.values()
    }
    return {holders[row.row] for row in plan.rows if row.row in holders}


# -- time -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_exclusive", "share"), [(1, LEAST_SHARE), (16, 16 / 64), (63, 63 / 64)]
)
@pytest.mark.parametrize("slower", [0.5, 1, 8])
def test_those_apart_get_their_share_of_the_time(
    num_exclusive: int, share: float, slower: float
) -> None:
    turns, spent = Turns(), {True: 0.0, False: 0.0}
    while spent[False] + spent[True] < 100:
        is_exclusive = turns.is_exclusive_next(num_exclusive, 64 - num_exclusive)
        turns.begin(is_exclusive)
        seconds = 0.005 * (slower if is_exclusive else 1)
        turns.end(is_exclusive, seconds)
        spent[is_exclusive] += seconds
    assert spent[True] / 100 == pytest.approx(share, rel=0.05)


def test_the_first_of_their_steps_comes_at_once_and_no_second_before_its_length_is_known() -> None:
    turns = Turns()
    assert turns.is_exclusive_next(1, 3)
    turns.begin(True)
    assert not turns.is_exclusive_next(1, 3)
    turns.end(True, 1.0)
    assert not turns.is_exclusive_next(1, 3)
    turns.end(False, 10.0)
    assert turns.is_exclusive_next(1, 3)


def test_whoever_is_without_company_owes_nothing() -> None:
    turns = Turns()
    for _ in range(5):
        assert turns.is_exclusive_next(2, 0)
        turns.begin(True)
        turns.end(True, 1.0)
    assert turns.is_exclusive_next(2, 5)


# -- plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_no_step_is_shared_and_everybody_ends_with_the_plain_text(lag: int) -> None:
    simulation = Simulation(lag=lag, exclusive=exclusive, num_blocks=128)
    for name in "abcdef":
        simulation.add(make_request(name, [ord(name)] * 5, 40, proposer=NGRAM, depth=2))
    simulation.add(make_request("x", [1, 2, 3], 4, params=ALWAYS))
    simulation.add(make_request("y", [4, 5, 6], 40, params=IN_PROMPT))
    shared, alone = 0, {"x": 0, "y": 0}
    y_prompt_is_known = False
    while simulation.scheduler.has_work:
        plan = simulation.step()
        if plan is None:
            continue
        names = names_in(simulation, plan)
        is_prompt = "y" in names and not y_prompt_is_known
        y_prompt_is_known |= "y" in names
        if "x" in names or is_prompt:
            assert names <= {"x", "y"}, "an ordinary request beside an exclusive one"
            for name in names:
                alone[name] += 1
        else:
            shared += 1
            assert not any(row.samples and row.num_tokens == 3 for row in plan.rows)
    assert alone["x"] >= 3 and alone["y"] == 1
    assert shared > 10
    simulation.drain()


def test_an_exclusive_request_keeps_no_later_one_from_a_row() -> None:
    """All get their rows at once, whichever step is next."""
    simulation = Simulation(exclusive=exclusive)
    for name, params in (("a", ALWAYS), ("b", ALWAYS), ("c", IN_PROMPT), ("d", SamplingParams())):
        simulation.add(make_request(name, [1, 2], 5, params=params))
    plan = simulation.step()
    assert plan is not None and len(plan.admitted) == 4
    simulation.drain()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_row_taken_in_a_turn_that_computes_nothing_is_announced_with_the_next(lag: int) -> None:
    """Without running requests an ordinary step is next, and it is empty."""
    simulation = Simulation(lag=lag, exclusive=exclusive)
    simulation.add(make_request("x", [1, 2, 9], 3, params=ALWAYS))
    plan = simulation.step()
    assert plan is not None and len(plan.admitted) == len(plan.rows) == 1
    simulation.drain()


def test_one_of_many_slow_ones_costs_the_others_their_small_share_of_steps() -> None:
    simulation = Simulation(exclusive=exclusive, num_blocks=400, draft_blocks=400)
    for index in range(7):
        simulation.add(make_request(f"o{index}", [index], 150))
    simulation.add(make_request("x", [9], 100, params=ALWAYS))
    num_exclusive = 0
    for _ in range(100):
        plan = simulation.step()
        assert plan is not None
        num_exclusive += names_in(simulation, plan) == {"x"}
    assert num_exclusive == pytest.approx(100 / 8, abs=2)
    simulation.drain()


def test_their_steps_teach_nothing_about_those_of_others() -> None:
    simulation = Simulation(exclusive=exclusive)
    simulation.add(make_request("a", [1], 9))
    simulation.add(make_request("x", [2], 9, params=ALWAYS))
    scheduler: Scheduler = simulation.scheduler
    for _ in range(6):
        simulation.step()
    records = scheduler.control.records
    assert 0 < len(records) < scheduler.stats.steps
    simulation.drain()
