"""The operations between the QKV product and attention: head norms, rotation, KV cache writes."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton is untyped, and what its kernels take are no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu.launch import launch_options, let_next_start, pdl_enabled, wait_for_inputs
from outrider.kernels.gpu.pointwise import check_dtypes
from outrider.kernels.gpu.stream import NO_PARTS, ResidualStream, inverse_norm_of
from outrider.kernels.types import RaggedBatch

_QUERY_HEADS = 16  # of a program that rotates queries
_KEY_HEADS = 8  # of one that rotates keys and stores them with their values
_MAX_HEAD_DIM = 256


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    batch: RaggedBatch,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    source: ResidualStream | None = None,
    source_eps: float = 0.0,
) -> Tensor:
    """See `outrider.kernels.types.Ops`. A token with a negative slot (padding of a captured
    pass) gets its q, but its K and V are not stored. `source` is the stream that `qkv` is a product
    of; its norm is applied here if still due."""
    check_dtypes(qkv, key_cache, value_cache, q_norm, k_norm)
    _check_shapes(qkv, key_cache, value_cache, num_heads, num_kv_heads, head_dim)
    _check_tables(cos, sin, q_norm, k_norm, head_dim)
    num_tokens = qkv.shape[0]
    _check_batch(batch, num_tokens)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    query_group = min(_QUERY_HEADS, triton.next_power_of_2(num_heads))
    key_group = min(_KEY_HEADS, triton.next_power_of_2(num_kv_heads))
    groups = triton.cdiv(num_heads, query_group) + triton.cdiv(num_kv_heads, key_group)
    pdl = pdl_enabled(qkv.device)
    _rotate_and_store_kernel[(num_tokens, groups)](
        qkv.contiguous(),
        q,
        key_cache,
        value_cache,
        cos,
        sin,
        q_norm,
        k_norm,
        batch.positions.contiguous(),
        batch.slots.contiguous(),
        None if source is None else source.squares,
        0 if source is None else source.scaled.shape[1],
        source_eps,
        norm_eps,
        num_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        CACHE_BLOCK=key_cache.shape[2],
        GROUP=query_group,
        KEY_GROUP=key_group,
        HALF=triton.next_power_of_2(head_dim // 2),
        HAS_ROTATION=cos is not None and sin is not None,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        **(NO_PARTS if source is None else source.parts),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return q


def _check_shapes(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Reject shapes that would be read or written past their end."""
    if head_dim % 2 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; it must be even, and {_MAX_HEAD_DIM} at most.")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[1:] != (width,):
        raise ValueError(f"Rows of qkv have {width} elements, not {tuple(qkv.shape[1:])}.")
    for cache in (key_cache, value_cache):
        num_blocks, heads, block_size, size = cache.shape
        if (heads, size) != (num_kv_heads, head_dim) or cache.shape != key_cache.shape:
            raise ValueError(
                f"Caches must be [blocks, {num_kv_heads}, block size, {head_dim}], both alike,"
                f" not {[num_blocks, heads, block_size, size]}."
            )
        if not cache.is_contiguous():
            raise ValueError("Caches must be contiguous.")


def _check_tables(
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    head_dim: int,
) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("A rotation needs both cos and sin.")
    for table in (cos, sin):
        if table is None:
            continue
        if table.dtype != torch.float32 or table.shape[1:] != (head_dim // 2,):
            raise ValueError(f"cos and sin must be float32 [positions, {head_dim // 2}].")
        if not table.is_contiguous():
            raise ValueError("cos and sin must be contiguous.")
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.shape != (head_dim,) or not norm.is_contiguous()):
            raise ValueError(f"q_norm and k_norm must be contiguous [{head_dim}].")


