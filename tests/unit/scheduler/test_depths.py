"""How far rows are drafted: the fixed policy, and that any other can take its place."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from scheduler_tools import Simulation, make_request

from outrider.catalog.proposers import DRAFT
from outrider.scheduler.depths import DepthChoice, DepthSnapshot, fixed_depths


def snapshot(max_depths: Sequence[int], room: int, step: int = 0) -> DepthSnapshot:
    count = len(max_depths)
    ones, ready = [1] * count, [True] * count
    return DepthSnapshot(step, room, 0, 0, [DRAFT] * count, max_depths, ones, ready)


def test_every_row_gets_what_it_wants_if_there_is_room() -> None:
    assert fixed_depths(snapshot([5, 0, 3], room=8)).depths == [5, 0, 3]


def test_rows_are_cut_to_one_level() -> None:
    assert fixed_depths(snapshot([5, 1, 5], room=5)).depths == [2, 1, 2]


def test_who_gets_one_more_changes_from_step_to_step() -> None:
    got = [fixed_depths(snapshot([3, 3, 3], room=4, step=step)).depths for step in range(3)]
    assert got == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]


@given(st.lists(st.integers(0, 32), min_size=1), st.integers(0, 200), st.integers(0, 100))
def test_no_row_gets_more_than_it_wants_and_the_room_is_used(
    max_depths: list[int], room: int, step: int
) -> None:
    depths = fixed_depths(snapshot(max_depths, room, step)).depths
    assert all(0 <= depth <= most for depth, most in zip(depths, max_depths, strict=True))
    assert sum(depths) == min(sum(max_depths), room)


def test_another_policy_decides_from_what_the_planner_tells_it() -> None:
    seen: list[DepthSnapshot] = []

    def only_the_second(given: DepthSnapshot) -> DepthChoice:
        seen.append(given)
        return DepthChoice([0, *given.max_depths[1:]])

    simulation = Simulation(budget=40, choose_depths=only_the_second)
    for name in "ab":
        simulation.add(make_request(name, [1, 2, 3], 20, proposer=DRAFT, depth=4))
    simulation.step()
    plan = simulation.step()
    assert plan is not None
    assert [row.depth for row in plan.rows] == [0, 4]
    assert seen[0].max_depths == [4, 4] and seen[0].room == 38
    simulation.drain()


def test_a_policy_that_asks_for_too_much_gets_what_there_is() -> None:
    simulation = Simulation(
        budget=9, choose_depths=lambda given: DepthChoice([99] * len(given.max_depths))
    )
    for name in "ab":
        simulation.add(make_request(name, [1, 2, 3], 20, proposer=DRAFT, depth=4))
    simulation.step()
    plan = simulation.step()
    assert plan is not None
    assert [row.depth for row in plan.rows] == [4, 3]
    simulation.drain()
