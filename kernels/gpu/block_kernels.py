"""Fused products of 65 to some hundred rows; see `linear_kernels`.

With this many rows a program is bound by the second-level cache, so it takes all the rows it
can: R of them and then REST more (a block of 192 is 128 and 64), and the copy engine fetches them.
Program ids are (block of rows, tile of features, split of the depth): the blocks that multiply the
same weights run side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.epilogue import store_gated, store_heads, store_linear
from outrider.kernels.gpu.launch import let_next_start, prefetch_rows, wait_for_inputs
from outrider.kernels.gpu.stream import inverse_norm


@triton.jit
def dot_block(
    x_desc,  # blocks of [R, BK]
    rest_desc,  # blocks of [REST, BK]
    w_desc,  # blocks of [BN, BK]
    row,  # where the block begins
    first,
    second,
    k_begin,
    k_end,
    R: tl.constexpr,
    REST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DUAL: tl.constexpr,
):
    """The features from `first` and, if DUAL, from `second` on, times these rows: float32 [BN, R]
    each, then [BN, REST] each. What lies outside of a matrix counts as zero."""
    precision: tl.constexpr = "ieee" if x_desc.dtype == tl.float32 else "tf32"
    rest: tl.constexpr = REST if REST > 0 else 16
    one, two = tl.zeros((BN, R), tl.float32), tl.zeros((BN, R), tl.float32)
    one_rest, two_rest = tl.zeros((BN, rest), tl.float32), tl.zeros((BN, rest), tl.float32)
    for k in tl.range(k_begin, k_end, BK):
        x = x_desc.load([row, k]).T
        weight = w_desc.load([first, k])
        one = tl.dot(weight, x, one, input_precision=precision)
        if REST > 0:
            x_rest = rest_desc.load([row + R, k]).T
            one_rest = tl.dot(weight, x_rest, one_rest, input_precision=precision)
        if DUAL:
            other = w_desc.load([second, k])
            two = tl.dot(other, x, two, input_precision=precision)
            if REST > 0:
                two_rest = tl.dot(other, x_rest, two_rest, input_precision=precision)
    return one, two, one_rest, two_rest


@triton.jit
def add_up_block(
    sums,  # as `dot_block` gives them
    partial_ptr,
    counter_ptr,
    R: tl.constexpr,
    REST: tl.constexpr,
    BN: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DUAL: tl.constexpr,
):
    """The sums over the whole depth, and whether this program has them: the last of a tile to
    arrive does, and adds the parts up in the order of the splits."""
    one, two, one_rest, two_rest = sums
    is_last = True
    if SPLIT_K > 1:
        halves: tl.constexpr = 2 if DUAL else 1
        rest: tl.constexpr = REST if REST > 0 else 16
        stride: tl.constexpr = halves * BN * (R + REST)
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        feature = tl.arange(0, BN)[:, None]
        own = partial_ptr + tile.to(tl.int64) * (SPLIT_K * stride)
        at = own + feature * R + tl.arange(0, R)[None, :]
        at_rest = own + halves * BN * R + feature * rest + tl.arange(0, rest)[None, :]
        mine = tl.program_id(2) * stride
        tl.store(at + mine, one)
        if DUAL:
            tl.store(at + mine + BN * R, two)
        if REST > 0:
            tl.store(at_rest + mine, one_rest)
            if DUAL:
                tl.store(at_rest + mine + BN * REST, two_rest)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            one, two = tl.zeros((BN, R), tl.float32), tl.zeros((BN, R), tl.float32)
            one_rest = tl.zeros((BN, rest), tl.float32)
            two_rest = tl.zeros((BN, rest), tl.float32)
            for part in tl.static_range(SPLIT_K):
                there = part * stride
                one += tl.load(at + there, cache_modifier=".cg")
                if DUAL:
                    two += tl.load(at + there + BN * R, cache_modifier=".cg")
                if REST > 0:
                    one_rest += tl.load(at_rest + there, cache_modifier=".cg")
                    if DUAL:
                        two_rest += tl.load(at_rest + there + BN * REST, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
    return one, two, one_rest, two_rest, is_last


@triton.jit
def share_of_depth(K: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr):
    share: tl.constexpr = (K + SPLIT_K * BK - 1) // (SPLIT_K * BK) * BK
    begin = tl.program_id(2) * share
    return begin, tl.minimum(begin + share, K)


@triton.jit(do_not_specialize=["num_rows"])
def linear_block_kernel(
    x_desc,
    rest_desc,
    w_desc,
    w_ptr,
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
    REST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_STREAM: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `linear_kernel` computes."""
    tile, begin = tl.program_id(1), tl.program_id(0) * (R + REST)
    k_begin, k_end = share_of_depth(K, BK, SPLIT_K)
    feature = tile * BN + tl.arange(0, BN)
    held = tl.minimum(feature, N - 1)
    prefetch_rows(w_ptr + held.to(tl.int64) * K + k_begin, LINES, PDL)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    sums = dot_block(
        x_desc, rest_desc, w_desc, begin, tile * BN, 0, k_begin, k_end, R, REST, BN, BK, False
    )
    acc, _, acc_rest, _, is_last = add_up_block(
        sums, partial_ptr, counter_ptr, R, REST, BN, SPLIT_K, False
    )
    if is_last:
        row = begin + tl.arange(0, R)
        store_linear(
            acc, row, feature, tile, tl.num_programs(1), num_rows, N, bias_ptr, residual_ptr,
            norm_ptr, out_ptr, scaled_ptr, squares_ptr, HAS_BIAS, IS_STREAM,
        )  # fmt: skip
        if REST > 0:
            row_rest = begin + R + tl.arange(0, REST)
            store_linear(
                acc_rest, row_rest, feature, tile, tl.num_programs(1), num_rows, N, bias_ptr,
                residual_ptr, norm_ptr, out_ptr, scaled_ptr, squares_ptr, HAS_BIAS, IS_STREAM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_block_kernel(
    x_desc,
    rest_desc,
    w_desc,
    w_ptr,
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
    REST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `gate_up_kernel` computes."""
    tile, begin = tl.program_id(1), tl.program_id(0) * (R + REST)
    k_begin, k_end = share_of_depth(K, BK, SPLIT_K)
    feature = tile * BN + tl.arange(0, BN)
    held = tl.minimum(feature, N - 1)
    prefetch_rows(w_ptr + held.to(tl.int64) * K + k_begin, LINES, PDL)
    prefetch_rows(w_ptr + (held + N).to(tl.int64) * K + k_begin, LINES, PDL)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    sums = dot_block(
        x_desc, rest_desc, w_desc, begin, tile * BN, tile * BN + N, k_begin, k_end,
        R, REST, BN, BK, True,
    )  # fmt: skip
    gate, up, gate_rest, up_rest, is_last = add_up_block(
        sums, partial_ptr, counter_ptr, R, REST, BN, SPLIT_K, True
    )
    if is_last:
        row = begin + tl.arange(0, R)
        inverse = inverse_norm(squares_ptr, row, num_rows, eps, K, PARTS, PARTS_SIZE)
        store_gated(
            gate * inverse, up * inverse, row, feature, num_rows, N, bias_ptr, out_ptr, HAS_BIAS
        )
        if REST > 0:
            row_rest = begin + R + tl.arange(0, REST)
            inverse_rest = inverse_norm(squares_ptr, row_rest, num_rows, eps, K, PARTS, PARTS_SIZE)
            store_gated(
                gate_rest * inverse_rest, up_rest * inverse_rest, row_rest, feature, num_rows, N,
                bias_ptr, out_ptr, HAS_BIAS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def qkv_block_kernel(
    x_desc,
    rest_desc,
    w_desc,
    w_ptr,
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
    REST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROTATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `qkv_kernel` computes."""
    tile, begin = tl.program_id(1), tl.program_id(0) * (R + REST)
    k_begin, k_end = share_of_depth(K, BK, SPLIT_K)
    parts: tl.constexpr = D // 2 // BN
    head = tile // parts
    first_pair = tile % parts * BN
    pair = first_pair + tl.arange(0, BN)
    feature = head * D + pair
    prefetch_rows(w_ptr + feature.to(tl.int64) * K + k_begin, LINES, PDL)
    prefetch_rows(w_ptr + (feature + D // 2).to(tl.int64) * K + k_begin, LINES, PDL)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    first = head * D + first_pair
    sums = dot_block(
        x_desc, rest_desc, w_desc, begin, first, first + D // 2, k_begin, k_end,
        R, REST, BN, BK, True,
    )  # fmt: skip
    low, high, low_rest, high_rest, is_last = add_up_block(
        sums, partial_ptr, counter_ptr, R, REST, BN, SPLIT_K, True
    )
    if is_last:
        low_bias, high_bias = 0.0, 0.0
        if HAS_BIAS:
            low_bias = tl.load(bias_ptr + feature).to(tl.float32)[:, None]
            high_bias = tl.load(bias_ptr + feature + D // 2).to(tl.float32)[:, None]
        row = begin + tl.arange(0, R)
        inverse = inverse_norm(squares_ptr, row, num_rows, eps, K, PARTS, PARTS_SIZE)
        store_heads(
            low * inverse + low_bias, high * inverse + high_bias, head, pair, row, num_rows,
            cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, key_ptr, value_ptr,
            H, KV, D, BLOCK, ROTATES,
        )  # fmt: skip
        if REST > 0:
            row_rest = begin + R + tl.arange(0, REST)
            inverse_rest = inverse_norm(squares_ptr, row_rest, num_rows, eps, K, PARTS, PARTS_SIZE)
            store_heads(
                low_rest * inverse_rest + low_bias, high_rest * inverse_rest + high_bias, head,
                pair, row_rest, num_rows, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr,
                key_ptr, value_ptr, H, KV, D, BLOCK, ROTATES,
            )  # fmt: skip
