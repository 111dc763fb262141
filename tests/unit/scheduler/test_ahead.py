"""Whether to draft ahead: chosen by what steps take, tried again now and then."""

from __future__ import annotations

import random

import pytest

from outrider.scheduler.ahead import SEQUENTIAL, AheadControl, AheadPlan
from outrider.scheduler.costs import CostTable, StepCosts
from outrider.scheduler.policies import AHEAD_AUTO, AHEAD_OFF, AHEAD_ON

STEPS = 20_000
COSTS = StepCosts(CostTable((1,), (10e-3,)), CostTable((1,), (2e-3,)), CostTable((1,), (1e-3,)))


def run(
    control: AheadControl, gain: float, steps: int = STEPS, rows: int = 1, seed: int = 3
) -> float:
    """The share of steps ahead, where those take `gain` times less."""
    rng, num_ahead = random.Random(seed), 0
    for _ in range(steps):
        plan = control.plan(rows)
        is_ahead = plan.num_branches > 0
        num_ahead += is_ahead
        noise = rng.lognormvariate(0, 0.1)
        ratio = 1 / (gain if is_ahead else 1.0)
        control.observe(rows, plan, noise * ratio, 1 / 3 if is_ahead else 1.0)
    return num_ahead / steps


def control(mode: str = AHEAD_AUTO) -> AheadControl:
    made = AheadControl(mode)
    made.set_max_branches(8)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_the_faster_way_is_taken(seed: int) -> None:
    assert run(control(), 1.15, seed=seed) > 0.96
    assert run(control(), 0.87, seed=seed) < 0.02


def test_a_change_is_noticed() -> None:
    made = control()
    assert run(made, 0.8) < 0.02
    assert run(made, 1.25, 2 * STEPS) > 0.85


def test_numbers_of_rows_are_told_apart() -> None:
    made = control()
    for _ in range(200):
        run(made, 1.3, 20, rows=1)
        run(made, 0.7, 20, rows=8)
    assert made.plan(1).num_branches and not made.plan(8).num_branches


def test_a_mode_may_be_fixed_and_needs_a_draft_that_can() -> None:
    assert run(control(AHEAD_ON), 0.5, 100) == 1.0
    assert run(control(AHEAD_OFF), 2.0, 100) == 0.0
    assert AheadControl(AHEAD_ON).plan(1) == SEQUENTIAL
    assert control(AHEAD_ON).plan(0) == SEQUENTIAL


def test_what_is_hidden_makes_drafts_cheaper() -> None:
    made = control(AHEAD_ON)
    run(made, 1.1, 200)
    plan = made.plan(1)
    assert plan.wait == pytest.approx(1 / 3)
    costs = plan.costs(COSTS)
    assert costs.first_draft.at(1) == pytest.approx(2e-3 / 3)
    assert costs.next_draft.at(1) == pytest.approx(1e-3 / 3)
    assert costs.verify == COSTS.verify
    assert AheadPlan(8).costs(COSTS) is COSTS


def test_steps_without_drafts_are_no_evidence() -> None:
    made = control()
    for _ in range(10 * STEPS):
        made.plan(1)
    assert run(made, 0.8) < 0.02


@pytest.mark.parametrize("is_ahead", [True, False])
def test_where_drafting_pays_one_way_only_that_is_taken(is_ahead: bool) -> None:
    made, num_ahead = control(), 0
    for _ in range(STEPS):
        plan = made.plan(1)
        num_ahead += plan.num_branches > 0
        if (plan.num_branches > 0) == is_ahead:  # steps of the other kind are plain
            made.observe(1, plan, 1.3, 1.0)
    assert (num_ahead > 0.9 * STEPS) == is_ahead


def test_another_draft_starts_over() -> None:
    made = control()
    run(made, 0.7)
    made.set_max_branches(0)
    assert made.plan(1) == SEQUENTIAL
    made.set_max_branches(8)
    assert made.plan(1).num_branches == 8
