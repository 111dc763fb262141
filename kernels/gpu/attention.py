"""Attention of ragged rows over the paged cache, one program a tile of queries and KV head.

A tile is a few consecutive queries of one sequence (`TileColumn`); with all the query heads that
share a KV head they are the rows of one matrix product, so keys and values are read once for all
of them. A row's reduction runs over blocks of positions aligned to position 0, one after another:
blocks in which it sees nothing leave its numbers as they are. So without splits its result does not
depend, bit for bit, on the other rows of its tile or pass.

In passes with few tiles each tile's positions are split over several programs. Each leaves its
partial result in scratch memory, and the last to arrive combines them in the order of positions.
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
    prefetch_rows,
    wait_for_inputs,
)
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.types import RaggedBatch, TileColumn

FIRST_TOKEN = tl.constexpr(TileColumn.FIRST_TOKEN)
NUM_TOKENS = tl.constexpr(TileColumn.NUM_TOKENS)
POSITION = tl.constexpr(TileColumn.POSITION)
TABLE_ROW = tl.constexpr(TileColumn.TABLE_ROW)
TILE_COLUMNS = tl.constexpr(4)
# Below every score. It is finite, so that a row that has seen nothing yet meets no inf - inf.
LOWEST = tl.constexpr(-1e30)

_MIN_SPAN = 128  # fewer positions are not worth a program; a multiple of BLOCK_KEYS
_LOG2_E = 1.4426950408889634
_MIN_ROWS = 16  # what a matrix unit takes
_MAX_DECODE_QUERIES = 16  # a sequence with more of them in a pass is being prefilled
_MAX_DECODE_ROWS = 32
_PREFILL_ROWS = 128
_MAX_SPLITS = 32
_TARGET_PROGRAMS = 2 * 132  # two for each multiprocessor of an H200


@triton.jit
def _attend(
    state, q, query_at, cache, begin, end, first_key, past_key, window, scale_log2,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Carry the online softmax on over the positions from `begin`, a multiple of BLOCK_KEYS, to
    `end`. Without MASKED every row must see all of them."""
    acc, row_max, row_sum = state
    keys, values, table, block_stride = cache
    dims = tl.arange(0, PADDED_DIM)
    in_head = (dims < HEAD_DIM)[None, :]
    for block_begin in range(begin, end, BLOCK_KEYS):
        key_at = block_begin + tl.arange(0, BLOCK_KEYS)
        if MASKED:
            # Nothing else is read: behind the tile, or before its window, blocks may hold anything.
            exists = (key_at >= first_key) & (key_at < past_key)
            readable = exists[:, None] & in_head
            block_ids = tl.load(table + key_at // BLOCK_SIZE, mask=exists, other=0)
        else:
            readable = in_head
            block_ids = tl.load(table + key_at // BLOCK_SIZE)
        in_cache = block_ids.to(tl.int64) * block_stride + key_at % BLOCK_SIZE
        elements = in_cache[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(keys + elements, mask=readable, other=0.0)
        v = tl.load(values + elements, mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            # A tree of drafts would replace this, for keys of the pass itself, by its own mask.
            visible = key_at[None, :] <= query_at[:, None]
            if WINDOWED:
                visible &= key_at[None, :] > query_at[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # Every fused multiply-add is spelt out: left to the compiler, the masked and the unmasked
        # loop could round differently.
        weights = tl.exp2(tl.fma(scores, scale_log2, -new_max[:, None]))
        shrink = tl.exp2(row_max - new_max)
        row_sum = tl.fma(row_sum, shrink, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _hand_in(state, scratch, valid, tile_head, split, num_splits):
    """Leave a partial result for the last program of the tile; returns how many came before."""
    acc, row_max, row_sum = state
    accs, maxima, sums, arrivals = scratch
    TILE_ROWS: tl.constexpr = acc.shape[0]
    PADDED_DIM: tl.constexpr = acc.shape[1]
    rows = (tile_head.to(tl.int64) * num_splits + split) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    elements = rows[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :]
    tl.store(maxima + rows, row_max, mask=valid)
    tl.store(sums + rows, row_sum, mask=valid)
    tl.store(accs + elements, acc, mask=valid[:, None])
    # One thread counts for all: the barrier orders their stores before it.
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tile_head, 1, sem="acq_rel")


@triton.jit
def _combine(
    scratch, valid, tile_head, num_splits, num_active,
    TILE_ROWS: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """A tile's result from its partial ones, in the order of positions. Loads pass by the first
    cache, which does not see what other multiprocessors store."""
    accs, maxima, sums, arrivals = scratch
    tl.store(arrivals + tile_head, 0)  # as the next launch must find it
    rows = tile_head.to(tl.int64) * num_splits * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    row_max = tl.full([TILE_ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    # As many at a time as registers hold, so that their loads overlap. Parts are the middle axis,
    # which the compiler keeps within a thread.
    CHUNK: tl.constexpr = 64 // TILE_ROWS if TILE_ROWS < 64 else 1
    for first in range(0, num_active, CHUNK):
        splits = first + tl.arange(0, CHUNK)[None, :]
        at = rows[:, None] + splits * TILE_ROWS
        there = valid[:, None] & (splits < num_active)
        part_max = tl.load(maxima + at, mask=there, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(sums + at, mask=there, other=0.0, cache_modifier=".cg")
        elements = (at * PADDED_DIM)[:, :, None] + dims[None, None, :]
        part_acc = tl.load(accs + elements, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(part_max, 1))
        shrink, weights = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(part_sum * weights, 1)
        acc = acc * shrink[:, None] + tl.sum(part_acc * weights[:, :, None], 1)
        row_max = new_max
    return acc, row_sum


@triton.jit
def _store(outs, acc, row_sum, written):
    tl.store(outs, (acc / row_sum[:, None]).to(outs.dtype.element_ty), mask=written)


@triton.jit
def _join(outs, state, scratch, tile_head, split, num_splits, num_active, valid, written):
    """Store the tile's result if this program is the only one at work on it, or the last."""
    acc, _, row_sum = state
    if num_active == 1:
        _store(outs, acc, row_sum, written)
    else:
        num_before = _hand_in(state, scratch, valid, tile_head, split, num_splits)
        if num_before == num_active - 1:
            acc, row_sum = _combine(
                scratch, valid, tile_head, num_splits, num_active, acc.shape[0], acc.shape[1]
            )
            _store(outs, acc, row_sum, written)


@triton.jit
def _prefetch(
    cache, begin, end, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr
):
    """Have keys and values of earlier passes brought near."""
    keys, values, table, block_stride = cache
    LINES: tl.constexpr = 2 if HEAD_DIM * keys.dtype.element_ty.primitive_bitwidth > 1024 else 1
    for block_begin in range(begin, end, BLOCK_KEYS):
        key_at = tl.minimum(block_begin + tl.arange(0, BLOCK_KEYS), end - 1)
        block_ids = tl.load(table + key_at // BLOCK_SIZE)
        elements = (block_ids.to(tl.int64) * block_stride + key_at % BLOCK_SIZE) * HEAD_DIM
        prefetch_rows(keys + elements, LINES, True)
        prefetch_rows(values + elements, LINES, True)


@triton.jit
def _span_of_split(num_positions, num_splits, BLOCK_KEYS: tl.constexpr, MIN_SPAN: tl.constexpr):
    blocks = tl.cdiv(tl.cdiv(num_positions, num_splits), BLOCK_KEYS)
    return tl.maximum(blocks * BLOCK_KEYS, MIN_SPAN)


# What differs from pass to pass must not select another compilation, which might round otherwise.
@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def _attention_kernel(
    out, q, keys, values, tiles, block_tables, accs, maxima, sums, arrivals,
    scale_log2, window, num_splits, q_token_stride, q_head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    MIN_SPAN: tl.constexpr, WINDOWED: tl.constexpr, TWO_LOOPS: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Tiles and tables were written by the first kernel of the pass, which has ended.
    entry = tiles + tl.program_id(0) * TILE_COLUMNS
    num_tokens = tl.load(entry + NUM_TOKENS)
    position = tl.load(entry + POSITION)
    table = block_tables + tl.load(entry + TABLE_ROW).to(tl.int64) * table_stride
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    head_begin = kv_head * (BLOCK_SIZE * HEAD_DIM)
    cache = (keys + head_begin, values + head_begin, table, num_kv_heads * BLOCK_SIZE)
    past_key = position + num_tokens
    first_key = tl.maximum(position - window + 1, 0) if WINDOWED else 0
    begin = first_key // BLOCK_KEYS * BLOCK_KEYS
    end = past_key
    if SPLIT:
        split = tl.program_id(2)
        span = _span_of_split(past_key - begin, num_splits, BLOCK_KEYS, MIN_SPAN)
        num_active = tl.cdiv(past_key - begin, span)
        begin += split * span
        end = tl.minimum(begin + span, past_key)
        if PDL:
            _prefetch(cache, begin, tl.minimum(end, position), HEAD_DIM, BLOCK_SIZE, BLOCK_KEYS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if num_tokens == 0:
        return
    if SPLIT and split >= num_active:
        return

    # Row r is token r // GROUP and, of the query heads that share the KV head, head r % GROUP.
    rows, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    valid = rows < num_tokens * GROUP
    written = valid[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = tl.load(entry + FIRST_TOKEN).to(tl.int64) + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    q_rows = q + tokens * q_token_stride + heads * q_head_stride
    q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=written, other=0.0)
    query_at = position + rows // GROUP

    state = (
        tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32),
        tl.full([TILE_ROWS], LOWEST, tl.float32),
        tl.zeros([TILE_ROWS], tl.float32),
    )
    if TWO_LOOPS:
        # Blocks that even the first token sees whole need no mask.
        whole = tl.minimum((position + 1) // BLOCK_KEYS * BLOCK_KEYS, end)
        whole = tl.maximum(whole, begin)
        state = _attend(
            state, q_tile, query_at, cache, begin, whole, first_key, past_key, window, scale_log2,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_KEYS, WINDOWED, False,
        )  # fmt: skip
        begin = whole
    state = _attend(
        state, q_tile, query_at, cache, begin, end, first_key, past_key, window, scale_log2,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_KEYS, WINDOWED, True,
    )  # fmt: skip

    out_rows = out + (tokens * (num_kv_heads * GROUP) + heads) * HEAD_DIM
    outs = out_rows[:, None] + dims[None, :]
    if SPLIT:
        tile_head = tl.program_id(0) * num_kv_heads + kv_head
        scratch = (accs, maxima, sums, arrivals)
        _join(outs, state, scratch, tile_head, split, num_splits, num_active, valid, written)
    else:
        _store(outs, state[0], state[2], written)


def tile_tokens_for(num_heads: int, num_kv_heads: int, max_query_len: int) -> int:
    """How many tokens a tile may have in a pass whose longest sequence has `max_query_len`."""
    group = num_heads // num_kv_heads
    if max_query_len > _MAX_DECODE_QUERIES:
        rows = _PREFILL_ROWS
    else:
        rows = _MIN_ROWS if max_query_len * group <= _MIN_ROWS else _MAX_DECODE_ROWS
    return max(1, rows // group)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int = 0,
    *,
    num_splits: int | None = None,
    tile_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`Ops.attention` for a batch cut into tiles of at most `tile_tokens_for` tokens.

    With `num_splits=1` and one `tile_rows` for all passes (a power of two from 16 on; tiles then
    have at most `tile_rows // (H / KV)` tokens) a token's result does not depend on its pass. Rows
    that no tile names stay as they are in `out`, [T, H * D].
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    if tile_rows is None:
        tile_tokens = tile_tokens_for(num_heads, num_kv_heads, batch.max_query_len)
        tile_rows = max(_MIN_ROWS, _power_of_two(tile_tokens * group))
    if out is None:
        out = q.new_empty(num_tokens, num_heads * head_dim)
    _check(q, key_cache, value_cache, out, scale)
    if batch.tiles is None or tile_rows < max(_MIN_ROWS, group):
        raise ValueError(f"attention needs tiles, of {group} rows or more: {tile_rows=}")
    num_tiles = batch.tiles.shape[0]
    if num_tiles == 0:
        return out
    num_splits = num_splits or _splits(num_tiles * num_kv_heads, batch.max_context_len, window)
    parts = _parts(q.device, num_tiles * num_kv_heads, num_splits, tile_rows, head_dim)
    pdl = pdl_enabled(q.device)
    block_keys, num_warps, num_stages = _config(tile_rows, head_dim, q.element_size())
    _attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        out, q, key_cache, value_cache, batch.tiles, batch.block_tables, *parts,
        scale * _LOG2_E, window, num_splits, q.stride(0), q.stride(1), batch.block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=_padded(head_dim), BLOCK_SIZE=block_size,
        TILE_ROWS=tile_rows, BLOCK_KEYS=block_keys, MIN_SPAN=max(_MIN_SPAN, block_keys),
        WINDOWED=window > 0,
        TWO_LOOPS=tile_rows > _MAX_DECODE_ROWS and window == 0, SPLIT=num_splits > 1, PDL=pdl,
        num_warps=num_warps, num_stages=num_stages, **launch_options(pdl),
    )  # fmt: skip
    return out


def _check(q: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, scale: float) -> None:
    if not all(tensor.is_contiguous() for tensor in (key_cache, value_cache, out, q[:1, :1])):
        raise ValueError("attention needs contiguous caches, a contiguous result and heads of q")
    if scale <= 0:
        raise ValueError(f"scale must be positive: {scale}")  # the largest score stays so, scaled


def _splits(num_tile_heads: int, max_context_len: int, window: int) -> int:
    """Chosen from what a recorded pass keeps, its sizes, so that it is right at any context."""
    reach = min(max_context_len, window + _PREFILL_ROWS) if window else max_context_len
    most = min(_MAX_SPLITS, -(-reach // _MIN_SPAN))
    return max(1, min(most, _TARGET_PROGRAMS // num_tile_heads))


def _parts(
    device: torch.device, num_tile_heads: int, num_splits: int, tile_rows: int, head_dim: int
) -> tuple[Tensor | None, ...]:
    """Where programs that share a tile leave sums, maxima and weights, and count themselves."""
    padded = _padded(head_dim)
    floats = tile_rows * (padded + 2)
    partial, arrivals = split_scratch(device, num_tile_heads, num_splits, floats)
    if partial is None:
        return (None,) * 4
    num_rows = num_tile_heads * num_splits * tile_rows
    accs, maxima, sums = partial[: num_rows * (padded + 2)].split(
        [num_rows * padded, num_rows, num_rows]
    )
    return accs, maxima, sums, arrivals


def _config(tile_rows: int, head_dim: int, element_size: int) -> tuple[int, int, int]:
    """BLOCK_KEYS, warps and stages. They must not depend on anything that varies with the pass."""
    if element_size > 2:
        return 16, 8, 2  # without matrix units all is in registers, which larger blocks overflow
    if tile_rows > _MAX_DECODE_ROWS:
        return 64, 8 if tile_rows > 64 else 4, 3
    # A split is one block at most contexts, read whole before anything is computed.
    return (128, 8, 3) if _padded(head_dim) <= 128 else (64, 4, 3)


def _padded(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
