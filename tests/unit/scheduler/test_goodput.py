"""The policy that maximises tokens per second, against trying out everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.catalog.proposers import DRAFT
from outrider.scheduler.costs import CostTable, StepCosts
from outrider.scheduler.depths import DepthSnapshot
from outrider.scheduler.goodput import goodput

GPU = StepCosts(
    CostTable((1, 8, 16, 64, 128, 256, 512), (3.9, 4.0, 4.1, 4.8, 5.2, 6.9, 12.0), True),
    CostTable((1, 16, 64, 256), (0.12, 0.13, 0.25, 0.8), True),
    CostTable((1, 16, 64, 256), (0.10, 0.11, 0.20, 0.7), True),
)
CPU = StepCosts(
    CostTable((1, 2, 4, 8, 16), (40, 46, 60, 90, 150)),
    CostTable((1, 4, 16), (5, 7, 15)),
    CostTable((1, 4, 16), (4, 6, 13)),
)


def survivals(rate: float, depth: int) -> tuple[float, ...]:
    return tuple(rate**position for position in range(1, depth + 1))


def snapshot(
    kinds: Sequence[tuple[float, ...]], costs: StepCosts, room: int = 4096, **fields: Any
) -> DepthSnapshot:
    count = len(kinds)
    return DepthSnapshot(
        step=fields.pop("step", 0),
        room=room,
        num_prompt_tokens=fields.pop("num_prompt_tokens", 0),
        num_waiting=0,
        proposers=[DRAFT] * count,
        max_depths=[len(kind) for kind in kinds],
        behind=[1] * count,
        ready=[True] * count,
        survivals=kinds,
        costs=costs,
        **fields,
    )


def rate(depths: Sequence[int], given_: DepthSnapshot) -> float:
    """Expected tokens per second of some depths, written down anew."""
    tokens = len(depths) + sum(
        sum(kind[:depth]) for kind, depth in zip(given_.survivals, depths, strict=True)
    )
    levels = [sum(depth > level for depth in depths) for level in range(max(depths, default=0))]
    seconds = given_.costs.verify.at(len(depths) + sum(depths))
    for index, rows in enumerate(levels):
        seconds += (given_.costs.next_draft if index else given_.costs.first_draft).at(rows)
    return tokens / seconds


@pytest.mark.parametrize("costs", [GPU, CPU])
@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95]), min_size=1, max_size=4),
    depth=st.integers(1, 3),
)
def test_no_other_depths_promise_clearly_more(
    costs: StepCosts, rates: list[float], depth: int
) -> None:
    given_ = snapshot([survivals(each, depth) for each in rates], costs)
    found = rate(goodput(given_).depths, given_)
    best = max(
        rate(depths, given_) for depths in itertools.product(range(depth + 1), repeat=len(rates))
    )
    assert found >= best / 1.031, "but for what keeps it from changing its mind all the time"


def test_drafts_that_are_never_right_are_not_made() -> None:
    choice = goodput(snapshot([survivals(0.02, 5)] * 8, GPU))
    assert set(choice.depths) == {0}


def test_a_full_chip_drafts_less_than_an_idle_one() -> None:
    idle = goodput(snapshot([survivals(0.7, 5)], GPU))
    full = goodput(snapshot([survivals(0.7, 5)] * 256, GPU))
    assert idle.depths[0] >= 4
    assert sum(full.depths) / 256 < 2


def test_rows_that_guess_well_get_what_the_others_do_not() -> None:
    kinds = [survivals(0.95, 5)] * 32 + [survivals(0.05, 5)] * 32
    choice = goodput(snapshot(kinds, GPU))
    assert min(choice.depths[:32]) >= 3
    assert max(choice.depths[32:]) <= 1, "at most what fills the pass for nothing"


def test_who_drafts_of_rows_alike_changes_in_time() -> None:
    kinds = [survivals(0.9, 1)] * 100  # of which 28 fill the pass of 128
    costs = StepCosts(
        CostTable((64, 128, 256), (4.0, 4.1, 40.0), True),
        CostTable((256,), (0.1,), True),
        CostTable((256,), (0.1,), True),
    )
    counts = [0] * 100
    for step in range(0, 6400, 64):
        depths = goodput(snapshot(kinds, costs, step=step)).depths
        assert sum(depths) == 28
        counts = [count + depth for count, depth in zip(counts, depths, strict=True)]
    assert max(counts) - min(counts) <= 2


def test_a_depth_that_the_client_fixed_is_kept_where_nothing_pays() -> None:
    kinds = [survivals(0.02, 3)] * 3
    choice = goodput(snapshot(kinds, GPU, is_fixed=[False, True, False]))
    assert choice.depths[1] == 3


def test_the_room_of_the_pass_is_kept_to() -> None:
    choice = goodput(snapshot([survivals(0.95, 5)] * 10, GPU, room=7))
    assert sum(choice.depths) <= 7


def test_beside_a_long_prompt_drafts_pay_by_the_time_they_add() -> None:
    dear = StepCosts(
        CostTable((1, 64, 128, 1024), (4.0, 4.2, 6.0, 40.0)),
        CostTable((64,), (0.2,)),
        CostTable((64,), (0.2,)),
    )
    kinds = [survivals(0.3, 2)] * 64
    for num_prompt_tokens in (0, 800):
        choice = goodput(snapshot(kinds, dear, num_prompt_tokens=num_prompt_tokens))
        assert set(choice.depths) == {0}, "64 tokens more take about 2 ms either way"
    kinds = [survivals(0.97, 2)] * 64
    for num_prompt_tokens in (0, 800):
        choice = goodput(snapshot(kinds, dear, num_prompt_tokens=num_prompt_tokens))
        assert min(choice.depths) >= 1


def test_with_selection_more_is_drafted_than_verified_where_verifying_is_dear() -> None:
    kinds = [survivals(0.6, 3)] * 200
    choice = goodput(snapshot(kinds, GPU, selection_gain=0.5))
    assert choice.num_selected is not None
    assert choice.num_selected < sum(choice.depths)
    plain = goodput(snapshot(kinds, GPU))
    assert plain.num_selected is None and plain.chosen is not None and choice.chosen is not None
    assert choice.chosen.tokens_per_s > plain.chosen.tokens_per_s


def test_a_row_that_may_stop_goes_as_far_as_its_drafts_promise_more_than_they_cost() -> None:
    kinds = [survivals(0.6, 5)]
    usual, stopping = goodput(snapshot(kinds, CPU)), goodput(snapshot(kinds, CPU, can_stop=True))
    assert usual.chosen is not None and 0 < usual.chosen.batch_depth < 5
    assert not usual.least_survival
    assert list(stopping.depths) == [5]
    assert (stopping.chosen, stopping.batch_depth) == (usual.chosen, usual.batch_depth)
    another_s = CPU.next_draft.at(1) + (CPU.verify.at(6) - CPU.verify.at(1)) / 5
    assert stopping.least_survival == pytest.approx(usual.chosen.tokens_per_s * another_s)


def test_a_row_that_may_stop_does_not_begin_where_drafting_does_not_pay() -> None:
    choice = goodput(snapshot([survivals(0.05, 5)], CPU, can_stop=True))
    assert list(choice.depths) == [0]
    assert not choice.least_survival


def test_a_row_that_may_stop_drafts_where_averages_promise_nothing() -> None:
    """Its drafts end where they are not sure, which averages know nothing of."""
    choices = {
        survival: [
            max(goodput(snapshot([survivals(survival, 5)], CPU, can_stop=can_stop)).depths)
            for can_stop in (False, True)
        ]
        for survival in (0.05, 0.28, 0.9)  # 0.275 is worth what it costs
    }
    assert choices[0.05] == [0, 0]
    assert choices[0.28] == [0, 5]
    assert choices[0.9][0] > 0 and choices[0.9][1] == 5


def test_a_row_that_has_to_catch_up_first_does_not_stop() -> None:
    behind = replace(snapshot([survivals(0.9, 5)], CPU, can_stop=True), behind=[100], ready=[False])
    choice = goodput(behind)
    assert choice.batch_depth
    assert not choice.least_survival


def test_among_rows_that_are_not_replaced_those_with_most_ahead_draft_first() -> None:
    easy, hard = survivals(0.9, 3), survivals(0.5, 3)
    given_ = snapshot([easy] * 8 + [hard] * 8, GPU, room=8)
    assert sum(goodput(given_).depths[:8]) > sum(goodput(given_).depths[8:])
    last = replace(given_, remaining=[100] * 16)
    choice = goodput(last)
    assert sum(choice.depths[:8]) < sum(choice.depths[8:])
    assert choice.chosen is not None
    expected = rate(choice.depths, given_) * choice.chosen.seconds
    assert choice.chosen.tokens == pytest.approx(expected)
    short = replace(given_, remaining=[400] * 8 + [100] * 8)
    assert sum(goodput(short).depths[:8]) > sum(goodput(short).depths[8:])


def test_equal_rows_draft_alike_whether_they_are_replaced_or_not() -> None:
    given_ = snapshot([survivals(0.8, 4)] * 32, GPU)
    last = replace(given_, remaining=[50] * 32)
    assert goodput(last).depths == goodput(given_).depths
