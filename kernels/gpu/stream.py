"""The residual stream between the kernels of a small pass, with its next norm half computed.

The kernel that writes the stream also writes it times the weight of the next norm, and the sums of
squares of its features. The kernel that reads it then multiplies each row by one number.
"""

from __future__ import annotations

from dataclasses import dataclass

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

MAX_SMALL_ROWS = 64
"""With more rows a product is no longer bound by reading the weight."""


MIN_ROWS = 16  # of a matrix unit


# A minimum, so that the order of summation does not depend on the number of rows.
_MIN_PARTS = 64
NO_PARTS = {"PARTS": 0, "PARTS_SIZE": _MIN_PARTS}
"""Kernel arguments for a stream that is already normalized."""


def rows_of_block(num_rows: int, max_rows: int = MAX_SMALL_ROWS) -> int:
    """Rows of a program."""
    rows: int = triton.next_power_of_2(num_rows)
    return min(max(MIN_ROWS, rows), max_rows)


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual stream between two kernels, with its next norm half computed."""

    total: Tensor  # [T, hidden]
    scaled: Tensor  # total times the weight of the next norm
    squares: Tensor | None  # float32 [T, parts]: squares of total, summed over parts of hidden;
    # None: `scaled` is normalised

    @property
    def parts(self) -> dict[str, int]:
        if self.squares is None:
            return NO_PARTS
        count = self.squares.shape[1]
        size = max(_MIN_PARTS, triton.next_power_of_2(count))
        return {"PARTS": count, "PARTS_SIZE": size}


def open_stream(ids: Tensor, table: Tensor, norm: Tensor) -> ResidualStream:
    """The stream of embedded tokens, before the first norm."""
    num_rows, hidden = ids.shape[0], table.shape[1]
    total, scaled = table.new_empty(2, num_rows, hidden)
    squares = table.new_empty(num_rows, 1, dtype=torch.float32)
    pdl = pdl_enabled(ids.device)
    open_stream_kernel[(num_rows,)](
        ids,
        table,
        norm,
        total,
        scaled,
        squares,
        hidden,
        SIZE=triton.next_power_of_2(hidden),
        PDL=pdl,
        **launch_options(pdl),
    )
    return ResidualStream(total, scaled, squares)


def close_stream(stream: ResidualStream, eps: float, index: Tensor | None = None) -> Tensor:
    """The normalised stream [T, hidden], or of the tokens at `index` alone."""
    if stream.squares is None and index is None:
        return stream.scaled
    hidden = stream.scaled.shape[1]
    num_rows = stream.scaled.shape[0] if index is None else index.shape[0]
    out = stream.scaled.new_empty(num_rows, hidden)
    pdl = pdl_enabled(out.device)
    close_stream_kernel[(num_rows,)](
        stream.scaled,
        stream.squares,
        index,
        out,
        hidden,
        eps,
        HAS_INDEX=index is not None,
        SIZE=triton.next_power_of_2(hidden),
        **stream.parts,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out


@triton.jit
def inverse_norm(squares_ptr, row, num_rows, eps, K, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of every row, from the sums that came with the stream; 1 of a
    stream that is normalised already."""
    if PARTS == 0:
        inverse = tl.full(row.shape, 1.0, tl.float32)
    else:
        part = tl.arange(0, SIZE)[None, :]
        inside = (row < num_rows)[:, None] & (part < PARTS)
        squares = tl.load(squares_ptr + row[:, None] * PARTS + part, mask=inside, other=0.0)
        inverse = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    return inverse[None, :]


@triton.jit
def inverse_norm_of(squares_ptr, row, width, eps, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """`inverse_norm` of one row."""
    inverse = 1.0
    if PARTS > 0:
        part = tl.arange(0, SIZE)
        squares = tl.load(squares_ptr + row * PARTS + part, mask=part < PARTS, other=0.0)
        inverse = tl.rsqrt(tl.sum(squares) / width + eps)
    return inverse


@triton.jit
def open_stream_kernel(
    ids_ptr,
    table_ptr,
    norm_ptr,
    total_ptr,
    scaled_ptr,
    squares_ptr,
    hidden,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    inside = at < hidden
    token = tl.load(ids_ptr + row).to(tl.int64)
    total = tl.load(table_ptr + token * hidden + at, mask=inside, other=0.0)
    wide = total.to(tl.float32)
    norm = tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = row.to(tl.int64) * hidden + at
    tl.store(total_ptr + out, total, mask=inside)
    tl.store(scaled_ptr + out, (wide * norm).to(total.dtype), mask=inside)
    tl.store(squares_ptr + row, tl.sum(wide * wide))


@triton.jit
def close_stream_kernel(
    scaled_ptr,
    squares_ptr,
    index_ptr,
    out_ptr,
    hidden,
    eps,
    HAS_INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0)
    source = tl.load(index_ptr + row).to(tl.int32) if HAS_INDEX else row
    inverse = inverse_norm_of(squares_ptr, source, hidden, eps, PARTS, PARTS_SIZE)
    at = tl.arange(0, SIZE)
    inside = at < hidden
    scaled = tl.load(scaled_ptr + source.to(tl.int64) * hidden + at, mask=inside, other=0.0)
    normed = (scaled.to(tl.float32) * inverse).to(scaled.dtype)
    tl.store(out_ptr + row.to(tl.int64) * hidden + at, normed, mask=inside)
