"""Epilogues of products that the library computed transposed, features by rows.

For some numbers of rows the library's transposed product is faster. The kernels here read it so;
their output is that of the other epilogues.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton is untyped, and what its kernels take are no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.launch import launch_options, let_next_start, pdl_enabled, wait_for_inputs
from outrider.kernels.gpu.stream import NO_PARTS, ResidualStream, inverse_norm

_FEATURES = 64  # of a program, and so of a part of the squares
_ROWS = 32


def transposed_silu_mul(gate_up: Tensor, source: ResidualStream | None, eps: float) -> Tensor:
    """`silu_mul` of a product [2I, T]; see `outrider.kernels.gpu.pointwise`."""
    width, num_rows = gate_up.shape[0] // 2, gate_up.shape[1]
    out = gate_up.new_empty(num_rows, width)
    pdl = pdl_enabled(gate_up.device)
    _transposed_silu_mul_kernel[(triton.cdiv(width, _FEATURES), triton.cdiv(num_rows, _ROWS))](
        gate_up,
        out,
        width,
        num_rows,
        None if source is None else source.squares,
        1 if source is None else source.scaled.shape[1],
        eps,
        **(NO_PARTS if source is None else source.parts),
        F=_FEATURES,
        R=_ROWS,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out


def transposed_add(product: Tensor, residual: Tensor, norm: Tensor) -> ResidualStream:
    """The stream after a product [hidden, T]."""
    hidden, num_rows = product.shape
    tiles = triton.cdiv(hidden, _FEATURES)
    total, scaled = residual.new_empty(2, num_rows, hidden)
    squares = residual.new_empty(num_rows, tiles, dtype=torch.float32)
    pdl = pdl_enabled(product.device)
    _transposed_add_kernel[(tiles, triton.cdiv(num_rows, _ROWS))](
        product,
        residual,
        norm,
        total,
        scaled,
        squares,
        hidden,
        num_rows,
        F=_FEATURES,
        R=_ROWS,
        PDL=pdl,
        **launch_options(pdl),
    )
    return ResidualStream(total, scaled, squares)


@triton.jit
def _transposed_silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    num_rows,
    squares_ptr,
    hidden,
    eps,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    PDL: tl.constexpr,
):
    feature = tl.program_id(0) * F + tl.arange(0, F)
    row = tl.program_id(1) * R + tl.arange(0, R)
    inside = (feature < width)[:, None] & (row < num_rows)[None, :]
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    at = gate_up_ptr + feature[:, None].to(tl.int64) * num_rows + row[None, :]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width.to(tl.int64) * num_rows, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        inverse = inverse_norm(squares_ptr, row, num_rows, eps, hidden, PARTS, PARTS_SIZE)
        gate = (gate * inverse).to(dtype).to(tl.float32)
        up = (up * inverse).to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = out_ptr + row[None, :].to(tl.int64) * width + feature[:, None]
    tl.store(out, (activated * up).to(dtype), mask=inside)


@triton.jit
def _transposed_add_kernel(
    product_ptr,
    residual_ptr,
    norm_ptr,
    total_ptr,
    scaled_ptr,
    squares_ptr,
    hidden,
    num_rows,
    F: tl.constexpr,
    R: tl.constexpr,
    PDL: tl.constexpr,
):
    feature = tl.program_id(0) * F + tl.arange(0, F)
    row = tl.program_id(1) * R + tl.arange(0, R)
    inside = (feature < hidden)[:, None] & (row < num_rows)[None, :]
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    norm = tl.load(norm_ptr + feature, mask=feature < hidden, other=0.0).to(tl.float32)
    out = row[None, :].to(tl.int64) * hidden + feature[:, None]
    at = feature[:, None].to(tl.int64) * num_rows + row[None, :]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    total = tl.load(product_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + out, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(dtype)
    total = rounded.to(tl.float32)
    tl.store(total_ptr + out, rounded, mask=inside)
    tl.store(scaled_ptr + out, (total * norm[:, None]).to(dtype), mask=inside)
    own_squares = squares_ptr + row * tl.num_programs(0) + tl.program_id(0)
    tl.store(own_squares, tl.sum(total * total, 0), mask=row < num_rows)
