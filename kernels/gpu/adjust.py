"""Bias, penalties and bans inside captured passes, applied to logits in place.

A request's settings for each token are one int32 mark, so the whole adjustment is elementwise.
The arithmetic is, operation for operation, that of `outrider.workers.sampling.chain.adjust` up to
temperature; equal logits give equal scores, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.accept import OutcomeColumn
from outrider.kernels.gpu.columns import Mark
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)

_BLOCK = 1024
# Most passes have nothing to adjust: limit the programs that only find this out.
_PROGRAMS = 512


_MAX_COUNT = tl.constexpr((1 << Mark.COUNT_BITS) - 1)
_BIAS_SHIFT = tl.constexpr(Mark.BIAS_SHIFT)
_MAX_BIASES = tl.constexpr(Mark.MAX_BIASES)
_IN_PROMPT = tl.constexpr(Mark.IN_PROMPT)
_EARLY_SHIFT = tl.constexpr(Mark.BARRED_EARLY.bit_length() - 1)
_LATE_SHIFT = tl.constexpr(Mark.BARRED_LATE.bit_length() - 1)
_NUM_ACCEPTED = tl.constexpr(OutcomeColumn.NUM_ACCEPTED)
_TOKENS = tl.constexpr(OutcomeColumn.TOKENS)
_NEG_INF = tl.constexpr(float("-inf"))


@dataclass(frozen=True, slots=True)
class AdjustTable:
    """The adjustments of each row. Other fields are valid only where `is_used`."""

    is_used: Tensor  # int32 [num_rows], 0 where a row's logits are not adjusted
    marks: Tensor  # int32 [num_rows, vocab], see `Mark`
    biases: Tensor  # float32 [num_rows, 1 + Mark.MAX_BIASES], the first unused
    penalties: Tensor  # float32 [num_rows, 3]: repetition, frequency, presence
    late_from: Tensor  # int32 [num_rows], the position from which `Mark.BARRED_LATE` counts

    @classmethod
    def create(cls, num_rows: int, vocab: int, device: torch.device) -> AdjustTable:
        """A table that no row uses."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            is_used=zeros(num_rows),
            marks=zeros(num_rows, vocab),
            biases=zeros(num_rows, 1 + Mark.MAX_BIASES, dtype=torch.float32),
            penalties=zeros(num_rows, 3, dtype=torch.float32),
            late_from=zeros(num_rows),
        )


