"""Operations on single elements: the gated activation and the embedding lookup."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton is untyped, and what its kernels take are no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.launch import launch_options, let_next_start, pdl_enabled, wait_for_inputs
from outrider.kernels.gpu.stream import NO_PARTS, ResidualStream, inverse_norm_of
from outrider.kernels.quantized import QuantizedWeight

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_BLOCK = 1024  # elements of a program: 16 bytes for each thread of four warps


def check_dtypes(x: Tensor | QuantizedWeight, *others: Tensor | None) -> None:
    """A kernel computes in float32 and keeps to one dtype outside; weights have that of `x`."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"The Triton kernels take float32, float16 or bfloat16, not {x.dtype}.")
    for other in others:
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"The Triton kernels got {x.dtype} together with {other.dtype}.")


def silu_mul(gate_up: Tensor, source: ResidualStream | None = None, eps: float = 0.0) -> Tensor:
    """[T, 2I] -> [T, I]: `silu(gate) * up`, the gate half first. `source` is the stream that
    `gate_up` is a product of; its norm is applied here if still due."""
    check_dtypes(gate_up)
    num_rows, double_width = gate_up.shape
    width, remainder = divmod(double_width, 2)
    if remainder:
        raise ValueError(f"Gate and up halves have the same size, but {double_width} is odd.")
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    pdl = pdl_enabled(gate_up.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up.contiguous(),
        out,
        width,
        None if source is None else source.squares,
        0 if source is None else source.scaled.shape[1],
        eps,
        **(NO_PARTS if source is None else source.parts),
        BLOCK=block,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows `ids` [T], int64 or int32, of `table` [vocab, hidden]; zeros for an id outside of it,
    because refusing it would mean to wait for the device."""
    check_dtypes(table)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"Token ids are int64 or int32, not {ids.dtype}.")
    num_rows, (vocab_size, width) = ids.shape[0], table.shape
    out = torch.empty((num_rows, width), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    pdl = pdl_enabled(table.device)
    _embed_kernel[(num_rows, triton.cdiv(width, block))](
        ids.contiguous(),
        table.contiguous(),
        out,
        vocab_size,
        width,
        BLOCK=block,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    squares_ptr,
    hidden,
    eps,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_row = gate_up_ptr + row * 2 * width
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row + width + columns, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        inverse = inverse_norm_of(squares_ptr, row, hidden, eps, PARTS, PARTS_SIZE)
        gate = (gate * inverse).to(dtype).to(tl.float32)
        up = (up * inverse).to(dtype).to(tl.float32)
    # torch's silu is an operation of its own, so its result is rounded before the product.
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (activated * up).to(dtype), mask=mask)


@triton.jit
def _embed_kernel(
    ids_ptr, table_ptr, out_ptr, vocab_size, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    held = tl.where((row >= 0) & (row < vocab_size), width, 0)
    values = tl.load(table_ptr + row * width + columns, mask=columns < held, other=0.0)
    tl.store(out_ptr + token * width + columns, values, mask=mask)
