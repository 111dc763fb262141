"""Selection on the device: the likeliest drafts are verified, and the pass is laid out again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA
from torch import Tensor

from outrider.kernels.gpu.columns import EntryColumn, TotalColumn
from outrider.kernels.gpu.select import LEVEL_BITS, select_drafts

pytestmark = GPU_MARKS

PROMPT = -1  # no draft among its tokens, none of them predicts anything
UNTOUCHED = -99


class Plan(NamedTuple):
    entries: Tensor  # with room for more than there are
    totals: Tensor
    confidences: Tensor

    def copy(self) -> Plan:
        return Plan(*(part.clone() for part in self))

    @property
    def depths(self) -> list[int]:
        found: list[int] = self.entries[EntryColumn.DEPTH].tolist()
        return found[: int(self.totals[TotalColumn.ENTRIES])]


def a_plan(
    depths: Sequence[int],
    confidences: Sequence[Sequence[float]],
    num_selected: int,
    tile_tokens: int = 4,
    rng: random.Random | None = None,
) -> Plan:
    """Entries of these depths, in rows in any order; the confidences are theirs, by entry. One
    without depth may be a prompt of several tokens; the last of its tokens predicts at depth 0."""
    rng = rng or random.Random(0)
    room = len(depths) + 3
    entries = torch.full((EntryColumn.SIZE, room), UNTOUCHED, dtype=torch.int32)
    table = torch.full((room, len(confidences[0])), 0.99)  # padding is no less
    rows = rng.sample(range(room), len(depths))
    first = tile = logit = 0
    for entry, (depth, row) in enumerate(zip(depths, rows, strict=True)):
        count = depth + 1 if depth > 0 else rng.choice([1, 4, 9])
        values = (row, count, 50 + entry, depth, first, tile, logit, depth)
        entries[:, entry] = torch.tensor(values)
        table[row] = torch.tensor(confidences[entry])
        first, tile, logit = first + count, tile - (-count // tile_tokens), logit + depth + 1
    totals = torch.tensor([first, tile, logit, len(depths), num_selected, tile_tokens])
    return Plan(entries.to(DEVICE), totals.to(DEVICE, torch.int32), table.to(DEVICE))


def select_by_hand(plan: Plan) -> None:
    """The rule in Python: all drafts in one list, best first, of equals the first."""
    entries, totals, confidences = plan
    num_selected, tile_tokens = totals.tolist()[TotalColumn.SELECTED :]
    columns = entries.T.tolist()[: len(plan.depths)]
    drafts = []
    for entry, own in enumerate(columns):
        survival = 1.0
        for place in range(own[EntryColumn.DEPTH]):
            chance = float(confidences[own[EntryColumn.ROW], place])
            survival *= min(max(chance, 0.0), 1.0) if chance == chance else 0.0
            level = int(survival * (2**LEVEL_BITS - 1))
            drafts.append((-level, entry, place))
    kept = [entry for _, entry, _ in sorted(drafts)[:num_selected]]
    first = tile = logit = 0
    for entry, own in enumerate(columns):
        planned = own[EntryColumn.DEPTH]
        depth = kept.count(entry) if planned > 0 else planned
        count = own[EntryColumn.NUM_TOKENS] - planned + depth
        own[EntryColumn.NUM_TOKENS], own[EntryColumn.DEPTH] = count, depth
        own[EntryColumn.FIRST_TOKEN : EntryColumn.DRAFTED] = first, tile, logit
        entries[:, entry] = torch.tensor(own)
        first, tile, logit = first + count, tile - (-count // tile_tokens), logit + depth + 1
    totals[: TotalColumn.ENTRIES] = torch.tensor([first, tile, logit])


def assert_as_by_hand(plan: Plan) -> None:
    expected = plan.copy()
    select_by_hand(expected)
    select_drafts(*plan)
    assert torch.equal(plan.entries, expected.entries)
    assert torch.equal(plan.totals, expected.totals)


def random_chances(rng: random.Random, num_rows: int, max_depth: int) -> list[list[float]]:
    """Products of these are exact, and often equal."""
    return [[rng.randrange(9) / 8 for _ in range(max_depth)] for _ in range(num_rows)]


@pytest.mark.parametrize(
    ("num_rows", "max_depth"), [(1, 1), (1, 5), (7, 3), (24, 5), (70, 4)], ids=str
)
@pytest.mark.parametrize("tile_tokens", [1, 4])
def test_the_pass_is_that_of_the_rule(num_rows: int, max_depth: int, tile_tokens: int) -> None:
    """With prompts in between, and rows without drafts; nothing beyond the plan is touched."""
    rng = random.Random(num_rows * max_depth)
    for attempt in range(4):
        depths = [rng.randrange(PROMPT, max_depth + 1) for _ in range(num_rows)]
        depths[0] = max_depth
        available = sum(depth for depth in depths if depth > 0)
        num_selected = [0, 1, available // 2, available - 1][attempt]
        chances = random_chances(rng, num_rows, max_depth)
        plan = a_plan(depths, chances, num_selected, tile_tokens, rng)
        assert_as_by_hand(plan)
        assert sum(depth for depth in plan.depths if depth > 0) == num_selected


@pytest.mark.parametrize("num_selected", [6, 7, 1000])
def test_no_more_is_verified_than_there_is(num_selected: int) -> None:
    plan = a_plan([3, PROMPT, 2, 0, 1], [[0.0, 0.5, 1.0]] * 5, num_selected)
    expected = plan.copy()
    select_drafts(*plan)
    assert all(map(torch.equal, plan, expected))


def test_without_a_number_everything_stays_as_planned() -> None:
    """Even where the plan is not laid out in one piece."""
    plan = a_plan([3, 2], [[0.1, 0.2, 0.3]] * 2, -1)
    plan.entries[EntryColumn.FIRST_TOKEN] += 5
    expected = plan.copy()
    select_drafts(*plan)
    assert all(map(torch.equal, plan, expected))


def test_a_draft_is_worth_what_all_before_it_allow() -> None:
    """A sure one behind a doubtful one is doubtful itself."""
    plan = a_plan([3, 3, 3], [[0.3, 1.0, 1.0], [0.9, 0.8, 0.1], [0.6, 0.2, 1.0]], 4)
    assert_as_by_hand(plan)
    assert plan.depths == [1, 2, 1]


def test_equals_are_taken_from_the_first_entries_on() -> None:
    plan = a_plan([2, 0, 4, 4], [[0.5, 0.5, 1.0, 1.0]] * 2 + [[1.0, 0.5, 1.0, 1.0]] * 2, 5)
    assert_as_by_hand(plan)
    assert plan.depths == [1, 0, 3, 1]


def test_what_is_no_chance_is_none() -> None:
    """Still as many are verified as the pass has room for."""
    inf, nan = float("inf"), float("nan")
    plan = a_plan([2, 2, 2, 2], [[nan, 0.9], [-inf, 0.9], [inf, 0.9], [0.5, nan]], 4)
    assert_as_by_hand(plan)
    assert plan.depths == [1, 0, 2, 1]


def test_selecting_twice_is_selecting_once() -> None:
    plan = a_plan([4] * 6, random_chances(random.Random(1), 6, 4), 9)
    select_drafts(*plan)
    expected = plan.copy()
    select_drafts(*plan)
    assert all(map(torch.equal, plan, expected))


@pytest.mark.parametrize(("num_rows", "max_depth"), [(1000, 2), (64, 32)], ids=str)
def test_any_chances_leave_the_best_and_exactly_so_many(num_rows: int, max_depth: int) -> None:
    """Up to the rounding of survivals."""
    rng = random.Random(2)
    depths = [rng.randrange(max_depth + 1) for _ in range(num_rows)]
    chances = [[rng.random() ** 0.25 for _ in range(max_depth)] for _ in range(num_rows)]
    num_selected = sum(depths) // 3
    plan = a_plan(depths, chances, num_selected)
    select_drafts(*plan)
    kept = plan.depths
    assert sum(kept) == num_selected
    assert all(0 <= own <= planned for own, planned in zip(kept, depths, strict=True))
    survivals = torch.tensor(chances).double().cumprod(-1)
    place = torch.arange(max_depth)
    is_kept = place < torch.tensor(kept)[:, None]
    is_left = ~is_kept & (place < torch.tensor(depths)[:, None])
    assert survivals[is_kept].min() > survivals[is_left].max() - 2.0 ** (1 - LEVEL_BITS)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_a_recorded_selection_follows_plan_and_confidences() -> None:
    rng = random.Random(3)
    plan = a_plan([5] * 40, random_chances(rng, 40, 5), -1)
    select_drafts(*plan.copy())  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_drafts(*plan)
    for num_selected in (0, 3, 100, -1, 199):
        depths = [rng.randrange(PROMPT, 6) for _ in range(40)]
        fresh = a_plan(depths, random_chances(rng, 40, 5), num_selected, rng=rng)
        for place, values in zip(plan, fresh, strict=True):
            place.copy_(values)
        if num_selected >= 0:
            select_by_hand(fresh)
        graph.replay()
        assert all(map(torch.equal, plan, fresh))
