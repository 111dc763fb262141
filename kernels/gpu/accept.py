"""Acceptance on the device: a draft is accepted if the target chose the same token.

The text of every row is on the device too, so the next pass can start before the host knows this
one's outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.launch import (
    launch_options,
    let_next_start,
    pdl_enabled,
    wait_for_inputs,
)


class OutcomeColumn:
    """Columns of the int32 tensor that `accept_drafts` writes, one row per sampled row; see
    `outcome_width`."""

    BASE_LEN = 0  # committed length before
    DEPTH = 1  # drafts verified
    NUM_ACCEPTED = 2
    TOKENS = 3  # the new ones from here on: the accepted drafts, then the target's own; then -1


_BASE_LEN = tl.constexpr(OutcomeColumn.BASE_LEN)
_DEPTH = tl.constexpr(OutcomeColumn.DEPTH)
_NUM_ACCEPTED = tl.constexpr(OutcomeColumn.NUM_ACCEPTED)
_TOKENS = tl.constexpr(OutcomeColumn.TOKENS)


def outcome_width(max_depth: int) -> int:
    return OutcomeColumn.TOKENS + max_depth + 1


@dataclass(frozen=True, slots=True)
class TextTable:
    """The text of each row on the device, and its length; all int32, by row number."""

    tokens: Tensor  # [num_rows, max_len], committed
    lengths: Tensor  # [num_rows], committed tokens
    drafts: Tensor  # [num_rows, max_depth], draft tokens
    draft_computed: Tensor  # [num_rows], how many positions of the draft's KV are valid

    @classmethod
    def create(cls, num_rows: int, max_len: int, max_depth: int, device: torch.device) -> TextTable:
        return cls(
            tokens=torch.zeros(num_rows, max_len, dtype=torch.int32, device=device),
            lengths=torch.zeros(num_rows, dtype=torch.int32, device=device),
            drafts=torch.zeros(num_rows, max_depth, dtype=torch.int32, device=device),
            draft_computed=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )


def accept_drafts(
    chosen: Tensor,
    first_logit: Tensor,
    depths: Tensor,
    drafted: Tensor,
    rows: Tensor,
    text: TextTable,
    out: Tensor,
    kv_rule: Callable[[int, int, int, int, int], int] | None = None,
) -> None:
    """Commit, for each of the B sampled rows of a pass, its accepted drafts and one token more.

    `chosen` int32 or int64 [R] are the tokens chosen for the logit rows; those of sampled row b
    start at `first_logit[b]`, one more than the `depths[b]` drafts that were verified. It is row
    `rows[b]` of `text`, and no two b share one. A negative depth is padding: nothing is written.
    `drafted[b]` drafts were made by the proposer with KV. `kv_rule`, a function of (computed, fed,
    drafted, accepted, base_len), says how much of its KV is valid now; Triton compiles it, so it
    has arithmetic, min and max only. Without a rule, or drafts, its KV is unchanged.
    `out` int32 [B, outcome_width(max_depth)] says what happened, see `OutcomeColumn`. Tokens beyond
    the text's `max_len` are reported, and counted in the length, but not kept. A token of -1
    (none could be chosen) is the last committed and is kept as 0.
    """
    num_sampled, max_depth = len(rows), text.drafts.shape[1]
    if num_sampled == 0:
        return
    pdl = pdl_enabled(chosen.device)
    rule = None if kv_rule is None else _compiled(kv_rule)
    _accept_kernel[(num_sampled,)](
        chosen, first_logit, depths, drafted, rows,
        text.drafts, text.lengths, text.tokens, text.draft_computed, out,
        text.drafts.stride(0), text.tokens.stride(0), out.stride(0), text.tokens.shape[1],
        max_depth, KV_RULE=rule, BLOCK=triton.next_power_of_2(max_depth + 1), PDL=pdl,
        num_warps=1,  # one warp: all lanes read the length before one writes it
        **launch_options(pdl),
    )  # fmt: skip


@cache
def _compiled(rule: Callable[..., int]) -> Any:
    """The rule as a kernel calls it. The interpreter calls it as it is: it would look for Triton's
    names in the rule's module."""
    compiled = triton.jit(rule)
    return compiled if isinstance(compiled, triton.JITFunction) else rule


