"""Per-row state on the device between passes: drafts and block tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)


@triton.jit
def keep_drafts_kernel(
    rows_ptr,
    tokens_ptr,
    chances_ptr,
    drafts_ptr,
    confidences_ptr,
    draft_index_ptr,
    num_rows,
    max_drafts,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program, so that `draft_index` is incremented after all writes."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    draft_index = tl.load(draft_index_ptr)
    for first in range(0, num_rows, WIDTH):
        index = first + tl.arange(0, WIDTH)
        row = tl.load(rows_ptr + index, mask=index < num_rows, other=-1).to(tl.int64)
        is_real = row >= 0
        at = row * max_drafts + draft_index
        token = tl.load(tokens_ptr + row, mask=is_real, other=0)
        chance = tl.load(chances_ptr + row, mask=is_real, other=0.0)
        tl.store(drafts_ptr + at, token, mask=is_real)
        tl.store(confidences_ptr + at, chance, mask=is_real)
    tl.store(draft_index_ptr, draft_index + 1)


def keep_drafts(
    rows: Tensor,
    tokens: Tensor,
    chances: Tensor,
    text: TextTable,
    confidences: Tensor,
    draft_index: Tensor,
) -> None:
    """Store each row's draft number `draft_index`, an int32 tensor [1] that is then incremented.

    `rows` int32 [R] are those that drafted, negative: padding; `tokens` int32 and `chances` float32
    are by row number, as are the text's drafts and their `confidences`.
    """
    pdl = pdl_enabled(rows.device)
    keep_drafts_kernel[(1,)](
        rows,
        tokens,
        chances,
        text.drafts,
        confidences,
        draft_index,
        rows.shape[0],
        text.drafts.shape[1],
        WIDTH=128,
        PDL=pdl,
        num_warps=1,  # one warp: all lanes read the index before one writes it
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["count"])
def update_tables_kernel(
    updates_ptr, count, target_ptr, draft_ptr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = lane < count
    is_draft = tl.load(updates_ptr + lane * 3, mask=inside, other=0)
    at = tl.load(updates_ptr + lane * 3 + 1, mask=inside, other=0)
    block = tl.load(updates_ptr + lane * 3 + 2, mask=inside, other=0)
    tl.store(target_ptr + at, block, mask=inside & (is_draft == 0))
    tl.store(draft_ptr + at, block, mask=inside & (is_draft == 1))


def update_tables(updates: Tensor, target_tables: Tensor, draft_tables: Tensor) -> None:
    """Write blocks into tables; `updates` int32 [n, 3]: 0 for the target's or 1 for the draft's,
    the flat index there, the block."""
    pdl = pdl_enabled(updates.device)
    update_tables_kernel[(triton.cdiv(updates.shape[0], 128),)](
        updates,
        updates.shape[0],
        target_tables,
        draft_tables,
        WIDTH=128,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
