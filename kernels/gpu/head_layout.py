"""Device inputs of a head on the target's hidden states: the next token of each token of a pass,
tiles in the head's own size, and a table of each row's state.

The head runs over a pass after acceptance. For rejected tokens it may compute anything: their
entries are overwritten before they are read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.accept import OutcomeColumn, TextTable
from outrider.kernels.gpu.attention import MAX_DECODE_QUERIES
from outrider.kernels.gpu.columns import EntryColumn, TotalColumn
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)
from outrider.kernels.gpu.layout import lay_tiles

_ROW = tl.constexpr(EntryColumn.ROW)
_NUM_TOKENS = tl.constexpr(EntryColumn.NUM_TOKENS)
_DEPTH = tl.constexpr(EntryColumn.DEPTH)
_FIRST_TOKEN = tl.constexpr(EntryColumn.FIRST_TOKEN)
_FIRST_LOGIT = tl.constexpr(EntryColumn.FIRST_LOGIT)
_TOKENS = tl.constexpr(TotalColumn.TOKENS)
_ENTRIES = tl.constexpr(TotalColumn.ENTRIES)
_NUM_ACCEPTED = tl.constexpr(OutcomeColumn.NUM_ACCEPTED)

_WIDTH = 64
_MAX_BLOCK = 1024


def num_tile_places(num_tokens: int, num_entries: int, tile_tokens: int) -> int:
    """Places `lay_out_successors` needs for tiles of `tile_tokens` tokens."""
    return (num_tokens + num_entries * (tile_tokens - 1)) // tile_tokens


def lay_out_successors(
    entries: Tensor,
    totals: Tensor,
    text: TextTable,
    positions: Tensor,
    next_ids: Tensor,
    tiles: Tensor,
    tile_tokens: int,
    long_tile_tokens: int = 0,
) -> None:
    """The next tokens of those of a finished pass, from the current texts, and tiles over the pass.

    `positions` int32 [T] are those of its tokens; `next_ids` int32 [T] is 0 past the end of a text.
    `tiles` int32 [num_tile_places, 4] hold up to `tile_tokens` of an entry, or, in entries of more
    than `MAX_DECODE_QUERIES`, up to `long_tile_tokens`, a multiple. With a `tile_tokens` of 0 there
    are none.
    """
    pdl = pdl_enabled(entries.device)
    _successors_kernel[(entries.shape[1] + 1,)](
        entries, totals, text.tokens, positions, next_ids, tiles,
        entries.stride(0), text.tokens.shape[1], next_ids.shape[0], tiles.shape[0],
        TILE=max(tile_tokens, 1), LONG_TILE=max(long_tile_tokens, tile_tokens, 1),
        SHORT=MAX_DECODE_QUERIES, HAS_TILES=tile_tokens > 0, WIDTH=_WIDTH, PDL=pdl,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip


def lay_out_predicted(rows: Tensor, positions: Tensor, text: TextTable, next_ids: Tensor) -> None:
    """The tokens at these rows and positions, int32 [n] each, in the current texts; 0 where the row
    is negative or the position past the table."""
    pdl = pdl_enabled(rows.device)
    _predicted_kernel[(triton.cdiv(rows.shape[0], _WIDTH),)](
        rows, positions, text.tokens, next_ids, rows.shape[0], text.tokens.shape[1],
        WIDTH=_WIDTH, PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


def keep_states(
    entries: Tensor,
    outcomes: Tensor,
    states: Tensor,
    table: Tensor,
    logit_tokens: Tensor | None = None,
) -> None:
    """For each entry that sampled, store the state that predicted its last committed token in its
    row of `table` [rows, width].

    `states` [n, width] are those of the tokens of the pass, of which `logit_tokens` predict, or of
    these alone if that is None. `outcomes` are those of `accept_drafts` for the same entries.
    """
    width = table.shape[1]
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    pdl = pdl_enabled(entries.device)
    _keep_states_kernel[(entries.shape[1], triton.cdiv(width, block))](
        entries, outcomes, states, table, states if logit_tokens is None else logit_tokens,
        entries.stride(0), outcomes.stride(0), states.stride(0), width,
        BY_TOKEN=logit_tokens is not None, BLOCK=block, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def take_states(entries: Tensor, totals: Tensor, table: Tensor, out: Tensor) -> None:
    """Gather `table` [rows, width] for the rows of `entries` into `out` [entries, width]; zeros for
    padding."""
    width = table.shape[1]
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    pdl = pdl_enabled(entries.device)
    _take_states_kernel[(entries.shape[1], triton.cdiv(width, block))](
        entries, totals, table, out, width, BLOCK=block, PDL=pdl, **launch_options(pdl)
    )


@triton.jit
def _successors_kernel(
    entries_ptr, totals_ptr, token_ptr, position_ptr, next_ptr, tiles_ptr,
    stride, max_len, num_tokens, num_tiles,
    TILE: tl.constexpr, LONG_TILE: tl.constexpr, SHORT: tl.constexpr, HAS_TILES: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program e lays out entry e, the last one the padding. An entry's tiles start where those
    before it would end if each had one partial tile; there may be an empty place between."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    num_entries = tl.load(totals_ptr + _ENTRIES)
    if entry == tl.num_programs(0) - 1:
        held = tl.load(totals_ptr + _TOKENS)
        for at in range(held, num_tokens, WIDTH):
            tl.store(next_ptr + at + lane, 0, mask=at + lane < num_tokens)
        if HAS_TILES:
            for at in range((held + num_entries * (TILE - 1)) // TILE, num_tiles, WIDTH):
                tl.store(tiles_ptr + (at + lane) * 4 + 1, 0, mask=at + lane < num_tiles)
    elif entry < num_entries:
        own = entries_ptr + entry
        row = tl.load(own + _ROW * stride).to(tl.int64)
        count = tl.load(own + _NUM_TOKENS * stride)
        first = tl.load(own + _FIRST_TOKEN * stride)
        start = tl.load(position_ptr + first)
        for at in range(0, count, WIDTH):
            inside = at + lane < count
            place = start + at + lane + 1
            known = inside & (place < max_len)
            token = tl.load(token_ptr + row * max_len + place, mask=known, other=0)
            tl.store(next_ptr + first + at + lane, token, mask=inside)
        if HAS_TILES:
            first_tile = (first + entry * (TILE - 1)) // TILE
            end = first_tile + (count + TILE - 1) // TILE
            next_tile = (first + count + (entry + 1) * (TILE - 1)) // TILE
            if end < next_tile:
                tl.store(tiles_ptr + end * 4 + 1, 0)
            lay_tiles(
                tiles_ptr, first_tile, first, count, start, row, max_len,
                TILE, LONG_TILE, SHORT, WIDTH,
            )  # fmt: skip


@triton.jit
def _predicted_kernel(
    row_ptr, position_ptr, token_ptr, next_ptr, count, max_len,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = index < count
    row = tl.load(row_ptr + index, mask=inside, other=-1).to(tl.int64)
    position = tl.load(position_ptr + index, mask=inside, other=0)
    known = (row >= 0) & (position < max_len)
    token = tl.load(token_ptr + row * max_len + position, mask=known, other=0)
    tl.store(next_ptr + index, token, mask=inside)


@triton.jit
def _keep_states_kernel(
    entries_ptr, outcome_ptr, state_ptr, table_ptr, logit_token_ptr,
    stride, outcome_stride, state_stride, width,
    BY_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    own = entries_ptr + entry
    if tl.load(own + _DEPTH * stride) >= 0:
        row = tl.load(own + _ROW * stride).to(tl.int64)
        at = tl.load(own + _FIRST_LOGIT * stride)
        at += tl.load(outcome_ptr + entry * outcome_stride + _NUM_ACCEPTED)
        if BY_TOKEN:
            at = tl.load(logit_token_ptr + at)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        state = tl.load(state_ptr + at.to(tl.int64) * state_stride + column, mask=inside)
        tl.store(table_ptr + row * width + column, state, mask=inside)


@triton.jit
def _take_states_kernel(
    entries_ptr, totals_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    is_real = entry < tl.load(totals_ptr + _ENTRIES)
    row = tl.load(entries_ptr + entry, mask=is_real, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < tl.where(is_real, width, 0)
    state = tl.load(table_ptr + row * width + column, mask=held, other=0.0)
    tl.store(out_ptr + entry.to(tl.int64) * width + column, state, mask=column < width)
