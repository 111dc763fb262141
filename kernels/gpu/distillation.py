"""The gradient of a distillation loss: student minus teacher, over rows of a whole vocabulary.

Both softmaxes, their difference and the KL divergence in two readings of a row, the second from the
cache. As separate tensor operations each would go through memory.
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


def kl_gradient_in_place(teacher: Tensor, sums: Tensor, mass: Tensor, student: Tensor) -> Tensor:
    """Leaves in `student`, logits [rows, vocabulary], the gradient of each row's KL divergence from
    the teacher's distribution, and returns those divergences, float32 [rows].

    The teacher's logits are shaped alike; `sums` are the logarithms of its sums, over a larger
    vocabulary where it has one, and `mass` is its probability of the tokens in the student's
    vocabulary.
    """
    assert teacher.shape == student.shape and teacher.stride(1) == student.stride(1) == 1
    divergences = torch.empty_like(sums)
    if len(student):
        _kl_gradient_kernel[(len(student),)](
            teacher,
            sums,
            mass,
            student,
            divergences,
            student.shape[1],
            teacher.stride(0),
            student.stride(0),
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
def _kl_gradient_kernel(
    teacher, sums, mass, student, divergences, vocab, stride, own_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    teacher += row.to(tl.int64) * stride
    student += row.to(tl.int64) * own_stride
    teacher_sum = tl.load(sums + row)
    share = tl.load(mass + row)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        value = tl.load(student + column, mask=inside, other=-1e30).to(tl.float32)
        log = tl.load(teacher + column, mask=inside, other=-1e30).to(tl.float32) - teacher_sum
        cross += tl.exp(log) * (log - value)  # 0 outside, where the first factor is 0
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    own_sum = _joined(highest, total)
    tl.store(divergences + row, tl.sum(cross) + share * own_sum)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        value = tl.load(student + column, mask=inside, other=0.0).to(tl.float32)
        log = tl.load(teacher + column, mask=inside, other=0.0).to(tl.float32) - teacher_sum
        gradient = share * tl.exp(value - own_sum) - tl.exp(log)
        tl.store(student + column, gradient.to(student.dtype.element_ty), mask=inside)


@triton.jit
def _joined(highest, total):
    """The logarithm of the sum over lanes that each have their own highest."""
    top = tl.max(highest)
    return top + tl.log(tl.sum(total * tl.exp(highest - top)))
