"""The policy that maximizes tokens per second, and the estimates it gets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.catalog.proposers import DRAFT
from outrider.scheduler.acceptance import AcceptanceBias, AcceptanceEstimator
from outrider.scheduler.costs import CostTable, LiveCosts, StepCosts
from outrider.scheduler.depths import DepthSnapshot
from outrider.scheduler.goodput import goodput

_COSTS = StepCosts(
    CostTable((1, 64, 128, 256), (4.0, 5.0, 5.5, 6.5)),
    CostTable((1, 64), (0.2, 0.3)),
    CostTable((1, 64), (0.2, 0.3)),
    prefill_s=0.01,
)


def snapshot(
    survivals: Sequence[tuple[float, ...]],
    *,
    behind: Sequence[int] | None = None,
    prompt_tokens: int = 0,
    overhead_s: float = 0.0,
    step: int = 0,
    costs: StepCosts = _COSTS,
    previous_batch_depth: int = 1,
) -> DepthSnapshot:
    count = len(survivals)
    behind = [1] * count if behind is None else behind
    return DepthSnapshot(
        step,
        2048,
        prompt_tokens,
        0,
        [DRAFT] * count,
        [len(kind) for kind in survivals],
        behind,
        [each <= 2 for each in behind],
        survivals=survivals,
        costs=costs,
        overhead_s=overhead_s,
        previous_batch_depth=previous_batch_depth,
    )


def test_what_is_promised_counts_only_rows_that_can_draft_now() -> None:
    survivals = [(0.9, 0.8)] * 8
    choice = goodput(snapshot(survivals, behind=[1] * 4 + [50] * 4))
    assert all(choice.depths), "those behind are asked for as well, to catch up"
    assert choice.chosen is not None
    assert choice.chosen.num_drafts == sum(choice.depths[:4])
    assert choice.chosen.tokens < 8 + 4 * (0.9 + 0.8) + 0.01


def test_rows_that_are_far_behind_are_left_alone_where_little_is_to_be_gained() -> None:
    # It would pay by some percent, once all rows have caught up: not before they end.
    little = [(0.2,)] * 16
    assert any(goodput(snapshot(little, previous_batch_depth=0)).depths)
    assert not any(goodput(snapshot(little, behind=[300] * 16, previous_batch_depth=0)).depths)
    assert any(goodput(snapshot(little, behind=[300] * 16)).depths), "what is begun goes on"


def test_a_step_with_prompts_does_not_end_drafting() -> None:
    choice = goodput(snapshot([(0.6,)] * 64, prompt_tokens=500, overhead_s=0.3))
    assert choice.batch_depth == 1
    assert any(choice.depths), "who skips a step loses the next one too"


def test_of_rows_alike_the_same_ones_draft_for_a_while() -> None:
    costs = StepCosts(
        CostTable((64, 96, 128), (5.0, 5.2, 20.0), is_padded=True),
        CostTable((1, 64), (0.1, 0.1)),
        CostTable((1, 64), (0.1, 0.1)),
    )
    chosen = [goodput(snapshot([(0.8,)] * 64, step=step, costs=costs)).depths for step in range(64)]
    assert sum(chosen[0]) == 32
    assert all(each == chosen[0] for each in chosen)
    later = goodput(snapshot([(0.8,)] * 64, step=64, costs=costs)).depths
    assert later != chosen[0]


def test_new_rows_are_worth_what_new_rows_were_not_what_those_are_that_stay() -> None:
    estimator, rng = AcceptanceEstimator(), random.Random(0)
    for _ in range(60):
        row, is_good = AcceptanceBias(), rng.random() < 0.5
        # Rows whose drafts fail take six times as many rounds.
        for _ in range(5 if is_good else 30):
            estimator.observe_round(row, 5, 5 if is_good else 0)
        estimator.refresh()
    assert estimator.at(1) < 0.25
    first = estimator.survivals(AcceptanceBias(), 1)[0]
    assert 1.3 * estimator.at(1) < first < 0.7


def test_a_token_caught_up_on_tells_of_drafts_that_could_have_begun_anywhere() -> None:
    estimator = AcceptanceEstimator()
    for _ in range(40):
        estimator.observe_agreement(AcceptanceBias(), [True] * 16 + [False] * 16)
    estimator.refresh()
    assert 0.4 < estimator.at(1) < 0.6
    assert estimator.at(2) > 0.8


def test_a_row_whose_text_changes_is_known_anew_within_some_rounds() -> None:
    estimator = AcceptanceEstimator()
    others = AcceptanceBias()
    for index in range(100):
        estimator.observe_round(others, 1, index % 2)
    row = AcceptanceBias()
    for _ in range(30):
        estimator.observe_round(row, 5, 5)
    assert estimator.survivals(row, 1)[0] > 0.85
    for _ in range(12):
        estimator.observe_round(row, 5, 0)
    estimator.refresh()
    assert estimator.survivals(row, 1)[0] < 0.35


def test_a_size_never_tried_is_hoped_to_cost_less_than_measured() -> None:
    table = CostTable((1, 2), (1.0, 2.0))
    costs = LiveCosts(StepCosts(table, CostTable((1,), (0.1,)), CostTable((1,), (0.1,))))
    for _ in range(16):
        costs.observe_verify(1, 0, 1.0)
    assert costs.now.verify.at(2) < 2.0
    for _ in range(16):
        costs.observe_verify(2, 0, 2.0)
    assert abs(costs.now.verify.at(2) - 2.0) < 0.01
