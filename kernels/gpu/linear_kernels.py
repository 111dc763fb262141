"""The kernels of `outrider.kernels.gpu.linear`.

Program ids are (tile of features, split of the depth, block of R rows). KIND is None, or "fp8" or
"int8" where the weight is packed as in `outrider.kernels.gpu.packed`: then it has half as many
columns as there are inputs, and BK counts columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.epilogue import store_gated, store_heads, store_linear
from outrider.kernels.gpu.launch import let_next_start, prefetch_rows, wait_for_inputs
from outrider.kernels.gpu.packed import unpacked
from outrider.kernels.gpu.stream import inverse_norm


@triton.jit
def dot_features(
    x_ptr,
    w_ptr,
    row,  # [R]
    first,  # [BN] features of the first product
    second,  # [BN] those of the second one, if DUAL
    num_rows,
    k_begin,
    k_end,
    K: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DUAL: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Features times rows, float32 [BN, R] each, over these columns of the weight."""
    columns: tl.constexpr = K if KIND is None else K // 2
    depth = tl.arange(0, BK)
    acc_first = tl.zeros((BN, R), tl.float32)
    acc_second = tl.zeros((BN, R), tl.float32)
    is_even: tl.constexpr = columns % BK == 0
    is_row = (row < num_rows)[None, :]
    x_at = x_ptr + row[None, :].to(tl.int64) * K + depth[:, None]
    first_at = w_ptr + first[:, None].to(tl.int64) * columns + depth[None, :]
    second_at = w_ptr + second[:, None].to(tl.int64) * columns + depth[None, :]
    for k in tl.range(k_begin, k_end, BK):
        inside = k + depth < k_end
        is_input = is_row if is_even else is_row & inside[:, None]
        x = tl.load(x_at + k, mask=is_input, other=0.0)
        x_high = x
        if KIND is not None:
            x_high = tl.load(x_at + columns + k, mask=is_input, other=0.0)
        acc_first = add_product(acc_first, first_at + k, x, x_high, inside, is_even, KIND, PDL)
        if DUAL:
            acc_second = add_product(
                acc_second, second_at + k, x, x_high, inside, is_even, KIND, PDL
            )
    return acc_first, acc_second


@triton.jit
def add_product(
    acc,  # [BN, R]
    w_at,  # [BN, BK]
    x,  # [BK, R]
    x_high,  # what the high bytes of packed weights are multiplied with
    inside,
    IS_EVEN: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    precision: tl.constexpr = "ieee" if x.dtype == tl.float32 else "tf32"
    if IS_EVEN:
        weight = tl.load(w_at, eviction_policy="evict_first")
    else:
        weight = tl.load(w_at, mask=inside[None, :], other=0)
    if KIND is None:
        acc = tl.dot(weight, x, acc, input_precision=precision)
    else:
        low, high = unpacked(weight, x.dtype, KIND, PDL)
        acc = tl.dot(low, x, acc, input_precision=precision)
        acc = tl.dot(high, x_high, acc, input_precision=precision)
    return acc


@triton.jit
def load_scales(scales_ptr, feature):
    """The scales of 8-bit weights; 1 for other weights."""
    scale = 1.0
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + feature)[:, None]
    return scale


