"""Compares what a draft would have proposed with the text it catches up on."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.columns import EntryColumn, TotalColumn
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)

_ROW = tl.constexpr(EntryColumn.ROW)
_NUM_TOKENS = tl.constexpr(EntryColumn.NUM_TOKENS)
_START = tl.constexpr(EntryColumn.START)
_DEPTH = tl.constexpr(EntryColumn.DEPTH)
_FIRST_LOGIT = tl.constexpr(EntryColumn.FIRST_LOGIT)
_ENTRIES = tl.constexpr(TotalColumn.ENTRIES)


def settle_catch_up(
    entries: Tensor, totals: Tensor, chosen: Tensor, text: TextTable, hits: Tensor
) -> None:
    """After a pass over known text, laid out from `entries`: the draft has now computed all of it.

    `chosen` int32 [logits] are the tokens it predicted; `hits` int32 [logits] becomes 1 where the
    text has that token, 0 where it has another, and -1 where it ends before it.
    """
    pdl = pdl_enabled(entries.device)
    _settle_catch_up_kernel[(entries.shape[1],)](
        entries, totals, chosen, text.tokens, text.lengths, text.draft_computed, hits,
        entries.stride(0), text.tokens.stride(0), text.tokens.shape[1],
        WIDTH=32, PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _settle_catch_up_kernel(
    entries_ptr, totals_ptr, chosen_ptr, token_ptr, length_ptr, computed_ptr, hit_ptr,
    stride, token_stride, max_len,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    if entry < tl.load(totals_ptr + _ENTRIES):
        own = entries_ptr + entry
        row = tl.load(own + _ROW * stride).to(tl.int64)
        end = tl.load(own + _START * stride) + tl.load(own + _NUM_TOKENS * stride)
        depth = tl.load(own + _DEPTH * stride)
        first = tl.load(own + _FIRST_LOGIT * stride)
        tl.store(computed_ptr + row, end)
        known = tl.minimum(tl.load(length_ptr + row), max_len)
        for at in range(0, depth + 1, WIDTH):
            index = at + tl.arange(0, WIDTH)
            inside = index <= depth
            position = end - depth + index
            is_known = inside & (position < known)
            token = tl.load(token_ptr + row * token_stride + position, mask=is_known, other=-1)
            guess = tl.load(chosen_ptr + first + index, mask=inside, other=-2)
            hit = tl.where(is_known, (token == guess).to(tl.int32), -1)
            tl.store(hit_ptr + first + index, hit, mask=inside)
