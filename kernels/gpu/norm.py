"""Norms over the last axis: one program a row, which it reads once and keeps in registers.

Statistics are float32. Values are rounded where plain torch rounds them, so that both backends
give the same numbers in 16 bits, up to the last bit of a sum.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton is untyped, and what its kernels take are no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.launch import launch_options, let_next_start, pdl_enabled, wait_for_inputs
from outrider.kernels.gpu.pointwise import check_dtypes
from outrider.kernels.gpu.stream import ResidualStream

MAX_WIDTH = 16384
_ELEMENTS_PER_WARP = 256  # 16 bytes a thread in 16 bits
_MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis of `x`, which has any shape."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(s), s)` with `s = x + residual`, rounded before it is normalised."""
    if residual.shape != x.shape:
        raise ValueError(f"Cannot add {tuple(residual.shape)} to {tuple(x.shape)}.")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch_rms_norm(x, residual, weight, eps, out, total)
    return out, total


def add_to_stream(
    x: Tensor, residual: ResidualStream, next_norm: Tensor, eps: float
) -> ResidualStream:
    """The stream after `x`, with its next norm applied."""
    normed, total = add_rms_norm(x, residual.total, next_norm, eps)
    return ResidualStream(total, normed, None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation over the last axis of `x`, which has any shape."""
    check_dtypes(x, weight, bias)
    block = _row_block(x, weight, bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    pdl = pdl_enabled(x.device)
    _layer_norm_kernel[(out.numel() // x.shape[-1],)](
        x.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        x.shape[-1],
        eps,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=_num_warps(block),
        **launch_options(pdl),
    )
    return out


def _launch_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    check_dtypes(x, residual, weight)
    block = _row_block(x, weight)
    if out.numel() == 0:
        return
    pdl = pdl_enabled(x.device)
    _rms_norm_kernel[(out.numel() // x.shape[-1],)](
        x.contiguous(),
        None if residual is None else residual.contiguous(),
        weight.contiguous(),
        out,
        total,
        x.shape[-1],
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=_num_warps(block),
        **launch_options(pdl),
    )


def _row_block(x: Tensor, *weights: Tensor | None) -> int:
    """The size a program works with; a weight of another size would be read past its end."""
    width = x.shape[-1]
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"The Triton norms take rows of 1 to {MAX_WIDTH} elements, not {width}.")
    for weight in weights:
        if weight is not None and weight.shape != (width,):
            raise ValueError(f"A norm over {width} elements got weights {tuple(weight.shape)}.")
    return int(triton.next_power_of_2(width))


def _num_warps(block: int) -> int:
    return min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    scale = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    wide = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(total_ptr + start + columns, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scaled = normed.to(dtype).to(tl.float32) * scale
    tl.store(out_ptr + start + columns, scaled.to(dtype), mask=mask)


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    width,
    eps,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    scale = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    wide = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(wide, axis=0) / width
    # The variance of what is left: the mean of squares less the square of the mean would cancel.
    centred = tl.where(mask, wide - mean, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps) * scale
    if HAS_BIAS:
        normed += shift
    tl.store(out_ptr + start + columns, normed.to(x_ptr.dtype.element_ty), mask=mask)
