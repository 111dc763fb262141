"""Log-probabilities inside captured passes: of the chosen token, its rank, and the top tokens.

They are of the model's own distribution, so the logits of rows that request them are copied before
they are adjusted in place. The vocabulary of a row is split into parts: each part lists its top
tokens, and one program per row merges the lists. The order, ties by id included, is that of
`outrider.workers.sampling.logprobs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.filters import mass_of, mass_of_parts, scores_at
from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)


class LogprobColumn:
    """A row of what `report_logprobs` reports, int32; log-probabilities are the bits of a
    float32."""

    RANK = 0  # of the chosen token; 1 is the most likely
    LOGPROB = 1  # of the chosen token
    TOP = 2  # from here on (id, log-probability) of the most likely, best first


_RANK = tl.constexpr(LogprobColumn.RANK)
_LOGPROB = tl.constexpr(LogprobColumn.LOGPROB)
_TOP = tl.constexpr(LogprobColumn.TOP)

_PART_TOKENS = 2048
_PART_WARPS = 8
_COPY_BLOCK = 4096
_COPY_PROGRAMS = 512

# A score and an id in one number: higher scores first, equal ones by id.
_LAST_ID = tl.constexpr(2**31 - 1)
_SCORE_SHIFT = tl.constexpr(32)
_ID_BITS = tl.constexpr(2**32 - 1)
_LEAST_KEY = tl.constexpr(-(2**63))


def logprob_width(max_top: int) -> int:
    return LogprobColumn.TOP + 2 * max_top


def keep_logits(logits: Tensor, rows: Tensor, num_top: Tensor, kept: Tensor) -> None:
    """Copy the logits of every row that requests log-probabilities.

    `logits` float32 [R, vocab] may be the first columns of wider rows; `kept` float32 has as many
    rows, of `vocab` or more columns. `rows` int32 [R] is the row of each, negative: padding;
    `num_top` int32 [num_rows] is negative for rows that request none.
    """
    num_logits, vocab = logits.shape
    if num_logits == 0:
        return
    num_blocks = triton.cdiv(vocab, _COPY_BLOCK)
    num_parts = max(1, min(_COPY_PROGRAMS // num_logits, num_blocks))
    share = triton.cdiv(num_blocks, num_parts) * _COPY_BLOCK
    pdl = pdl_enabled(logits.device)
    _keep_kernel[(num_logits, num_parts)](
        logits, rows, num_top, kept, logits.stride(0), kept.stride(0), vocab, share,
        BLOCK=_COPY_BLOCK, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def report_logprobs(
    logits: Tensor, tokens: Tensor, rows: Tensor, num_top: Tensor, out: Tensor
) -> None:
    """Log-probabilities of each row of `logits` that requests them; others are not written.

    `tokens` int32 [R] were chosen there. `out` int32 [R, logprob_width(max_top)] lists the row's
    `num_top` top tokens, or the whole vocabulary; see `keep_logits` and `LogprobColumn`.
    """
    num_logits, vocab = logits.shape
    if num_logits == 0:
        return
    max_top = (out.shape[1] - LogprobColumn.TOP) // 2
    count = triton.cdiv(vocab, _PART_TOKENS)
    floats = logits.new_empty(2, num_logits, count, dtype=torch.float32)
    above = logits.new_empty(num_logits, count, dtype=torch.int32)
    lists = logits.new_empty(num_logits, count, max(max_top, 1), dtype=torch.int64)
    pdl = pdl_enabled(logits.device)
    found = (floats[0], floats[1], above, lists)
    _part_kernel[(num_logits, count)](
        logits, tokens, rows, num_top, *found, logits.stride(0), vocab, max_top, lists.shape[2],
        PART=_PART_TOKENS, PDL=pdl, num_warps=_PART_WARPS, **launch_options(pdl),
    )  # fmt: skip
    _merge_kernel[(num_logits,)](
        logits, tokens, rows, num_top, *found, out,
        logits.stride(0), out.stride(0), vocab, count, max_top, lists.shape[2],
        PARTS=triton.next_power_of_2(max(count, 2)), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _num_top_of(rows_ptr, num_top_ptr, index):
    """Top tokens that the row of these logits requests; negative: no log-probabilities."""
    row = tl.load(rows_ptr + index)
    return tl.load(num_top_ptr + row, mask=row >= 0, other=-1)


@triton.jit
def _keep_kernel(
    logits_ptr, rows_ptr, num_top_ptr, kept_ptr, stride, kept_stride, vocab, share,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index, part = tl.program_id(0), tl.program_id(1)
    if _num_top_of(rows_ptr, num_top_ptr, index) >= 0:
        own, place = logits_ptr + index.to(tl.int64) * stride, index.to(tl.int64) * kept_stride
        end = tl.minimum((part + 1) * share, vocab)
        for first in range(part * share, end, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            scores = tl.load(own + ids, mask=ids < end, other=0.0)
            tl.store(kept_ptr + place + ids, scores, mask=ids < end)


@triton.jit
def _key_of(scores, ids):
    scores = tl.where(scores == 0, 0.0, scores)  # -0.0 equals 0.0
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & _LAST_ID)
    return (ordered.to(tl.int64) << _SCORE_SHIFT) | (ids ^ _LAST_ID).to(tl.int64)


@triton.jit
def _of_key(key):
    """Score and id."""
    ordered = (key >> _SCORE_SHIFT).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & _LAST_ID)
    return bits.to(tl.float32, bitcast=True), ((key & _ID_BITS) ^ _LAST_ID).to(tl.int32)


@triton.jit
def _part_kernel(
    logits_ptr, tokens_ptr, rows_ptr, num_top_ptr, highest_ptr, mass_ptr, above_ptr, list_ptr,
    stride, vocab, max_top, list_stride,
    PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For one part of a row: highest score, mass, tokens ranked before the chosen one, and the
    top tokens."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index, part = tl.program_id(0), tl.program_id(1)
    num_listed = tl.minimum(_num_top_of(rows_ptr, num_top_ptr, index), max_top)
    if num_listed >= 0:
        ids = part * PART + tl.arange(0, PART)
        is_token = ids < vocab
        row_ptr = logits_ptr + index.to(tl.int64) * stride
        scores = scores_at(row_ptr, ids, is_token)
        highest, mass = mass_of(scores)
        chosen = tl.maximum(tl.load(tokens_ptr + index), 0)  # any token where there is none
        keys = tl.where(is_token, _key_of(scores, ids), _LEAST_KEY)
        above = tl.sum((keys > _key_of(scores_at(row_ptr, chosen, True), chosen)).to(tl.int32))
        at = index * tl.num_programs(1) + part
        tl.store(highest_ptr + at, highest)
        tl.store(mass_ptr + at, mass)
        tl.store(above_ptr + at, above)
        best = tl.max(keys, axis=0)
        for place in range(0, num_listed):
            tl.store(list_ptr + at.to(tl.int64) * list_stride + place, best)
            best = tl.max(tl.where(keys < best, keys, _LEAST_KEY), axis=0)


@triton.jit
def _merge_kernel(
    logits_ptr, tokens_ptr, rows_ptr, num_top_ptr, highest_ptr, mass_ptr, above_ptr, list_ptr,
    out_ptr, stride, out_stride, vocab, num_parts, max_top, list_stride,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row: sum up the parts and merge their lists."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0)
    num_listed = tl.minimum(_num_top_of(rows_ptr, num_top_ptr, index), max_top)
    if num_listed >= 0:
        parts = tl.arange(0, PARTS)
        is_part = parts < num_parts
        at = index * num_parts + parts
        highest, mass = mass_of_parts(highest_ptr, mass_ptr, at, is_part)
        log_mass = highest + tl.log(mass)
        chosen = tl.maximum(tl.load(tokens_ptr + index), 0)  # any token where there is none
        score = scores_at(logits_ptr + index.to(tl.int64) * stride, chosen, True)
        own = out_ptr + index.to(tl.int64) * out_stride
        above = tl.sum(tl.load(above_ptr + at, mask=is_part, other=0), axis=0)
        tl.store(own + _RANK, above + 1)
        tl.store(own + _LOGPROB, (score - log_mass).to(tl.int32, bitcast=True))

        own_lists = list_ptr + at.to(tl.int64) * list_stride
        taken = tl.zeros_like(parts)  # of each part's list
        for place in range(0, tl.minimum(num_listed, vocab)):
            has_more = is_part & (taken < num_listed)
            keys = tl.load(own_lists + taken, mask=has_more, other=_LEAST_KEY)
            best = tl.max(keys, axis=0)
            taken += (keys == best).to(tl.int32)
            best_score, best_id = _of_key(best)
            tl.store(own + _TOP + 2 * place, best_id)
            bits = (best_score - log_mass).to(tl.int32, bitcast=True)
            tl.store(own + _TOP + 2 * place + 1, bits)