def _check_batch(batch: RaggedBatch, num_tokens: int) -> None:
    for name, values in (("positions", batch.positions), ("slots", batch.slots)):
        if values.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} are int64 or int32, not {values.dtype}.")
        if values.shape != (num_tokens,):
            raise ValueError(f"There are {num_tokens} tokens but {name} {tuple(values.shape)}.")


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    positions_ptr,
    slots_ptr,
    squares_ptr,
    hidden,
    source_eps,
    norm_eps,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first groups of a token are query heads, the others key heads with their values.

    A head lies in two tiles [heads, HALF], because element j turns with element j + D / 2.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups = tl.cdiv(num_heads, GROUP)
    lanes = tl.arange(0, HALF)[None, :]
    in_head = lanes < HEAD_DIM // 2
    row = qkv_ptr + token * (num_heads + 2 * num_kv_heads) * HEAD_DIM
    wait_for_inputs(PDL)
    let_next_start(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    inverse = inverse_norm_of(squares_ptr, token, hidden, source_eps, PARTS, PARTS_SIZE)
    # No name is given in both branches: Triton would carry its value, of one type, out of them.
    if group < query_groups:
        q_head = group * GROUP + tl.arange(0, GROUP)[:, None]
        q_mask = (q_head < num_heads) & in_head
        q_at = q_head * HEAD_DIM + lanes
        q_first, q_second = _rotated_heads(
            row + q_at, q_mask, lanes, q_norm_ptr, norm_eps, cos_ptr, sin_ptr, position, inverse,
            HEAD_DIM, HAS_Q_NORM, HAS_ROTATION, PARTS > 0,
        )  # fmt: skip
        q_row = q_ptr + token * num_heads * HEAD_DIM
        _store_halves(q_row + q_at, q_first, q_second, q_mask, HEAD_DIM)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        head = (group - query_groups) * KEY_GROUP + tl.arange(0, KEY_GROUP)[:, None]
        mask = (head < tl.where(slot >= 0, num_kv_heads, 0)) & in_head
        source = row + (num_heads + head) * HEAD_DIM + lanes
        values = source + num_kv_heads * HEAD_DIM
        v_first, v_second = _load_scaled(values, mask, inverse, HEAD_DIM, PARTS > 0)
        k_first, k_second = _rotated_heads(
            source, mask, lanes, k_norm_ptr, norm_eps, cos_ptr, sin_ptr, position, inverse,
            HEAD_DIM, HAS_K_NORM, HAS_ROTATION, PARTS > 0,
        )  # fmt: skip
        place = (slot // CACHE_BLOCK * num_kv_heads + head) * CACHE_BLOCK + slot % CACHE_BLOCK
        target = place * HEAD_DIM + lanes
        _store_halves(key_cache_ptr + target, k_first, k_second, mask, HEAD_DIM)
        _store_halves(value_cache_ptr + target, v_first, v_second, mask, HEAD_DIM)


@triton.jit
def _rotated_heads(
    source,
    mask,
    lanes,
    norm_ptr,
    norm_eps,
    cos_ptr,
    sin_ptr,
    position,
    inverse,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Both halves of the heads at `source`, rounded after each operation as torch does it."""
    in_head = lanes < HEAD_DIM // 2
    first, second = _load_scaled(source, mask, inverse, HEAD_DIM, IS_SCALED)
    dtype: tl.constexpr = first.dtype
    if HAS_NORM:
        first, second = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + norm_eps)[:, None]
        first_weight, second_weight = _load_halves(norm_ptr + lanes, in_head, HEAD_DIM)
        first = (first * factor).to(dtype).to(tl.float32) * first_weight.to(tl.float32)
        second = (second * factor).to(dtype).to(tl.float32) * second_weight.to(tl.float32)
        first, second = first.to(dtype), second.to(dtype)
    if HAS_ROTATION:
        first, second = first.to(tl.float32), second.to(tl.float32)
        at = position * (HEAD_DIM // 2) + lanes
        cos = tl.load(cos_ptr + at, mask=in_head, other=0.0)
        sin = tl.load(sin_ptr + at, mask=in_head, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
        first, second = first.to(dtype), second.to(dtype)
    return first, second


@triton.jit
def _load_scaled(source, mask, inverse, HEAD_DIM: tl.constexpr, IS_SCALED: tl.constexpr):
    """Both halves, times the rest of the norm before the product."""
    first, second = _load_halves(source, mask, HEAD_DIM)
    if IS_SCALED:
        dtype: tl.constexpr = first.dtype
        first = (first.to(tl.float32) * inverse).to(dtype)
        second = (second.to(tl.float32) * inverse).to(dtype)
    return first, second


@triton.jit
def _load_halves(source, mask, HEAD_DIM: tl.constexpr):
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0)
    return first, second


@triton.jit
def _store_halves(target, first, second, mask, HEAD_DIM: tl.constexpr):
    tl.store(target, first, mask=mask)
    tl.store(target + HEAD_DIM // 2, second, mask=mask)
