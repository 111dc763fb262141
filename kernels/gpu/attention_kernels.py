"""The kernel of `outrider.kernels.gpu.attention`.

Program ids are (tile of queries, KV head, split of the tile's positions).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.launch import let_next_start, prefetch_rows, wait_for_inputs
from outrider.kernels.types import TileColumn

FIRST_TOKEN = tl.constexpr(TileColumn.FIRST_TOKEN)
NUM_TOKENS = tl.constexpr(TileColumn.NUM_TOKENS)
POSITION = tl.constexpr(TileColumn.POSITION)
TABLE_ROW = tl.constexpr(TileColumn.TABLE_ROW)
TILE_COLUMNS = tl.constexpr(4)
# Below every score. It is finite, so that a row that has seen nothing yet meets no inf - inf.
LOWEST = tl.constexpr(-1e30)


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
def _nothing_seen(TILE_ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Sums, highest scores and weights of rows that have looked at no position."""
    return (
        tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32),
        tl.full([TILE_ROWS], LOWEST, tl.float32),
        tl.zeros([TILE_ROWS], tl.float32),
    )


@triton.jit
def _fold(state, part):
    """The result over two ranges of positions from those over each. A range in which a row sees
    nothing leaves its numbers as they are."""
    acc, row_max, row_sum = state
    part_acc, part_max, part_sum = part
    new_max = tl.maximum(row_max, part_max)
    shrink, weight = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
    row_sum = tl.fma(row_sum, shrink, part_sum * weight)
    acc = tl.fma(acc, shrink[:, None], part_acc * weight[:, None])
    return acc, new_max, row_sum


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
def _combine_in_order(
    scratch, valid, tile_head, num_splits, num_active,
    TILE_ROWS: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """As `_combine`, but part by part, which is how one program goes through all of them."""
    accs, maxima, sums, arrivals = scratch
    tl.store(arrivals + tile_head, 0)
    state = _nothing_seen(TILE_ROWS, PADDED_DIM)
    dims = tl.arange(0, PADDED_DIM)
    for split in range(0, num_active):
        at = (tile_head.to(tl.int64) * num_splits + split) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        part_max = tl.load(maxima + at, mask=valid, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(sums + at, mask=valid, other=0.0, cache_modifier=".cg")
        elements = (at * PADDED_DIM)[:, None] + dims[None, :]
        part_acc = tl.load(accs + elements, mask=valid[:, None], other=0.0, cache_modifier=".cg")
        state = _fold(state, (part_acc, part_max, part_sum))
    return state[0], state[2]


@triton.jit
def _store(outs, acc, row_sum, written):
    tl.store(outs, (acc / row_sum[:, None]).to(outs.dtype.element_ty), mask=written)


@triton.jit
def _join(
    outs, state, scratch, tile_head, split, num_splits, num_active, valid, written,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Store the tile's result if this program is the only one at work on it, or the last."""
    acc, _, row_sum = state
    if num_active == 1:
        _store(outs, acc, row_sum, written)
    else:
        num_before = _hand_in(state, scratch, valid, tile_head, split, num_splits)
        if num_before == num_active - 1:
            TILE_ROWS: tl.constexpr = acc.shape[0]
            PADDED_DIM: tl.constexpr = acc.shape[1]
            if IN_ORDER:
                acc, row_sum = _combine_in_order(
                    scratch, valid, tile_head, num_splits, num_active, TILE_ROWS, PADDED_DIM
                )
            else:
                acc, row_sum = _combine(
                    scratch, valid, tile_head, num_splits, num_active, TILE_ROWS, PADDED_DIM
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
def attention_kernel(
    out, q, keys, values, tiles, block_tables, accs, maxima, sums, arrivals,
    scale_log2, window, num_splits, q_token_stride, q_head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    MIN_SPAN: tl.constexpr, FIXED_SPAN: tl.constexpr, WINDOWED: tl.constexpr,
    TWO_LOOPS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With FIXED_SPAN, positions are gone through in spans of so many from position 0 on, each by
    itself, and the spans' results put together in order: by one program or by one for each."""
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
        if FIXED_SPAN:
            first_span = first_key // FIXED_SPAN
            num_active = tl.cdiv(past_key, FIXED_SPAN) - first_span
            end = tl.minimum((first_span + split + 1) * FIXED_SPAN, past_key)
            begin = tl.maximum((first_span + split) * FIXED_SPAN, begin)
        else:
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

    state = _nothing_seen(TILE_ROWS, PADDED_DIM)
    if FIXED_SPAN and not SPLIT:
        for span_begin in range(first_key // FIXED_SPAN * FIXED_SPAN, past_key, FIXED_SPAN):
            part = _attend(
                _nothing_seen(TILE_ROWS, PADDED_DIM), q_tile, query_at, cache,
                tl.maximum(span_begin, begin), tl.minimum(span_begin + FIXED_SPAN, past_key),
                first_key, past_key, window, scale_log2,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_KEYS, WINDOWED, True,
            )  # fmt: skip
            state = _fold(state, part)
    else:
        if TWO_LOOPS:
            # Blocks that even the first token sees whole need no mask.
            whole = tl.minimum((position + 1) // BLOCK_KEYS * BLOCK_KEYS, end)
            whole = tl.maximum(whole, begin)
            state = _attend(
                state, q_tile, query_at, cache, begin, whole, first_key, past_key, window,
                scale_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_KEYS, WINDOWED, False,
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
        _join(
            outs, state, scratch, tile_head, split, num_splits, num_active, valid, written,
            FIXED_SPAN > 0,
        )  # fmt: skip
    else:
        _store(outs, state[0], state[2], written)
