"""8-bit weights as the products read them: the two halves of a row interleaved in 16-bit words.

Memory and matrix units then move them like any other weight, and the two bytes of a number go to
two products: the low one with the first half of the inputs, the high one with the second.
"""

from __future__ import annotations

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


def pack(values: Tensor) -> Tensor:
    """[out, in] of 8 bits to int16 [out, in / 2]."""
    if values.shape[1] % 2:
        raise ValueError(f"8-bit weights need an even number of inputs, not {values.shape[1]}.")
    num_rows, depth = values.shape
    halves = values.view(torch.int8).view(num_rows, 2, depth // 2)
    return halves.transpose(1, 2).reshape(num_rows, depth).view(torch.int16)


def unpack(packed: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that was quantised and packed, rounded to `dtype`."""
    num_rows, half = packed.shape
    out = torch.empty(num_rows, 2 * half, dtype=dtype, device=packed.device)
    pdl = pdl_enabled(packed.device)
    block = min(1024, triton.next_power_of_2(half))
    unpack_kernel[(num_rows, triton.cdiv(half, block))](
        packed, scales, out, half, BLOCK=block, KIND=kind, PDL=pdl, **launch_options(pdl)
    )
    return out


# To bfloat16 the compiler converts with instructions that take longer on Hopper than it takes to
# read the weights, so these conversions are written out: two packed numbers to two low and two high
# ones. The bits of fp8, moved to where bfloat16 has them, lack a factor of 2^120.
FP8_TO_BF16 = tl.constexpr("""{
.reg .b32 low, high, scale;
shl.b32 low, $2, 8;
shr.b32 high, $2, 4;
and.b32 high, high, 0x07F007F0;
lop3.b32 high, $2, 0x80008000, high, 0xEA;
mov.b32 scale, 0x7B807B80;
mul.bf16x2 $1, high, scale;
shr.b32 high, low, 4;
and.b32 high, high, 0x07F007F0;
lop3.b32 low, low, 0x80008000, high, 0xEA;
mul.bf16x2 $0, low, scale;
}""")
# The low seven bits of int8 are those of a bfloat16 from 128 to 255; off it go 128, or 256 if the
# eighth bit, the sign, is set.
INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 low, high, base;
prmt.b32 low, $2, 0x43434343, 0x4240;
prmt.b32 high, $2, 0x43434343, 0x4341;
and.b32 base, low, 0xFF80FF80;
and.b32 low, low, 0xFF7FFF7F;
sub.bf16x2 $0, low, base;
and.b32 base, high, 0xFF80FF80;
and.b32 high, high, 0xFF7FFF7F;
sub.bf16x2 $1, high, base;
}""")


@triton.jit
def unpacked(weight, dtype: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """Low and high bytes as `dtype`, which holds all their values. Chips that overlap kernels
    (`PDL`) have arithmetic of bfloat16 as well."""
    if PDL and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            FP8_TO_BF16 if KIND == "fp8" else INT8_TO_BF16,
            "=r,=r,r",
            [weight],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        value: tl.constexpr = tl.float8e4nv if KIND == "fp8" else tl.int8
        low = weight.to(tl.uint8).to(value, bitcast=True).to(dtype)
        high = (weight >> 8).to(tl.uint8).to(value, bitcast=True).to(dtype)
    return low, high


@triton.jit
def unpack_kernel(
    packed_ptr,
    scales_ptr,
    out_ptr,
    half,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    packed = tl.load(packed_ptr + row.to(tl.int64) * half + column, mask=inside, other=0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    low, high = unpacked(packed, dtype, KIND, PDL)
    scale = tl.load(scales_ptr + row)
    out = out_ptr + row.to(tl.int64) * (2 * half) + column
    tl.store(out, (low.to(tl.float32) * scale).to(dtype), mask=inside)
    tl.store(out + half, (high.to(tl.float32) * scale).to(dtype), mask=inside)
