"""The slope of a distillation: student less teacher, over rows of a whole vocabulary.

Softmaxes, their difference and its mean logarithm in two readings of a row, the second of which
finds it in the cache: written as tensor operations each of them goes through memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def log_sums(logits: Tensor) -> Tensor:
    """float32 [rows]: the logarithm of each row's sum of exponentials."""
    assert logits.stride(1) == 1
    sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _log_sums_kernel[(len(logits),)](
            logits, sums, logits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=_WARPS
        )
    return sums


def slopes_in_place(taught: Tensor, sums: Tensor, mass: Tensor, guessed: Tensor) -> Tensor:
    """Leaves in `guessed`, logits [rows, vocabulary], the gradient of each row's KL divergence from
    the teacher's distribution, and returns those divergences, float32 [rows].

    The teacher's logits are shaped alike; `sums` are the logarithms of its sums, over a larger
    vocabulary where it has one, and `mass` is what it gives to the tokens that are here.
    """
    assert taught.shape == guessed.shape and taught.stride(1) == guessed.stride(1) == 1
    divergences = torch.empty_like(sums)
    if len(guessed):
        _slopes_kernel[(len(guessed),)](
            taught,
            sums,
            mass,
            guessed,
            divergences,
            guessed.shape[1],
            taught.stride(0),
            guessed.stride(0),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return divergences


@triton.jit
def _log_sums_kernel(logits, sums, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        value = tl.load(logits + column, mask=inside, other=-1e30).to(tl.float32)
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    tl.store(sums + row, _joined(highest, total))


@triton.jit
def _slopes_kernel(
    taught, sums, mass, guessed, divergences, vocab, stride, own_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    taught += row.to(tl.int64) * stride
    guessed += row.to(tl.int64) * own_stride
    taught_sum = tl.load(sums + row)
    share = tl.load(mass + row)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    apart = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        value = tl.load(guessed + column, mask=inside, other=-1e30).to(tl.float32)
        log = tl.load(taught + column, mask=inside, other=-1e30).to(tl.float32) - taught_sum
        apart += tl.exp(log) * (log - value)  # nothing outside, where the first is 0
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    own_sum = _joined(highest, total)
    tl.store(divergences + row, tl.sum(apart) + share * own_sum)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        value = tl.load(guessed + column, mask=inside, other=0.0).to(tl.float32)
        log = tl.load(taught + column, mask=inside, other=0.0).to(tl.float32) - taught_sum
        slope = share * tl.exp(value - own_sum) - tl.exp(log)
        tl.store(guessed + column, slope.to(guessed.dtype.element_ty), mask=inside)


@triton.jit
def _joined(highest, total):
    """The logarithm of the sum over lanes that each have their own highest."""
    top = tl.max(highest)
    return top + tl.log(tl.sum(total * tl.exp(highest - top)))
