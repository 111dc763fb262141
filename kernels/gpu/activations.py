"""Activations rounded to fp8 (e4m3) and back, as quantized checkpoints ask for.

The rounding is arithmetic of float32, so it needs no GPU with fp8 and has the same bits as on CPUs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.launch import launch_options, let_next_start, pdl_enabled, wait_for_inputs
from outrider.kernels.gpu.stream import NO_PARTS, ResidualStream, inverse_norm_of
from outrider.kernels.quantized import FP8_MAX, ActivationScheme


def fake_quantize(x: Tensor, scheme: ActivationScheme) -> Tensor:
    """`outrider.kernels.quantized.fake_quantize`, of x [T, in]."""
    return _launch(x, None, 0.0, scheme)


def fake_quantize_stream(
    stream: ResidualStream, eps: float, scheme: ActivationScheme
) -> ResidualStream:
    """The stream, normalised and then rounded."""
    scaled = _launch(stream.scaled, stream, eps, scheme)
    return ResidualStream(stream.total, scaled, None)


def _launch(
    x: Tensor, stream: ResidualStream | None, eps: float, scheme: ActivationScheme
) -> Tensor:
    x = x.contiguous()
    num_rows, width = x.shape
    out = x.new_empty(num_rows, width)
    if out.numel() == 0:
        return out
    group_len = min(scheme.group_len or width, width)
    num_groups = triton.cdiv(width, group_len)
    size = triton.next_power_of_2(group_len)
    pdl = pdl_enabled(x.device)
    fake_quantize_kernel[(num_rows * num_groups,)](
        x,
        None if stream is None else stream.squares,
        out,
        width,
        group_len,
        num_groups,
        eps,
        scheme.scale or 0.0,
        IS_STATIC=scheme.scale is not None,
        LARGEST=FP8_MAX,
        SIZE=size,
        **(NO_PARTS if stream is None else stream.parts),
        PDL=pdl,
        num_warps=4 if size < 4096 else 8 if size < 32768 else 16,
        **launch_options(pdl),
    )
    return out


@triton.jit
def fp8_rounded(value, LARGEST: tl.constexpr):
    """To the nearest number of fp8, ties to even: those below 2^-6 are 2^-9 apart, others have
    three bits below the first; adding and subtracting 1.5 * 2^23 such steps rounds to one."""
    value = tl.where(value > LARGEST, LARGEST, value)
    value = tl.where(value < -LARGEST, -LARGEST, value)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.where(power < 0.015625, 0.001953125, power * 0.125)
    magic = step * 12582912.0
    return (value + magic) - magic


@triton.jit
def fake_quantize_kernel(
    x_ptr,
    squares_ptr,
    out_ptr,
    width,
    group_len,
    num_groups,
    eps,
    scale,
    IS_STATIC: tl.constexpr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0) // num_groups
    at = tl.arange(0, SIZE)
    column = tl.program_id(0) % num_groups * group_len + at
    inside = (at < group_len) & (column < width)
    place = row.to(tl.int64) * width + column
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        inverse = inverse_norm_of(squares_ptr, row, width, eps, PARTS, PARTS_SIZE)
        x = (x * inverse).to(dtype).to(tl.float32)
    if not IS_STATIC:
        scale = tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST)
        scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
    rounded = fp8_rounded(tl.div_rn(x, scale), LARGEST)
    tl.store(out_ptr + place, (rounded * scale).to(dtype), mask=inside)
