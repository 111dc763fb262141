"""Laying passes out on the device, against plain loops."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS

from outrider.catalog.proposers import DRAFT, info_of
from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.layout import FIRST_TOKENS, PassBuffers, lay_out_draft, lay_out_target
from outrider.kernels.gpu.tables import keep_drafts, update_tables

pytestmark = GPU_MARKS

BLOCK, MAX_LEN, ROWS, DRAFTS, TILE = 4, 40, 7, 3, 2


def test_the_first_pass_of_a_draft_has_room_for_all_that_it_may_lack() -> None:
    assert info_of(DRAFT).traits.max_behind == FIRST_TOKENS


class State(NamedTuple):
    text: TextTable
    tables: torch.Tensor


def _state(rng: random.Random) -> State:
    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    lengths = [rng.choice([1, 2, rng.randrange(3, MAX_LEN - DRAFTS)]) for _ in range(ROWS)]
    blocks = rng.sample(range(1000), ROWS * MAX_LEN // BLOCK)
    text = TextTable(
        tokens=tensor([[rng.randrange(1, 500) for _ in range(MAX_LEN)] for _ in range(ROWS)]),
        lengths=tensor(lengths),
        drafts=tensor([[rng.randrange(500, 900) for _ in range(DRAFTS)] for _ in range(ROWS)]),
        draft_computed=tensor([max(0, length - rng.choice([1, 2])) for length in lengths]),
    )
    return State(text, tensor(blocks).view(ROWS, -1))


def _poisoned(tokens: int, tiles: int, logits: int) -> PassBuffers:
    buffers = PassBuffers.create(tokens, tiles, logits, DEVICE)
    for name in PassBuffers.__slots__:
        getattr(buffers, name).fill_(-77)
    return buffers


def _slot(state: State, row: int, position: int) -> int:
    return int(state.tables[row, position // BLOCK]) * BLOCK + position % BLOCK


@pytest.mark.parametrize("seed", range(4))
def test_prompts_decode_rows_and_verification_in_one_pass(seed: int) -> None:
    rng = random.Random(seed)
    state = _state(rng)
    tokens: list[int] = []
    positions: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    logits: list[tuple[int, int, int]] = []
    slots, entries = [], []
    for row in rng.sample(range(ROWS), 5):
        length = int(state.text.lengths[row])
        if rng.random() < 0.5:
            start = rng.randrange(length)
            count = rng.randrange(1, length - start + 1)
            depth = rng.choice([0, -1])
            text = state.text.tokens[row, start : start + count].tolist()
            entry_start = start
        else:
            depth, start, entry_start = rng.randrange(DRAFTS + 1), length - 1, -1
            count = depth + 1
            text = [int(state.text.tokens[row, start]), *state.text.drafts[row, :depth].tolist()]
        entries.append((row, count, entry_start, depth, len(tokens), len(tiles), len(logits)))
        for offset in range(0, count, TILE):
            tile = (len(tokens) + offset, min(TILE, count - offset), start + offset, row)
            tiles.append(tile)
        for at in range(count - 1 - depth, count):
            logits.append((len(tokens) + at, row, start + at + 1))
        tokens += text
        positions += range(start, start + count)
        slots += [_slot(state, row, at) for at in range(start, start + count)]

    buffers = _poisoned(len(tokens) + 5, len(tiles) + 3, len(logits) + 2)
    plan = torch.tensor([*entries, (0,) * 7], dtype=torch.int32, device=DEVICE).T.contiguous()
    totals = [len(tokens), len(tiles), len(logits), len(entries)]
    lay_out_target(
        plan, torch.tensor(totals, dtype=torch.int32, device=DEVICE), *state, buffers, BLOCK, TILE
    )
    assert buffers.ids.tolist() == [*tokens, *[0] * 5]
    assert buffers.positions.tolist() == [*positions, *[0] * 5]
    assert buffers.slots.tolist() == [*slots, *[-1] * 5]
    assert buffers.tiles[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert buffers.tiles[len(tiles) :, 1].tolist() == [0] * 3
    laid = torch.stack((buffers.logit_tokens, buffers.logit_rows, buffers.logit_positions), 1)
    assert laid.tolist() == [*[list(logit) for logit in logits], *[[0, -1, 0]] * 2]


def test_a_long_prompt_beside_decoding_has_tiles_of_its_own_size() -> None:
    state = _state(random.Random(1))
    state.text.lengths[3] = 38
    entries = [(2, 1, -1, 0, 0, 0, 0), (3, 35, 2, -1, 1, 1, 1), (5, 3, 0, 0, 36, 19, 1)]
    plan = torch.tensor(entries, dtype=torch.int32, device=DEVICE).T.contiguous()
    totals = torch.tensor([39, 21, 2, 3], dtype=torch.int32, device=DEVICE)
    buffers = _poisoned(39, 21, 2)
    lay_out_target(plan, totals, *state, buffers, BLOCK, TILE, 8)
    held = [tile for tile in buffers.tiles.tolist() if tile[1]]
    length = int(state.text.lengths[2])
    assert held == [
        [0, 1, length - 1, 2],
        *[[1 + at, min(8, 35 - at), 2 + at, 3] for at in range(0, 35, 8)],
        [36, 2, 0, 5],
        [38, 1, 2, 5],
    ]


@pytest.mark.parametrize("is_on_device", [False, True], ids=["constant", "read"])
@pytest.mark.parametrize(("seed", "committed", "tile_tokens"), [(0, 2, 4), (1, 2, 1), (2, 8, 3)])
def test_drafting_rounds(seed: int, committed: int, tile_tokens: int, is_on_device: bool) -> None:
    """The level of a pass is the host's to say, or, from the second on, in the device's memory."""
    rng = random.Random(seed)
    state = _state(rng)
    rows = rng.sample(range(ROWS), 4)
    depths = [rng.randrange(1, DRAFTS + 1) for _ in rows]
    entries = [(row, 0, 0, depth, 0, 0, 0) for row, depth in zip(rows, depths, strict=True)]
    plan = torch.tensor([*entries, (0,) * 7], dtype=torch.int32, device=DEVICE).T.contiguous()
    totals = torch.tensor([0, 0, 0, len(rows)], dtype=torch.int32, device=DEVICE)
    for index in range(DRAFTS):
        count = 1 if index else committed
        num_tiles = -(-count // tile_tokens)
        buffers = _poisoned(count * 5, num_tiles * 5, 5)
        level: int | torch.Tensor = index
        if is_on_device and index:
            level = torch.tensor([index], dtype=torch.int32, device=DEVICE)
        lay_out_draft(plan, totals, *state, buffers, BLOCK, tile_tokens, level, committed)
        for at, (row, depth) in enumerate(zip(rows, depths, strict=True)):
            length = int(state.text.lengths[row])
            own = slice(at * count, (at + 1) * count)
            tiles = buffers.tiles[at * num_tiles : (at + 1) * num_tiles].tolist()
            if index >= depth:  # it has its drafts, and is padding
                assert buffers.slots[own].tolist() == [-1]
                assert [tile[1] for tile in tiles] == [0]
                assert int(buffers.logit_rows[at]) == -1
                continue
            if index:
                position = length - 1 + index
                assert buffers.ids[own].tolist() == [int(state.text.drafts[row, index - 1])]
                assert buffers.positions[own].tolist() == [position]
                assert buffers.slots[own].tolist() == [_slot(state, row, position)]
                assert tiles == [[at, 1, position, row]]
            else:
                _check_first_pass(buffers, own, state, row, tiles, tile_tokens)
            logit = (buffers.logit_tokens, buffers.logit_rows, buffers.logit_positions)
            expected = [own.stop - 1, row, length + index]
            assert [int(each[at]) for each in logit] == expected
        assert buffers.tiles[4 * num_tiles :, 1].tolist() == [0] * num_tiles  # padding
        assert int(buffers.logit_rows[4]) == -1
        assert buffers.slots[4 * count :].tolist() == [-1] * count


def _check_first_pass(
    buffers: PassBuffers,
    own: slice,
    state: State,
    row: int,
    tiles: list[list[int]],
    tile_tokens: int,
) -> None:
    """The last tokens; those the draft has computed are not stored, nor those before the text."""
    length, computed = int(state.text.lengths[row]), int(state.text.draft_computed[row])
    first = length - (own.stop - own.start)
    seen: list[int] = []  # by the tiles, in order
    for begin, count, position, table_row in tiles:
        assert count <= tile_tokens
        assert count == 0 or (table_row == row and position - begin == first - own.start)
        seen += range(begin, begin + count)
    for at, position in enumerate(range(first, length), start=own.start):
        if position < 0:
            assert int(buffers.slots[at]) == -1
            continue
        assert int(buffers.ids[at]) == int(state.text.tokens[row, position])
        assert int(buffers.positions[at]) == position
        slot = _slot(state, row, position) if position >= computed else -1
        assert int(buffers.slots[at]) == slot
    assert seen == list(range(own.start - min(first, 0), own.stop))


def test_guesses_become_the_drafts_of_their_level_one_level_after_the_other() -> None:
    rng = random.Random(3)
    text = _state(rng).text
    confidences = torch.zeros(text.drafts.shape, device=DEVICE)
    drafts, sure = text.drafts.tolist(), confidences.tolist()
    level = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for number in range(1, DRAFTS):
        rows = [*rng.sample(range(ROWS), 4), -1]
        guesses = [rng.randrange(1000, 2000) for _ in range(ROWS)]
        chances = [rng.randrange(1, 8) / 8 for _ in range(ROWS)]
        keep_drafts(
            torch.tensor(rows, dtype=torch.int32, device=DEVICE),
            torch.tensor(guesses, dtype=torch.int32, device=DEVICE),
            torch.tensor(chances, device=DEVICE),
            text,
            confidences,
            level,
        )
        for row in rows[:-1]:
            drafts[row][number], sure[row][number] = guesses[row], chances[row]
        assert text.drafts.tolist() == drafts
        assert confidences.tolist() == sure
        assert int(level) == number + 1


# Lengths about the end of the longest text; one that ended in a step under way is beyond it.
NEAR_THE_END = (MAX_LEN - 2, MAX_LEN - 1, MAX_LEN, MAX_LEN + 2)


def _near_the_end() -> tuple[State, torch.Tensor, torch.Tensor]:
    """Rows there, as in the plans of the draft and the target."""
    state = _state(random.Random(5))
    num_rows = len(NEAR_THE_END)
    columns = (getattr(state.text, name)[:num_rows] for name in TextTable.__slots__)
    text = TextTable(*columns)
    text.lengths.copy_(torch.tensor(NEAR_THE_END))
    text.draft_computed.copy_(text.lengths - 2)
    count = DRAFTS + 1
    entries = [
        (row, count, -1, DRAFTS, row * count, row * 2, row * count) for row in range(num_rows)
    ]
    plan = torch.tensor(entries, dtype=torch.int32, device=DEVICE).T.contiguous()
    sums = (num_rows * count, num_rows * 2, num_rows * count, num_rows)
    totals = torch.tensor(sums, dtype=torch.int32, device=DEVICE)
    return State(text, state.tables[:num_rows]), plan, totals


def _assert_inside(buffers: PassBuffers, state: State) -> None:
    """Nothing is looked up at or behind MAX_LEN, and each row stores in blocks of its own."""
    assert int(buffers.positions.min()) >= 0
    assert int(buffers.positions.max()) < MAX_LEN
    for first, count, position, row in buffers.tiles.tolist():
        assert count >= 0
        assert count == 0 or position + count <= MAX_LEN
        own = {-1, *(int(block) for block in state.tables[row])}
        slots = buffers.slots[first : first + count].tolist() if count else []
        assert {slot // BLOCK for slot in slots} <= own


@pytest.mark.parametrize("index", range(DRAFTS))
def test_no_round_drafts_past_the_longest_text(index: int) -> None:
    state, plan, totals = _near_the_end()
    count = 1 if index else 2
    buffers = _poisoned(count * len(NEAR_THE_END), len(NEAR_THE_END), len(NEAR_THE_END))
    lay_out_draft(plan, totals, *state, buffers, BLOCK, 2, index, 2)
    _assert_inside(buffers, state)
    goes_on = [length + index <= MAX_LEN for length in NEAR_THE_END]
    assert [row >= 0 for row in buffers.logit_rows.tolist()] == goes_on
    assert [slot >= 0 for slot in buffers.slots[count - 1 :: count].tolist()] == goes_on


def test_no_pass_verifies_past_the_longest_text() -> None:
    state, plan, totals = _near_the_end()
    tokens, tiles, logits, _ = totals.tolist()
    buffers = _poisoned(tokens, tiles, logits)
    lay_out_target(plan, totals, *state, buffers, BLOCK, TILE)
    _assert_inside(buffers, state)
    stored = (buffers.slots.view(len(NEAR_THE_END), -1) >= 0).sum(1).tolist()
    assert stored == [3, 2, 1, 0]
    seen = buffers.tiles[:, 1].view(len(NEAR_THE_END), -1).sum(1).tolist()
    assert seen == stored


def test_table_updates_reach_the_table_they_name() -> None:
    target = torch.zeros(3, 50, dtype=torch.int32, device=DEVICE)
    draft = torch.zeros_like(target)
    places = random.Random(1).sample(range(150), 140)
    updates = [(at % 2, at, at + 1000) for at in places]
    update_tables(torch.tensor(updates, dtype=torch.int32, device=DEVICE), target, draft)
    for table, which in ((target, 0), (draft, 1)):
        expected = [0] * 150
        for is_draft, at, block in updates:
            if is_draft == which:
                expected[at] = block
        assert table.flatten().tolist() == expected
