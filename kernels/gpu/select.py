"""Selects on the device, after drafting, which drafts are verified.

Before drafting the host fixed each row's depth and the number of drafts the pass verifies, fewer
than are drafted. By the draft's confidences the likeliest are kept, each with all before it in its
row, and the pass is laid out again.

Only for rows whose text does not depend on their drafts: shared noise and greedy. Rejection
sampling is exact only if the number verified does not depend on the drafted tokens, which the
confidence does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.columns import EntryColumn, TotalColumn
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)

LEVEL_BITS = 12
"""Bits in which survival is compared: more precise than any draft's confidence."""

_LEVEL_BITS = tl.constexpr(LEVEL_BITS)
_MIDDLE_LEVEL = tl.constexpr(1 << (LEVEL_BITS - 1))
_HIGHEST_LEVEL = tl.constexpr((1 << LEVEL_BITS) - 1)
_ROW = tl.constexpr(EntryColumn.ROW)
_NUM_TOKENS = tl.constexpr(EntryColumn.NUM_TOKENS)
_DEPTH = tl.constexpr(EntryColumn.DEPTH)
_FIRST_TOKEN = tl.constexpr(EntryColumn.FIRST_TOKEN)
_FIRST_TILE = tl.constexpr(EntryColumn.FIRST_TILE)
_FIRST_LOGIT = tl.constexpr(EntryColumn.FIRST_LOGIT)
_TOKENS = tl.constexpr(TotalColumn.TOKENS)
_TILES = tl.constexpr(TotalColumn.TILES)
_LOGITS = tl.constexpr(TotalColumn.LOGITS)
_ENTRIES = tl.constexpr(TotalColumn.ENTRIES)
_SELECTED = tl.constexpr(TotalColumn.SELECTED)
_TILE_TOKENS = tl.constexpr(TotalColumn.TILE_TOKENS)


def select_drafts(entries: Tensor, totals: Tensor, confidences: Tensor) -> None:
    """Keep `totals[SELECTED]` of the drafts of `entries`, or all if there are fewer; a negative
    number leaves everything as planned.

    `confidences` float32 [rows, max_depth], by row number, estimate that a draft is accepted if all
    before it in its row are. The product of a row's first j is the survival of its j-th; the
    highest are kept, of equal ones those of the first entries. Depths, token counts, offsets of the
    entries and the totals are updated; the order of the entries stays, and so do all other tokens.
    """
    num_entries, max_depth = entries.shape[1], confidences.shape[1]
    rows, depths = triton.next_power_of_2(num_entries), triton.next_power_of_2(max_depth)
    pdl = pdl_enabled(entries.device)
    _select_kernel[(1,)](
        entries, totals, confidences, entries.stride(0), confidences.stride(0), num_entries,
        ROWS=rows, DEPTHS=depths, PDL=pdl, num_warps=min(max(rows * depths // 256, 4), 32),
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _begin_of_each(sizes):
    return tl.cumsum(sizes, axis=0) - sizes


@triton.jit
def _kept_of_each(levels, num_selected):
    """How many of each row's levels are among the `num_selected` highest of all; -1 is no level."""
    edge = 0  # becomes the highest level reached by `num_selected` drafts
    for step in tl.static_range(_LEVEL_BITS):
        higher = edge + (_MIDDLE_LEVEL >> step)
        reached = tl.sum(tl.sum((levels >= higher).to(tl.int32), axis=1), axis=0)
        edge = tl.where(reached >= num_selected, higher, edge)
    above = tl.sum((levels > edge).to(tl.int32), axis=1)
    at_edge = tl.sum((levels == edge).to(tl.int32), axis=1)
    left = num_selected - tl.sum(above, axis=0) - _begin_of_each(at_edge)
    return above + tl.minimum(tl.maximum(left, 0), at_edge)


@triton.jit
def _select_kernel(
    entries_ptr, totals_ptr, confidence_ptr, stride, confidence_stride, num_entries,
    ROWS: tl.constexpr, DEPTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for all entries: whether a draft is kept depends on every other."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    num_selected = tl.load(totals_ptr + _SELECTED)
    if num_selected >= 0:
        entry, place = tl.arange(0, ROWS), tl.arange(0, DEPTHS)
        is_entry = entry < tl.minimum(tl.load(totals_ptr + _ENTRIES), num_entries)
        own = entries_ptr + entry
        row = tl.load(own + _ROW * stride, mask=is_entry, other=0).to(tl.int64)
        count = tl.load(own + _NUM_TOKENS * stride, mask=is_entry, other=0)
        planned = tl.load(own + _DEPTH * stride, mask=is_entry, other=-1)
        tile_tokens = tl.load(totals_ptr + _TILE_TOKENS)

        is_draft = place[None, :] < planned[:, None]
        at = row[:, None] * confidence_stride + place[None, :]
        chance = tl.load(confidence_ptr + at, mask=is_draft, other=0.0)
        chance = tl.where(chance > 0, tl.minimum(chance, 1.0), 0.0)  # NaN counts as 0
        survival = tl.cumprod(chance, axis=1)
        levels = tl.where(is_draft, (survival * _HIGHEST_LEVEL).to(tl.int32), -1)
        depth = tl.where(planned > 0, _kept_of_each(levels, num_selected), planned)

        count += depth - planned
        tiles = (count + tile_tokens - 1) // tile_tokens
        tl.debug_barrier()  # all reads precede the writes below
        tl.store(own + _DEPTH * stride, depth, mask=is_entry)
        tl.store(own + _NUM_TOKENS * stride, count, mask=is_entry)
        tl.store(own + _FIRST_TOKEN * stride, _begin_of_each(count), mask=is_entry)
        tl.store(own + _FIRST_TILE * stride, _begin_of_each(tiles), mask=is_entry)
        tl.store(own + _FIRST_LOGIT * stride, _begin_of_each(depth + 1), mask=is_entry)
        tl.store(totals_ptr + _TOKENS, tl.sum(count, axis=0))
        tl.store(totals_ptr + _TILES, tl.sum(tiles, axis=0))
        tl.store(totals_ptr + _LOGITS, tl.sum(depth + 1, axis=0))
