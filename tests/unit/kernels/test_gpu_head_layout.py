"""What a head needs of a pass that has been, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS
from torch import Tensor

from outrider.kernels.gpu.accept import OutcomeColumn, TextTable, outcome_width
from outrider.kernels.gpu.head_layout import (
    keep_states,
    lay_out_predicted,
    lay_out_successors,
    num_tile_places,
    take_states,
)
from outrider.kernels.gpu.layout import PassBuffers, lay_out_draft

pytestmark = GPU_MARKS

MAX_LEN, ROWS, DRAFTS, BLOCK, WIDTH = 80, 7, 3, 4, 1100  # of a state: more than a program takes


def _tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _text(rng: random.Random) -> TextTable:
    return TextTable(
        tokens=_tensor([[rng.randrange(1, 500) for _ in range(MAX_LEN)] for _ in range(ROWS)]),
        lengths=_tensor([rng.randrange(4, MAX_LEN - DRAFTS) for _ in range(ROWS)]),
        drafts=_tensor([[rng.randrange(500, 900) for _ in range(DRAFTS)] for _ in range(ROWS)]),
        draft_computed=_tensor([0] * ROWS),
    )


@pytest.mark.parametrize(
    ("tile", "long_tile", "lengths"),
    [
        (1, 1, [1, 4, 2]),
        (4, 4, [1, 4, 9, 2, 3]),
        (3, 3, [5, 1, 1, 7]),
        (2, 16, [3, 1, 40, 35, 2]),
        (0, 0, [2, 5]),
    ],
)
def test_each_token_of_a_pass_has_its_successor_and_a_tile_of_the_heads_own_size(
    tile: int, long_tile: int, lengths: list[int]
) -> None:
    rng = random.Random(tile)
    text = _text(rng)
    rows = rng.sample(range(ROWS), len(lengths))
    starts = [rng.randrange(MAX_LEN - count) for count in lengths]
    starts[-1] = MAX_LEN - lengths[-1]  # nothing is known behind its last token
    entries: list[tuple[int, ...]] = []
    positions: list[int] = []
    expected: list[int] = []
    for row, count, start in zip(rows, lengths, starts, strict=True):
        entries.append((row, count, start, -1, len(positions), 77, 77, 0))
        own = range(start, start + count)
        positions += own
        expected += [int(text.tokens[row, at + 1]) if at + 1 < MAX_LEN else 0 for at in own]
    padding = 5
    size, room = len(positions) + padding, len(entries) + 2
    plan = _tensor([*entries, (-1,) * 8, (-1,) * 8]).T.contiguous()
    totals = _tensor([len(positions), 77, 77, len(entries), -1, 1])
    next_ids = torch.full((size,), -77, dtype=torch.int32, device=DEVICE)
    places = num_tile_places(size, room, tile) if tile else 0
    tiles = torch.full((places, 4), 55, dtype=torch.int32, device=DEVICE)
    at = _tensor([*positions, *[0] * padding])
    lay_out_successors(plan, totals, text, at, next_ids, tiles, tile, long_tile)
    assert next_ids.tolist() == [*expected, *[0] * padding]
    held = [each for each in tiles.tolist() if each[1]]
    expected_tiles = []
    for (row, count, start, _, first, *_), length in zip(entries, lengths, strict=True):
        step = long_tile if length > 33 else tile
        expected_tiles += [
            [first + offset, min(step, count - offset), start + offset, row]
            for offset in range(0, count, max(step, 1))
        ]
    assert held == (expected_tiles if tile else [])


def test_the_tokens_that_were_predicted_are_read_where_they_were_kept() -> None:
    text = _text(random.Random(2))
    rows, positions = [3, 3, -1, 0, 5], [4, 5, 0, MAX_LEN - 1, MAX_LEN]
    next_ids = torch.full((5,), -77, dtype=torch.int32, device=DEVICE)
    lay_out_predicted(_tensor(rows), _tensor(positions), text, next_ids)
    known = [int(text.tokens[row, at]) for row, at in ((3, 4), (3, 5), (0, MAX_LEN - 1))]
    assert next_ids.tolist() == [*known[:2], 0, known[2], 0]


@pytest.mark.parametrize("is_by_token", [True, False])
def test_the_state_behind_which_a_text_ends_is_kept_for_its_row(is_by_token: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(12, WIDTH, generator=generator).to(DEVICE)
    table = torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE)
    before = table.clone()
    # A prompt that goes on, one that ends, and two rows that verified drafts; then padding.
    entries = [
        (4, 5, 0, -1, 0, 0, 0, 0),
        (2, 2, 3, 0, 5, 0, 0, 0),
        (6, 3, -1, 2, 7, 0, 1, 0),
        (0, 2, -1, 1, 10, 0, 4, 0),
        (-1,) * 8,
    ]
    accepted = [9, 0, 1, 1, 9]
    outcomes = torch.full((5, outcome_width(DRAFTS)), 9, dtype=torch.int32, device=DEVICE)
    outcomes[:, OutcomeColumn.NUM_ACCEPTED] = _tensor(accepted)
    logit_tokens = _tensor([6, 7, 8, 9, 10, 11])
    index = logit_tokens if is_by_token else None
    keep_states(_tensor(entries).T.contiguous(), outcomes, states, table, index)
    for row, logit in ((2, 0), (6, 2), (0, 5)):
        before[row] = states[logit_tokens[logit] if is_by_token else logit]
    assert torch.equal(table, before)


def test_a_round_takes_the_states_of_its_rows() -> None:
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    entries = _tensor([(5, *[0] * 7), (1, *[0] * 7), (-1,) * 8]).T.contiguous()
    out = torch.full((3, WIDTH), torch.nan, device=DEVICE)
    take_states(entries, _tensor([0, 0, 0, 2]), table, out)
    assert torch.equal(out, torch.stack((table[5], table[1], torch.zeros_like(table[0]))))


def test_a_heads_draft_stands_where_the_token_before_it_does() -> None:
    text = _text(random.Random(6))
    tables = _tensor(random.Random(7).sample(range(1000), ROWS * MAX_LEN // BLOCK)).view(ROWS, -1)
    rows, depths = [4, 1, 6], [3, 2, 1]
    entries = [(row, 0, 0, depth, 0, 0, 0, 0) for row, depth in zip(rows, depths, strict=True)]
    plan = _tensor([*entries, (-1,) * 8]).T.contiguous()
    for level in range(DRAFTS):
        buffers = PassBuffers.create(4, 4, 4, DEVICE)
        lay_out_draft(plan, _tensor([0, 0, 0, 3]), text, tables, buffers, BLOCK, 2, level, 0, 1)
        for at, (row, depth) in enumerate(zip(rows, depths, strict=True)):
            length = int(text.lengths[row])
            goes_on = level < depth
            assert int(buffers.logit_rows[at]) == (row if goes_on else -1)
            if not (goes_on and level):
                continue
            position = length - 2 + level
            slot = int(tables[row, position // BLOCK]) * BLOCK + position % BLOCK
            assert int(buffers.ids[at]) == int(text.drafts[row, level - 1])
            assert int(buffers.positions[at]) == position
            assert int(buffers.slots[at]) == slot
            assert buffers.tiles[at].tolist() == [at, 1, position, row]
            assert int(buffers.logit_tokens[at]) == at
            assert int(buffers.logit_positions[at]) == length + level
        assert int(buffers.logit_rows[3]) == -1
        assert int(buffers.slots[3]) == -1
