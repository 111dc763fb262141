"""Which drafts are verified, decided on the device once they are there.

Before drafting the host fixed how far each row may go and how many drafts the pass verifies in all,
fewer than are drafted. Now that it is known how sure the draft was of each, the likeliest are kept,
each with all before it in its row, and the pass is laid out anew.

This is for rows whose text does not depend on their drafts: those of shared noise, and greedy ones.
Rejection sampling is exact only if what is verified does not depend on the token drafted, which the
confidence here does; such rows do not run where this does.
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
"""Survival is compared in so many bits: finer than anyone's confidence is right."""

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

    `confidences` float32 [rows, max_depth] are chances by row number: that a draft stands if all
    before it in its row do. The product of a row's first j is the survival of its j-th; the best
    are kept, of equal ones those of the first entries. Depths, numbers of tokens, where each entry
    begins and the totals follow; the order of the entries stays, and so does all that is no draft.
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
def _kept_of_each(levels, wanted):
    """How many of each row's levels are among the `wanted` highest of all; -1 is no level."""
    edge = 0  # becomes the highest level that as many reach
    for step in tl.static_range(_LEVEL_BITS):
        higher = edge + (_MIDDLE_LEVEL >> step)
        reached = tl.sum(tl.sum((levels >= higher).to(tl.int32), axis=1), axis=0)
        edge = tl.where(reached >= wanted, higher, edge)
    above = tl.sum((levels > edge).to(tl.int32), axis=1)
    at_edge = tl.sum((levels == edge).to(tl.int32), axis=1)
    left = wanted - tl.sum(above, axis=0) - _begin_of_each(at_edge)
    return above + tl.minimum(tl.maximum(left, 0), at_edge)


@triton.jit
def _select_kernel(
    entries_ptr, totals_ptr, confidence_ptr, stride, confidence_stride, num_entries,
    ROWS: tl.constexpr, DEPTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for all entries: whether a draft is kept depends on every other."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    wanted = tl.load(totals_ptr + _SELECTED)
    if wanted >= 0:
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
        chance = tl.where(chance > 0, tl.minimum(chance, 1.0), 0.0)  # and 0 for what is no number
        survival = tl.cumprod(chance, axis=1)
        levels = tl.where(is_draft, (survival * _HIGHEST_LEVEL).to(tl.int32), -1)
        depth = tl.where(planned > 0, _kept_of_each(levels, wanted), planned)

        count += depth - planned
        tiles = (count + tile_tokens - 1) // tile_tokens
        tl.debug_barrier()  # all have read what is written over now
        tl.store(own + _DEPTH * stride, depth, mask=is_entry)
        tl.store(own + _NUM_TOKENS * stride, count, mask=is_entry)
        tl.store(own + _FIRST_TOKEN * stride, _begin_of_each(count), mask=is_entry)
        tl.store(own + _FIRST_TILE * stride, _begin_of_each(tiles), mask=is_entry)
        tl.store(own + _FIRST_LOGIT * stride, _begin_of_each(depth + 1), mask=is_entry)
        tl.store(totals_ptr + _TOKENS, tl.sum(count, axis=0))
        tl.store(totals_ptr + _TILES, tl.sum(tiles, axis=0))
        tl.store(totals_ptr + _LOGITS, tl.sum(depth + 1, axis=0))