@triton.jit
def _accept_kernel(
    chosen_ptr, first_logit_ptr, depth_ptr, drafted_ptr, row_ptr,
    draft_ptr, length_ptr, token_ptr, draft_computed_ptr, out_ptr,
    draft_stride, token_stride, out_stride, max_len, max_depth,
    KV_RULE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0)
    depth = tl.minimum(tl.load(depth_ptr + index), max_depth)
    if depth >= 0:
        row = tl.load(row_ptr + index).to(tl.int64)
        first = tl.load(first_logit_ptr + index)
        length = tl.load(length_ptr + row)
        place = tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + first + place, mask=place <= depth, other=-1).to(tl.int32)
        is_draft = place < depth
        drafts = tl.load(draft_ptr + row * draft_stride + place, mask=is_draft, other=-1)
        matches = is_draft & (drafts == chosen) & (chosen >= 0)
        num_accepted = tl.min(tl.where(matches, BLOCK, place), axis=0)
        is_new = place <= num_accepted
        at = length + place
        # The next pass reads the text, even if no token could be chosen and the row ends.
        kept = tl.maximum(chosen, 0)
        tl.store(token_ptr + row * token_stride + at, kept, mask=is_new & (at < max_len))
        tl.store(length_ptr + row, length + num_accepted + 1)
        if KV_RULE is not None:
            drafted = tl.load(drafted_ptr + index)
            if drafted > 0:
                # Before it drafted it computed the rest of the text.
                computed = tl.load(draft_computed_ptr + row)
                valid = KV_RULE(computed, length - computed, drafted, num_accepted, length)
                tl.store(draft_computed_ptr + row, valid)
        own = out_ptr + index.to(tl.int64) * out_stride
        tl.store(own + _BASE_LEN, length)
        tl.store(own + _DEPTH, depth)
        tl.store(own + _NUM_ACCEPTED, num_accepted)
        tl.store(own + _TOKENS + place, tl.where(is_new, chosen, -1), mask=place <= max_depth)


def follow_outcomes(
    outcomes: Tensor,
    drafted: Tensor,
    rows: Tensor,
    text: TextTable,
    kv_rule: Callable[[int, int, int, int, int], int],
) -> None:
    """Append what another device committed to the same texts, as `accept_drafts` did there.

    `outcomes` int32 [B, outcome_width(max_depth)] are its, of rows `rows` int32 [B]. `drafted[b]`
    drafts were made here; a negative number is padding.
    """
    pdl = pdl_enabled(outcomes.device)
    _follow_kernel[(len(rows),)](
        outcomes, drafted, rows, text.lengths, text.tokens, text.draft_computed,
        outcomes.stride(0), text.tokens.stride(0), text.tokens.shape[1],
        KV_RULE=_compiled(kv_rule),
        BLOCK=triton.next_power_of_2(outcomes.shape[1] - OutcomeColumn.TOKENS),
        PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _follow_kernel(
    outcome_ptr, drafted_ptr, row_ptr, length_ptr, token_ptr, draft_computed_ptr,
    outcome_stride, token_stride, max_len,
    KV_RULE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0)
    drafted = tl.load(drafted_ptr + index)
    if drafted >= 0:
        row = tl.load(row_ptr + index).to(tl.int64)
        own = outcome_ptr + index.to(tl.int64) * outcome_stride
        length = tl.load(own + _BASE_LEN)
        num_accepted = tl.load(own + _NUM_ACCEPTED)
        place = tl.arange(0, BLOCK)
        is_new = place <= num_accepted
        tokens = tl.load(own + _TOKENS + place, mask=is_new, other=0)
        at = length + place
        kept = tl.maximum(tokens, 0)
        tl.store(token_ptr + row * token_stride + at, kept, mask=is_new & (at < max_len))
        tl.store(length_ptr + row, length + num_accepted + 1)
        if drafted > 0:
            computed = tl.load(draft_computed_ptr + row)
            valid = KV_RULE(computed, length - computed, drafted, num_accepted, length)
            tl.store(draft_computed_ptr + row, valid)