@triton.jit
def add_up_splits(
    first,
    second,
    partial_ptr,
    counter_ptr,
    tile,
    split,
    R: tl.constexpr,
    BN: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DUAL: tl.constexpr,
):
    """The products over the whole depth, and whether this program has them: the last one of a tile
    to arrive does, and adds the parts up in the order of the splits."""
    is_last = True
    if SPLIT_K > 1:
        parts: tl.constexpr = 2 if DUAL else 1
        inner = tl.arange(0, BN)[:, None] * R + tl.arange(0, R)[None, :]
        tile += tl.program_id(2) * tl.num_programs(0)
        own = partial_ptr + tile.to(tl.int64) * (SPLIT_K * parts * BN * R) + inner
        stride: tl.constexpr = parts * BN * R
        tl.store(own + split * stride, first)
        if DUAL:
            tl.store(own + split * stride + BN * R, second)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            first = tl.zeros((BN, R), tl.float32)
            second = tl.zeros((BN, R), tl.float32)
            for part in tl.static_range(SPLIT_K):
                first += tl.load(own + part * stride, cache_modifier=".cg")
                if DUAL:
                    second += tl.load(own + part * stride + BN * R, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
    return first, second, is_last


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,  # of 8-bit weights, or None
    bias_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    scaled_ptr,
    squares_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LINES: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_STREAM: tl.constexpr,
    IS_FIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The plain product; or, as a stream, its sum with the residual and what the next norm needs:
    the sum times that norm's weight, and its squares added up over this program's features."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * R + tl.arange(0, R)
    feature = tile * BN + tl.arange(0, BN)
    held = tl.minimum(feature, N - 1)
    columns: tl.constexpr = K if KIND is None else K // 2
    share: tl.constexpr = (columns + SPLIT_K * BK - 1) // (SPLIT_K * BK) * BK
    k_begin = split * share
    k_end = tl.minimum(k_begin + share, columns)
    prefetch_rows(w_ptr + held.to(tl.int64) * columns + k_begin, LINES, PDL)
    scale = load_scales(scales_ptr, held)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    acc, _ = dot_features(
        x_ptr, w_ptr, row, held, held, num_rows, k_begin, k_end, K, R, BN, BK, False, KIND, PDL
    )  # fmt: skip
    acc, _, is_last = add_up_splits(
        acc, acc, partial_ptr, counter_ptr, tile, split, R, BN, SPLIT_K, False
    )
    if is_last:
        acc *= scale
        store_linear(
            acc, row, feature, tile, tl.num_programs(0), num_rows, N, bias_ptr, residual_ptr,
            norm_ptr, out_ptr, scaled_ptr, squares_ptr, HAS_BIAS, IS_STREAM, IS_FIXED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,  # of 8-bit weights, or None
    bias_ptr,
    squares_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    N,
    eps,
    K: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up of the normalised input; gate features are 0..N-1, up features N..2N-1."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * R + tl.arange(0, R)
    feature = tile * BN + tl.arange(0, BN)
    held = tl.minimum(feature, N - 1)
    columns: tl.constexpr = K if KIND is None else K // 2
    share: tl.constexpr = (columns + SPLIT_K * BK - 1) // (SPLIT_K * BK) * BK
    k_begin = split * share
    k_end = tl.minimum(k_begin + share, columns)
    prefetch_rows(w_ptr + held.to(tl.int64) * columns + k_begin, LINES, PDL)
    prefetch_rows(w_ptr + (held + N).to(tl.int64) * columns + k_begin, LINES, PDL)
    gate_scale = load_scales(scales_ptr, held)
    up_scale = load_scales(scales_ptr, held + N)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate, up = dot_features(
        x_ptr, w_ptr, row, held, held + N, num_rows, k_begin, k_end, K, R, BN, BK, True, KIND, PDL
    )  # fmt: skip
    gate, up, is_last = add_up_splits(
        gate, up, partial_ptr, counter_ptr, tile, split, R, BN, SPLIT_K, True
    )
    if is_last:
        inverse = inverse_norm(squares_ptr, row, num_rows, eps, K, PARTS, PARTS_SIZE)
        gate, up = gate * gate_scale * inverse, up * up_scale * inverse
        store_gated(gate, up, row, feature, num_rows, N, bias_ptr, out_ptr, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def qkv_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,  # of 8-bit weights, or None
    bias_ptr,
    squares_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens in a block of the cache
    K: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROTATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries, keys and values of the normalised input; keys and values go to the cache.

    A program holds features j and j + D/2 of a head: the pairs that are rotated.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * R + tl.arange(0, R)
    parts: tl.constexpr = D // 2 // BN
    head = tile // parts
    pair = tile % parts * BN + tl.arange(0, BN)
    feature = head * D + pair
    columns: tl.constexpr = K if KIND is None else K // 2
    share: tl.constexpr = (columns + SPLIT_K * BK - 1) // (SPLIT_K * BK) * BK
    k_begin = split * share
    k_end = tl.minimum(k_begin + share, columns)
    prefetch_rows(w_ptr + feature.to(tl.int64) * columns + k_begin, LINES, PDL)
    prefetch_rows(w_ptr + (feature + D // 2).to(tl.int64) * columns + k_begin, LINES, PDL)
    low_scale = load_scales(scales_ptr, feature)
    high_scale = load_scales(scales_ptr, feature + D // 2)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    low, high = dot_features(
        x_ptr, w_ptr, row, feature, feature + D // 2, num_rows, k_begin, k_end, K, R, BN, BK, True,
        KIND, PDL,
    )  # fmt: skip
    low, high, is_last = add_up_splits(
        low, high, partial_ptr, counter_ptr, tile, split, R, BN, SPLIT_K, True
    )
    if is_last:
        inverse = inverse_norm(squares_ptr, row, num_rows, eps, K, PARTS, PARTS_SIZE)
        low, high = low * low_scale * inverse, high * high_scale * inverse
        if HAS_BIAS:
            low += tl.load(bias_ptr + feature).to(tl.float32)[:, None]
            high += tl.load(bias_ptr + feature + D // 2).to(tl.float32)[:, None]
        store_heads(
            low, high, head, pair, row, num_rows, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
            q_ptr, key_ptr, value_ptr, H, KV, D, BLOCK, ROTATES,
        )  # fmt: skip
