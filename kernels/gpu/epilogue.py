"""Epilogues of products of any number of rows: biases, residuals and norms, gates, heads.

For `outrider.kernels.gpu.linear_kernels` and `outrider.kernels.gpu.block_kernels`: sums are
[features, rows] in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _log2(number: int) -> int:
    return number.bit_length() - 1


@triton.jit
def sum_in_pairs(x):
    """The sum over the first axis, a power of two, of always the same pairs. The order of `tl.sum`
    depends on how a tile is spread over threads, and that on the number of rows."""
    for _ in tl.static_range(_log2(x.shape[0])):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), 1)
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def store_linear(
    acc,  # [features, rows]
    row,
    feature,
    tile,  # of features
    num_tiles,
    num_rows,
    N,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    scaled_ptr,
    squares_ptr,
    HAS_BIAS: tl.constexpr,
    IS_STREAM: tl.constexpr,
    IS_FIXED: tl.constexpr = False,
):
    held = tl.minimum(feature, N - 1)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + held).to(tl.float32)[:, None]
    dtype = out_ptr.dtype.element_ty
    at = row[None, :].to(tl.int64) * N + feature[:, None]
    inside = (row < num_rows)[None, :] & (feature < N)[:, None]
    if IS_STREAM:
        # Rounded before and behind the sum, as where product and sum are two operations.
        acc = acc.to(dtype).to(tl.float32)
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        acc = tl.where(inside, acc.to(dtype).to(tl.float32), 0.0)
        norm = tl.load(norm_ptr + held).to(tl.float32)
        tl.store(scaled_ptr + at, (acc * norm[:, None]).to(dtype), mask=inside)
        own_squares = squares_ptr + row * num_tiles + tile
        squares = sum_in_pairs(acc * acc) if IS_FIXED else tl.sum(acc * acc, 0)
        tl.store(own_squares, squares, mask=row < num_rows)
    tl.store(out_ptr + at, acc.to(dtype), mask=inside)


@triton.jit
def store_gated(
    gate,  # [features, rows], as is `up`
    up,
    row,
    feature,
    num_rows,
    N,
    bias_ptr,
    out_ptr,
    HAS_BIAS: tl.constexpr,
):
    if HAS_BIAS:
        held = tl.minimum(feature, N - 1)
        gate += tl.load(bias_ptr + held).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + held + N).to(tl.float32)[:, None]
    inside = (row < num_rows)[None, :] & (feature < N)[:, None]
    at = row[None, :].to(tl.int64) * N + feature[:, None]
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + at, gated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_heads(
    low,  # [BN, R] features of a head, and those half a head on
    high,
    head,
    pair,
    row,
    num_rows,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Rotate queries and keys; queries are for this pass, keys and values for the cache."""
    dtype = q_ptr.dtype.element_ty
    is_row = row < num_rows
    if ROTATES and head < H + KV:
        position = tl.load(positions_ptr + row, mask=is_row, other=0)
        at = position[None, :] * (D // 2) + pair[:, None]
        cos = tl.load(cos_ptr + at, mask=is_row[None, :], other=0.0)
        sin = tl.load(sin_ptr + at, mask=is_row[None, :], other=0.0)
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        low, high = low * cos - high * sin, high * cos + low * sin
    if head < H:
        at = q_ptr + row[None, :].to(tl.int64) * (H * D) + (head * D + pair)[:, None]
        tl.store(at, low.to(dtype), mask=is_row[None, :])
        tl.store(at + D // 2, high.to(dtype), mask=is_row[None, :])
    else:
        slot = tl.load(slots_ptr + row, mask=is_row, other=-1).to(tl.int64)
        kv_head = (head - H) % KV
        place = (slot // BLOCK * KV + kv_head) * (BLOCK * D) + slot % BLOCK * D
        cache_ptr = key_ptr if head < H + KV else value_ptr
        at = cache_ptr + place[None, :] + pair[:, None]
        is_stored = (slot >= 0)[None, :]
        tl.store(at, low.to(dtype), mask=is_stored)
        tl.store(at + D // 2, high.to(dtype), mask=is_stored)
