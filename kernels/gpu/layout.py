"""Lays out a pass on the device from a plan: tokens, positions, slots, tiles and logits.

The host plans a step before the previous one has ended, so it knows how many tokens each row
computes but not which, nor their positions: lengths, texts and drafts are in device memory. These
kernels combine both. They are the first of a captured pass, so they fill its unused room with
padding: tokens without a slot, empty tiles, and logits without a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.attention import MAX_DECODE_QUERIES
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)
from outrider.kernels.types import RaggedBatch

FIRST_TOKENS = 2
"""A drafting round starts with the last two committed tokens: after full acceptance the draft has
seen neither."""


@dataclass(frozen=True, slots=True)
class PassBuffers:
    """A pass as kernels read it, at fixed addresses."""

    ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int64 [T]
    tiles: Tensor  # int32 [tiles, 4]
    logit_tokens: Tensor  # int32 [logits]: which token of the pass predicts
    logit_rows: Tensor  # int32 [logits]: for which row; negative: padding
    logit_positions: Tensor  # int32 [logits]: of the predicted token

    @classmethod
    def create(cls, tokens: int, tiles: int, logits: int, device: torch.device) -> PassBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            zeros(tokens),
            zeros(tokens),
            zeros(tokens, dtype=torch.int64),
            zeros(tiles, 4),
            zeros(logits),
            zeros(logits),
            zeros(logits),
        )

    def first(self, tokens: int, tiles: int, logits: int) -> PassBuffers:
        """The same memory, for a smaller pass."""
        return PassBuffers(
            self.ids[:tokens],
            self.positions[:tokens],
            self.slots[:tokens],
            self.tiles[:tiles],
            self.logit_tokens[:logits],
            self.logit_rows[:logits],
            self.logit_positions[:logits],
        )

    def batch(
        self,
        tables: Tensor,
        max_query_len: int,
        max_context_len: int,
        places_of_long_tile: int = 0,
    ) -> RaggedBatch:
        empty = self.tiles[:0, 0]
        return RaggedBatch(
            self.positions,
            self.slots,
            empty,
            empty,
            tables,
            max_query_len,
            max_context_len,
            self.tiles,
            places_of_long_tile,
        )


@triton.jit
def _block_slot(tables_ptr, row, position, stored, max_blocks, BLOCK: tl.constexpr):
    """Where a position's keys and values go; -1 where they are not stored."""
    at = tables_ptr + row * max_blocks + position // BLOCK
    block = tl.load(at, mask=stored, other=0).to(tl.int64)
    return tl.where(stored, block * BLOCK + position % BLOCK, -1)