def adjust_logits(
    logits: Tensor,
    table: AdjustTable,
    rows: Tensor,
    positions: Tensor,
    lengths: Tensor,
    drafts: Tensor,
) -> None:
    """Adjust the logits of every row that needs it, in place.

    `logits` float32 [R, vocab] may be the first columns of wider rows, and have fewer columns than
    the marks. `rows` int32 [R] is the row of the tables each belongs to; negative: padding.
    `positions` int32 [R] are those of the tokens to be chosen: the token at p follows, after
    the row's `lengths` int32 committed tokens, the first p - length of its `drafts` int32
    [num_rows, max_depth].
    """
    num_logits, vocab = logits.shape
    if num_logits == 0:
        return
    num_blocks = triton.cdiv(vocab, _BLOCK)
    num_parts = max(1, min(_PROGRAMS // num_logits, num_blocks))
    share = triton.cdiv(num_blocks, num_parts) * _BLOCK
    pdl = pdl_enabled(logits.device)
    _adjust_kernel[(num_logits, num_parts)](
        logits, rows, positions, lengths, drafts,
        table.is_used, table.marks, table.biases, table.penalties, table.late_from,
        logits.stride(0), table.marks.stride(0), drafts.stride(0), vocab, drafts.shape[1], share,
        BLOCK=_BLOCK, PDL=pdl,
        enable_fp_fusion=False,  # the host rounds every product
        **launch_options(pdl),
    )  # fmt: skip


def count_tokens(outcomes: Tensor, depths: Tensor, rows: Tensor, table: AdjustTable) -> None:
    """After `accept_drafts`: count the tokens it committed.

    `outcomes`, `depths` and `rows` are those of that call; `outcomes` may have more rows.
    """
    if len(rows) == 0:
        return
    max_new = outcomes.shape[1] - OutcomeColumn.TOKENS
    pdl = pdl_enabled(outcomes.device)
    _count_kernel[(len(rows),)](
        outcomes, depths, rows, table.is_used, table.marks,
        outcomes.stride(0), table.marks.stride(0),
        BLOCK=triton.next_power_of_2(max_new), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _penalised(scores, counts, is_in_prompt, repetition, frequency, presence):
    """Of a token that occurs in prompt or output; `counts` are of the output."""
    # A plain division is an approximation on GPUs.
    changed = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
    changed -= counts.to(tl.float32) * frequency
    changed -= (counts > 0).to(tl.float32) * presence
    return tl.where((counts > 0) | is_in_prompt, changed, scores)


@triton.jit
def _adjust_kernel(
    logits_ptr, rows_ptr, positions_ptr, length_ptr, draft_ptr,
    is_used_ptr, mark_ptr, bias_ptr, penalty_ptr, late_from_ptr,
    stride, mark_stride, draft_stride, vocab, max_depth, share,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if tl.load(is_used_ptr + row, mask=row >= 0, other=0) != 0:
        position = tl.load(positions_ptr + index)
        # Padding may hold rows of an earlier plan, whose text has grown since.
        num_drafts = tl.minimum(position - tl.load(length_ptr + row), max_depth)
        is_early = position < tl.load(late_from_ptr + row)
        barred_shift = tl.where(is_early, _EARLY_SHIFT, _LATE_SHIFT)
        repetition = tl.load(penalty_ptr + row * 3)
        frequency = tl.load(penalty_ptr + row * 3 + 1)
        presence = tl.load(penalty_ptr + row * 3 + 2)
        own_logits = logits_ptr + index.to(tl.int64) * stride
        own_biases = bias_ptr + row * (_MAX_BIASES + 1)
        end = tl.minimum((part + 1) * share, vocab)
        for first in range(part * share, end, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            inside = ids < end
            scores = tl.load(own_logits + ids, mask=inside, other=0.0)
            marks = tl.load(mark_ptr + row * mark_stride + ids, mask=inside, other=0)

            bias_index = (marks >> _BIAS_SHIFT) & _MAX_BIASES
            biases = tl.load(own_biases + bias_index, mask=bias_index > 0, other=0.0)
            scores = tl.where(bias_index > 0, scores + biases, scores)

            counts = marks & _MAX_COUNT
            for at in range(0, num_drafts):
                counts += (ids == tl.load(draft_ptr + row * draft_stride + at)).to(tl.int32)
            is_in_prompt = (marks & _IN_PROMPT) != 0
            scores = _penalised(scores, counts, is_in_prompt, repetition, frequency, presence)

            is_barred = ((marks >> barred_shift) & 1) != 0
            tl.store(own_logits + ids, tl.where(is_barred, _NEG_INF, scores), mask=inside)


@triton.jit
def _count_kernel(
    outcome_ptr, depth_ptr, row_ptr, is_used_ptr, mark_ptr, outcome_stride, mark_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0)
    row = tl.load(row_ptr + index).to(tl.int64)
    if tl.load(is_used_ptr + row, mask=tl.load(depth_ptr + index) >= 0, other=0) != 0:
        own = outcome_ptr + index.to(tl.int64) * outcome_stride
        place = tl.arange(0, BLOCK)
        is_new = place <= tl.load(own + _NUM_ACCEPTED)
        tokens = tl.load(own + _TOKENS + place, mask=is_new, other=0)
        # A token may be among the new ones twice.
        tl.atomic_add(mark_ptr + row * mark_stride + tokens, 1, mask=is_new & (tokens >= 0))
