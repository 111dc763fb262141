"""The kernel of `outrider.kernels.gpu.attention`.

Program ids are (tile of queries and KV head, split of the tile's positions). Of decoding tiles the
heads of one follow each other, so empty tiles, which are last, come after all the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.launch import let_next_start, prefetch_runs, wait_for_inputs
from outrider.kernels.types import TileColumn

FIRST_TOKEN = tl.constexpr(TileColumn.FIRST_TOKEN)
NUM_TOKENS = tl.constexpr(TileColumn.NUM_TOKENS)
POSITION = tl.constexpr(TileColumn.POSITION)
TABLE_ROW = tl.constexpr(TileColumn.TABLE_ROW)
TILE_COLUMNS = tl.constexpr(4)
# Below every score, and finite: a row without visible keys must not compute inf - inf.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _block_ids(table, key_at, first_key, past_key, BLOCK_SIZE: tl.constexpr):
    """The blocks of these positions; after the tile, or before its window, tables may hold
    anything."""
    exists = (key_at >= first_key) & (key_at < past_key)
    return tl.load(table + key_at // BLOCK_SIZE, mask=exists, other=0)


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
    own = tl.arange(0, BLOCK_KEYS)
    # Always a block ahead: loads that depend on loads of the same turn would not be overlapped with
    # the products.
    block_ids = _block_ids(table, begin + own, first_key, past_key, BLOCK_SIZE)
    for block_begin in range(begin, end, BLOCK_KEYS):
        key_at = block_begin + own
        if MASKED:
            # Nothing else is read: after the tile, or before its window, blocks may hold anything.
            readable = ((key_at >= first_key) & (key_at < past_key))[:, None] & in_head
        else:
            readable = in_head
        in_cache = block_ids.to(tl.int64) * block_stride + key_at % BLOCK_SIZE
        block_ids = _block_ids(table, key_at + BLOCK_KEYS, first_key, past_key, BLOCK_SIZE)
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
    """Sums, highest scores and weights of rows before any position."""
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
    TILE_ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
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
    for first in range(0, num_active, PARTS_AT_ONCE):
        splits = first + tl.arange(0, PARTS_AT_ONCE)[None, :]
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
    PARTS_AT_ONCE: tl.constexpr, IN_ORDER: tl.constexpr,
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
                    scratch, valid, tile_head, num_splits, num_active, TILE_ROWS, PADDED_DIM,
                    PARTS_AT_ONCE,
                )  # fmt: skip
            _store(outs, acc, row_sum, written)


@triton.jit
def _prefetch(cache, begin, end, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Prefetch keys and values of earlier passes, by whole blocks of the cache."""
    keys, values, table, block_stride = cache
    BYTES: tl.constexpr = BLOCK_SIZE * HEAD_DIM * keys.dtype.element_ty.primitive_bitwidth // 8
    past_block = tl.cdiv(end, BLOCK_SIZE)
    for first_block in range(begin // BLOCK_SIZE, past_block, 128):
        at = first_block + tl.arange(0, 128)
        block_ids = tl.load(table + at, mask=at < past_block, other=0)
        elements = block_ids.to(tl.int64) * (block_stride * HEAD_DIM)
        num_bytes = tl.where(at < past_block, BYTES, 0)
        prefetch_runs(keys + elements, num_bytes, True)
        prefetch_runs(values + elements, num_bytes, True)


@triton.jit
def _span_of_split(num_positions, num_splits, BLOCK_KEYS: tl.constexpr, MIN_SPAN: tl.constexpr):
    blocks = tl.cdiv(tl.cdiv(num_positions, num_splits), BLOCK_KEYS)
    return tl.maximum(blocks * BLOCK_KEYS, MIN_SPAN)


@triton.jit
def _long_tile(
    tiles, program, num_tiles, LEAST_TOKENS: tl.constexpr, PLACES: tl.constexpr, TURNS: tl.constexpr
):
    """Where this program's tile is, or -1: each of TURNS programs takes one of the long tiles among
    PLACES consecutive places."""
    lane = tl.arange(0, triton.next_power_of_2(PLACES))
    place = program // TURNS * PLACES + lane
    there = (lane < PLACES) & (place < num_tiles)
    counts = tl.load(tiles + place * TILE_COLUMNS + NUM_TOKENS, mask=there, other=0)
    is_long = counts >= LEAST_TOKENS
    is_own = is_long & (tl.cumsum(is_long.to(tl.int32)) == program % TURNS + 1)
    return tl.max(tl.where(is_own, place, -1))


# What differs from pass to pass must not select another compilation, which might round otherwise.
@triton.jit(do_not_specialize=["num_tiles", "num_splits", "table_stride"])
def attention_kernel(
    out, q, keys, values, tiles, block_tables, accs, maxima, sums, arrivals,
    scale_log2, window, num_tiles, num_splits, q_token_stride, q_head_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LEAST_TOKENS: tl.constexpr, PLACES: tl.constexpr,
    TURNS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, MIN_SPAN: tl.constexpr,
    PREFETCHED: tl.constexpr, FIXED_SPAN: tl.constexpr, WINDOWED: tl.constexpr,
    TWO_LOOPS: tl.constexpr, HEADS_FIRST: tl.constexpr, SPLIT: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With FIXED_SPAN, positions are processed in separate spans of that length from position 0 on,
    and their results combined in order: by one program, or one per span."""
    # Tiles and tables were written by the first kernel of the pass, which has ended.
    if HEADS_FIRST:
        program, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    else:
        num_programs = tl.num_programs(0) // KV_HEADS
        program, kv_head = tl.program_id(0) % num_programs, tl.program_id(0) // num_programs
    place = program
    if PLACES > 1:
        place = _long_tile(tiles, program, num_tiles, LEAST_TOKENS, PLACES, TURNS)
    entry = tiles + tl.maximum(place, 0) * TILE_COLUMNS
    num_tokens = tl.where(place >= 0, tl.load(entry + NUM_TOKENS), 0)
    # A tile of fewer or more tokens is empty or of another launch. Its program exits at once,
    # except the first ones: a launch without waiting programs would end before its predecessor.
    is_own = (num_tokens >= LEAST_TOKENS) & (num_tokens <= TILE_ROWS // GROUP)
    if (not is_own) & (program > 0):
        return
    position = tl.load(entry + POSITION)
    table = block_tables + tl.load(entry + TABLE_ROW).to(tl.int64) * table_stride
    head_begin = kv_head * (BLOCK_SIZE * HEAD_DIM)
    cache = (keys + head_begin, values + head_begin, table, KV_HEADS * BLOCK_SIZE)
    past_key = position + num_tokens
    first_key = tl.maximum(position - window + 1, 0) if WINDOWED else 0
    begin = first_key // BLOCK_KEYS * BLOCK_KEYS
    end = past_key
    if SPLIT:
        split = tl.program_id(1)
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
        if (split >= num_active) & (split > 0):
            return
    if PDL and SPLIT:
        near = tl.minimum(tl.minimum(end, position), begin + PREFETCHED)
        near = tl.where(is_own, near, begin)
        _prefetch(cache, begin, near, HEAD_DIM, BLOCK_SIZE)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if not is_own:
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

    out_rows = out + (tokens * (KV_HEADS * GROUP) + heads) * HEAD_DIM
    outs = out_rows[:, None] + dims[None, :]
    if SPLIT:
        tile_head = program * KV_HEADS + kv_head
        scratch = (accs, maxima, sums, arrivals)
        _join(
            outs, state, scratch, tile_head, split, num_splits, num_active, valid, written,
            PARTS_AT_ONCE, FIXED_SPAN > 0,
        )  # fmt: skip
    else:
        _store(outs, state[0], state[2], written)