@triton.jit
def lay_tiles(
    tiles_ptr,
    first_tile,
    first,
    count,
    start,
    row,
    max_len,
    TILE: tl.constexpr,
    LONG_TILE: tl.constexpr,  # of an entry with more than SHORT tokens
    SHORT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The tiles of one entry, whose `count` tokens from position `start` on are those from `first`
    on in the pass. A long tile takes the first of the places of its short ones; the others are
    empty."""
    lane = tl.arange(0, WIDTH)
    size = tl.where(count > SHORT, LONG_TILE, TILE)
    for at in range(0, count, WIDTH * TILE):
        offset = at + lane * TILE
        inside = offset < count
        tile = tiles_ptr + (first_tile + offset // TILE) * 4
        tl.store(tile, first + offset, mask=inside)
        held = tl.minimum(tl.minimum(count, max_len - start) - offset, size)
        held = tl.where(offset % size == 0, tl.maximum(held, 0), 0)
        tl.store(tile + 1, held, mask=inside)
        tl.store(tile + 2, start + offset, mask=inside)
        tl.store(tile + 3, row.to(tl.int32), mask=inside)


@triton.jit
def target_layout_kernel(
    entries_ptr,
    totals_ptr,
    tokens_ptr,
    lengths_ptr,
    drafts_ptr,
    tables_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    tiles_ptr,
    logit_tokens_ptr,
    logit_rows_ptr,
    logit_positions_ptr,
    entries_stride,
    max_len,
    max_drafts,
    max_blocks,
    num_tokens,
    num_tiles,
    num_logits,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LONG_TILE: tl.constexpr,
    SHORT: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program e lays out entry e; the last one writes the padding."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    if entry == tl.num_programs(0) - 1:
        for at in range(tl.load(totals_ptr), num_tokens, WIDTH):
            inside = at + lane < num_tokens
            tl.store(ids_ptr + at + lane, 0, mask=inside)
            tl.store(positions_ptr + at + lane, 0, mask=inside)
            tl.store(slots_ptr + at + lane, -1, mask=inside)
        for at in range(tl.load(totals_ptr + 1), num_tiles, WIDTH):
            tl.store(tiles_ptr + (at + lane) * 4 + 1, 0, mask=at + lane < num_tiles)
        for at in range(tl.load(totals_ptr + 2), num_logits, WIDTH):
            inside = at + lane < num_logits
            tl.store(logit_tokens_ptr + at + lane, 0, mask=inside)
            tl.store(logit_rows_ptr + at + lane, -1, mask=inside)
            tl.store(logit_positions_ptr + at + lane, 0, mask=inside)
    elif entry < tl.load(totals_ptr + 3):
        own = entries_ptr + entry
        row = tl.load(own).to(tl.int64)
        count = tl.load(own + entries_stride)
        start = tl.load(own + 2 * entries_stride)
        depth = tl.load(own + 3 * entries_stride)
        first = tl.load(own + 4 * entries_stride)
        first_tile = tl.load(own + 5 * entries_stride)
        first_logit = tl.load(own + 6 * entries_stride)
        length = tl.load(lengths_ptr + row)
        num_known = tl.where(start < 0, 1, count)  # the others are drafts
        start = tl.where(start < 0, length - 1, start)
        for at in range(0, count, WIDTH):
            index = at + lane
            inside = index < count
            position = start + index
            drafted = inside & (index >= num_known)
            known = (index < num_known) & (position < max_len)
            token = tl.load(tokens_ptr + row * max_len + position, mask=known, other=0)
            guess = drafts_ptr + row * max_drafts + index - 1
            # A draft that is not there is negative; its row of the pass is computed for nothing.
            token += tl.maximum(tl.load(guess, mask=drafted, other=0), 0)
            slot = _block_slot(
                tables_ptr, row, position, inside & (position < max_len), max_blocks, BLOCK
            )
            tl.store(ids_ptr + first + index, token, mask=inside)
            tl.store(positions_ptr + first + index, tl.minimum(position, max_len - 1), mask=inside)
            tl.store(slots_ptr + first + index, slot, mask=inside)
        lay_tiles(
            tiles_ptr, first_tile, first, count, start, row, max_len, TILE, LONG_TILE, SHORT, WIDTH
        )
        for at in range(0, depth + 1, WIDTH):
            index = at + lane
            inside = index <= depth
            token = count - 1 - depth + index
            tl.store(logit_tokens_ptr + first_logit + index, first + token, mask=inside)
            tl.store(logit_rows_ptr + first_logit + index, row.to(tl.int32), mask=inside)
            tl.store(logit_positions_ptr + first_logit + index, start + token + 1, mask=inside)


@triton.jit
def draft_layout_kernel(
    entries_ptr,
    totals_ptr,
    tokens_ptr,
    lengths_ptr,
    drafts_ptr,
    computed_ptr,
    tables_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    tiles_ptr,
    logit_tokens_ptr,
    logit_rows_ptr,
    logit_positions_ptr,
    entries_stride,
    max_len,
    max_drafts,
    max_blocks,
    draft_index_ptr,
    draft_index,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COMMITTED: tl.constexpr,
    BEFORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program e lays out the tokens of one row that drafts: its last COMMITTED tokens, of which
    those already computed are not stored again, or else the last draft, BEFORE positions earlier. A
    row that has all its drafts, or would exceed the longest text, is padding."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    is_real = entry < tl.load(totals_ptr + 3)
    row = tl.load(entries_ptr + entry, mask=is_real, other=0).to(tl.int64)
    depth = tl.load(entries_ptr + 3 * entries_stride + entry, mask=is_real, other=0)
    length = tl.load(lengths_ptr + row)
    drafted = tl.where(draft_index < 0, tl.load(draft_index_ptr), draft_index)
    # Lookahead slots are reserved for `depth` drafts; more would never be verified.
    is_real = is_real & (drafted < depth) & (length + drafted <= max_len)
    count: tl.constexpr = COMMITTED if COMMITTED > 0 else 1
    index = tl.arange(0, count)
    if COMMITTED > 0:
        position = length - COMMITTED + index
        known = (position >= 0) & (position < max_len)
        token = tl.load(tokens_ptr + row * max_len + position, mask=known, other=0)
        least = tl.load(computed_ptr + row)
        skipped = tl.minimum(tl.maximum(COMMITTED - length, 0), COMMITTED - 1)
    else:
        position = length - 1 - BEFORE + drafted + index
        last = drafts_ptr + row * max_drafts + drafted - 1 + index
        token = tl.load(last, mask=index < tl.where(is_real & (drafted > 0), count, 0), other=0)
        least = 0
        skipped = 0
    least = tl.maximum(tl.where(is_real, least, max_len), 0)
    stored = (position >= least) & (position < max_len)
    position = tl.minimum(tl.maximum(position, 0), max_len - 1)
    slot = _block_slot(tables_ptr, row, position, stored, max_blocks, BLOCK)
    first = entry * count
    tl.store(ids_ptr + first + index, token)
    tl.store(positions_ptr + first + index, position)
    tl.store(slots_ptr + first + index, slot)
    num_tiles: tl.constexpr = (count + TILE - 1) // TILE
    for number in tl.static_range(num_tiles):
        begin = tl.maximum(number * TILE, skipped)
        tile = tiles_ptr + (entry * num_tiles + number) * 4
        held = tl.maximum(tl.minimum((number + 1) * TILE, count) - begin, 0)
        tl.store(tile, first + begin)
        tl.store(tile + 1, tl.where(is_real, held, 0))
        tl.store(tile + 2, length - count - BEFORE + drafted + begin)
        tl.store(tile + 3, row.to(tl.int32))
    tl.store(logit_tokens_ptr + entry, first + count - 1)
    tl.store(logit_rows_ptr + entry, tl.where(is_real, row, -1).to(tl.int32))
    tl.store(logit_positions_ptr + entry, length + drafted)


def lay_out_target(
    entries: Tensor,
    totals: Tensor,
    text: TextTable,
    tables: Tensor,
    buffers: PassBuffers,
    block_size: int,
    tile_tokens: int,
    long_tile_tokens: int | None = None,
) -> None:
    """Fill `buffers` from the first `totals[ENTRIES]` of `entries`, and their rest with padding.

    Tiles take places of `tile_tokens` tokens. With `long_tile_tokens`, a multiple of it, entries
    of more than `MAX_DECODE_QUERIES` tokens have tiles of that size.
    `tables` int32 [rows, max_blocks] are the block tables of the model that runs the pass.
    """
    pdl = pdl_enabled(entries.device)
    target_layout_kernel[(entries.shape[1] + 1,)](
        entries,
        totals,
        text.tokens,
        text.lengths,
        text.drafts,
        tables,
        buffers.ids,
        buffers.positions,
        buffers.slots,
        buffers.tiles,
        buffers.logit_tokens,
        buffers.logit_rows,
        buffers.logit_positions,
        entries.stride(0),
        text.tokens.shape[1],
        text.drafts.shape[1],
        tables.shape[1],
        buffers.ids.shape[0],
        buffers.tiles.shape[0],
        buffers.logit_tokens.shape[0],
        BLOCK=block_size,
        TILE=tile_tokens,
        LONG_TILE=long_tile_tokens or tile_tokens,
        SHORT=MAX_DECODE_QUERIES,
        WIDTH=64,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )


def lay_out_draft(
    entries: Tensor,
    totals: Tensor,
    text: TextTable,
    tables: Tensor,
    buffers: PassBuffers,
    block_size: int,
    tile_tokens: int,
    draft_index: int | Tensor,
    num_committed: int = FIRST_TOKENS,
    num_before: int = 0,
) -> None:
    """Fill `buffers` for the pass of a drafting round over `entries` that makes each row's draft
    number `draft_index`: index 0 from the last `num_committed` tokens, a power of two, later ones
    from the last draft. An int32 tensor [1] holds an index from 1 on.

    A draft has its position in the text, or `num_before` positions less; with `num_committed` 0
    the pass of index 0 has no tokens, but rows and positions of its logits.
    """
    pdl = pdl_enabled(entries.device)
    is_constant = isinstance(draft_index, int)
    draft_layout_kernel[(entries.shape[1],)](
        entries,
        totals,
        text.tokens,
        text.lengths,
        text.drafts,
        text.draft_computed,
        tables,
        buffers.ids,
        buffers.positions,
        buffers.slots,
        buffers.tiles,
        buffers.logit_tokens,
        buffers.logit_rows,
        buffers.logit_positions,
        entries.stride(0),
        text.tokens.shape[1],
        text.drafts.shape[1],
        tables.shape[1],
        totals if is_constant else draft_index,  # somewhere to read from
        draft_index if is_constant else -1,
        BLOCK=block_size,
        TILE=tile_tokens,
        COMMITTED=num_committed if is_constant and draft_index == 0 else 0,
        BEFORE=num_before,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
