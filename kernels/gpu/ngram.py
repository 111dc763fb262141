"""N-gram lookup on the device: drafts what followed the latest earlier occurrence of the last
tokens.

The rule, and each row's trust, are those of `outrider.workers.proposers.ngram`; here the whole text
is searched in every round, which costs less than a launch from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
_DEPTH = tl.constexpr(EntryColumn.DEPTH)
_ENTRIES = tl.constexpr(TotalColumn.ENTRIES)

FIRST_TRUST = 1
_BLOCK = 1024
_WARPS = 4


@dataclass(frozen=True, slots=True)
class TrustTable:
    """Each row's trust in its lookups, and its last offer; all int32, by row.

    An offer's acceptance is read from the text: the part of it found there was accepted.
    """

    whole: Tensor  # [3, num_rows]; the next three are its rows
    trust: Tensor  # [num_rows]: the most tokens offered next
    offered: Tensor  # [num_rows]: tokens offered last, 0 if nothing can be learned
    base_len: Tensor  # [num_rows]: text length at that offer
    first: Tensor  # [3], of a new row

    @classmethod
    def create(cls, num_rows: int, device: torch.device) -> TrustTable:
        first = torch.tensor((FIRST_TRUST, 0, 0), dtype=torch.int32, device=device)
        whole = first[:, None].repeat(1, num_rows)
        return cls(whole, whole[0], whole[1], whole[2], first)

    def begin(self, row: int) -> None:
        """The row has a new request."""
        self.whole[:, row] = self.first


def look_up(
    entries: Tensor,
    totals: Tensor,
    text: TextTable,
    table: TrustTable,
    confidences: Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """Drafts of each of the first `totals[ENTRIES]` entries, at most as many as its depth.

    Drafts beyond what is found and trusted are the text's last token, with confidence 0: a pass has
    room for them anyway. `confidences` float32 [num_rows, max_depth] are by row, as drafts are.
    """
    num_entries, max_depth = entries.shape[1], text.drafts.shape[1]
    pdl = pdl_enabled(entries.device)
    _look_up_kernel[(num_entries,)](
        entries, totals, text.tokens, text.lengths, text.drafts,
        table.trust, table.offered, table.base_len, confidences,
        entries.stride(0), text.tokens.stride(0), text.drafts.stride(0), confidences.stride(0),
        text.tokens.shape[1], max_depth, min_n, max_n,
        BLOCK=_BLOCK, DEPTHS=triton.next_power_of_2(max_depth), PDL=pdl,
        num_warps=_WARPS, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _trust_after(
    trust, offered, base_len, length, tokens_ptr, draft_ptr, max_len, DEPTHS: tl.constexpr
):
    """Doubled if the whole offer was accepted; else its accepted tokens, plus one."""
    place = tl.arange(0, DEPTHS)
    known = tl.minimum(offered, length - base_len)
    at = base_len + place
    is_known = (place < known) & (at < max_len)
    token = tl.load(tokens_ptr + at, mask=is_known, other=-1)
    draft = tl.load(draft_ptr + place, mask=is_known, other=-2)
    stood = tl.min(tl.where(is_known & (token == draft), DEPTHS, place), axis=0)
    stood = tl.minimum(stood, known)
    after = tl.where(stood == known, tl.maximum(trust, 2 * known), stood + 1)
    return tl.where(known > 0, after, trust)


@triton.jit
def _best_end(tokens_ptr, length, min_n, max_n, BLOCK: tl.constexpr):
    """Where the longest of the text's last n-grams ended before, the last time; and its length, 0
    if there is none."""
    best_n, best_end = length * 0, length * 0
    for first in range(1, length, BLOCK):
        end = first + tl.arange(0, BLOCK)
        n = tl.zeros_like(end)
        is_equal = end < length  # what follows it is known
        for back in range(1, max_n + 1):
            is_equal = is_equal & (end >= back)
            last = tl.load(tokens_ptr + tl.maximum(length - back, 0))
            token = tl.load(tokens_ptr + end - back, mask=is_equal, other=-1)
            is_equal = is_equal & (token == last)
            n += is_equal.to(tl.int32)
        longest = tl.max(n, axis=0)
        if longest >= tl.maximum(best_n, min_n):
            best_n = longest
            best_end = tl.max(tl.where(n == longest, end, 0), axis=0)
    return best_end, best_n


@triton.jit
def _look_up_kernel(
    entries_ptr, totals_ptr, tokens_ptr, length_ptr, draft_ptr,
    trust_ptr, offered_ptr, base_ptr, confidence_ptr,
    stride, token_stride, draft_stride, confidence_stride, max_len, max_depth, min_n, max_n,
    BLOCK: tl.constexpr, DEPTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0)
    if entry < tl.load(totals_ptr + _ENTRIES):
        row = tl.load(entries_ptr + _ROW * stride + entry).to(tl.int64)
        depth = tl.minimum(tl.load(entries_ptr + _DEPTH * stride + entry), max_depth)
        length = tl.minimum(tl.load(length_ptr + row), max_len)
        own_text, own_drafts = tokens_ptr + row * token_stride, draft_ptr + row * draft_stride
        trust = _trust_after(
            tl.load(trust_ptr + row), tl.load(offered_ptr + row), tl.load(base_ptr + row),
            length, own_text, own_drafts, max_len, DEPTHS,
        )  # fmt: skip
        end, n = _best_end(own_text, length, min_n, max_n, BLOCK)
        offered = tl.where(n > 0, tl.minimum(depth, trust), 0)
        place = tl.arange(0, DEPTHS)
        is_offered = place < offered
        # A continuation that reaches the end of the text repeats itself.
        at = tl.where(is_offered, end + place % tl.maximum(length - end, 1), length - 1)
        token = tl.load(own_text + tl.maximum(at, 0))
        sure = n.to(tl.float32) / (n + 1).to(tl.float32)
        tl.debug_barrier()  # all reads precede the writes below
        inside = place < max_depth
        tl.store(own_drafts + place, token, mask=inside)
        own_confidences = confidence_ptr + row * confidence_stride + place
        tl.store(own_confidences, tl.where(is_offered, sure, 0.0), mask=inside)
        tl.store(trust_ptr + row, trust)
        tl.store(offered_ptr + row, offered)
        tl.store(base_ptr + row, length)
