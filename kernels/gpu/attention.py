"""Attention of ragged rows over the paged cache, one program a tile of queries and KV head.

A tile is a few consecutive queries of one sequence (`TileColumn`); with all the query heads that
share a KV head they are the rows of one matrix product, so keys and values are read once for all
of them. Prompts want large tiles and decoding rows small ones: a pass of both may have both.

A row's reduction runs over blocks of positions aligned to position 0, one after another: blocks in
which it sees nothing leave its numbers as they are. So without splits its result does not depend,
bit for bit, on the other rows of its tile.

In passes with few tiles each tile's positions are split over several programs. Each leaves its
partial result in scratch memory, and the last to arrive combines them in the order of positions.
Where a token's bits must not depend on its pass, positions are split at fixed places, whether one
program goes through all of the spans or there is one for each.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.kernels.gpu.attention_kernels import attention_kernel
from outrider.kernels.gpu.launch import launch_options, pdl_enabled
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.types import RaggedBatch

_MIN_SPAN = 128  # fewer positions are not worth a program; a multiple of the keys of a block
_FIXED_SPAN = 256
_LOG2_E = 1.4426950408889634
MAX_DECODE_QUERIES = 33
"""The largest depth plus one token; a sequence with more queries is a prompt."""
_DECODE_ROWS = 16  # what a matrix unit takes; larger tiles are slower wherever reading counts
_PREFILL_ROWS = 128
_MAX_SPLITS = 32
_PREFETCHED = 256  # positions a split prefetches while it waits; more would delay other splits
_MAX_PARTS = 1 << 14  # results of fixed spans that are kept: 136 MB with 16 rows of 128
_TARGET_PROGRAMS = 2 * 132  # two for each multiprocessor of an H200


def tile_tokens_for(
    num_heads: int, num_kv_heads: int, query_len: int, is_fixed: bool = False
) -> int:
    """The most tokens of a tile, for a sequence that computes `query_len`."""
    is_decoding = is_fixed or query_len <= MAX_DECODE_QUERIES
    rows = _DECODE_ROWS if is_decoding else _PREFILL_ROWS
    return max(1, rows // (num_heads // num_kv_heads))


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int = 0,
    *,
    is_fixed: bool = False,
    num_splits: int | None = None,
    tile_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`Ops.attention` for a batch cut into tiles of at most `tile_tokens_for` tokens.

    With `is_fixed` a token's result does not depend on its pass. `num_splits` and `tile_rows` (a
    power of two from 16 on; tiles then have at most `tile_rows // (H / KV)` tokens) are otherwise
    chosen here. Rows that no tile names stay as they are in `out`, [T, H * D].
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    if tile_rows is None:
        tile_tokens = tile_tokens_for(num_heads, num_kv_heads, batch.max_query_len, is_fixed)
        tile_rows = max(_DECODE_ROWS, _power_of_two(tile_tokens * group))
    if out is None:
        out = q.new_empty(num_tokens, num_heads * head_dim)
    _check(q, key_cache, value_cache, out, scale)
    if batch.tiles is None or tile_rows < max(_DECODE_ROWS, group):
        raise ValueError(f"attention needs tiles, of {group} rows or more: {tile_rows=}")
    num_tiles = batch.tiles.shape[0]
    if num_tiles == 0:
        return out
    num_programs, least_tokens, places, turns = num_tiles, 1, 1, 1
    if batch.places_of_long_tile and not is_fixed:
        # One launch for each tile size, which skips tiles of the other.
        few = replace(batch, max_query_len=1, places_of_long_tile=0)
        paged_attention(q, key_cache, value_cache, few, scale, window, out=out)
        tile_tokens = tile_tokens_for(num_heads, num_kv_heads, 1)
        least_tokens, places = tile_tokens + 1, batch.places_of_long_tile
        turns = _most_long_tiles(places, tile_tokens)
        num_programs = turns * -(-num_tiles // places)
    tile_heads = num_programs * num_kv_heads
    num_splits = num_splits or _splits(tile_heads, batch.max_context_len, window, is_fixed)
    parts = _parts(q.device, tile_heads, num_splits, tile_rows, head_dim)
    pdl = pdl_enabled(q.device)
    block_keys, num_warps, num_stages = _config(
        tile_rows, head_dim, q.element_size(), None if is_fixed else tile_heads
    )
    attention_kernel[(tile_heads, num_splits)](
        out, q, key_cache, value_cache, batch.tiles, batch.block_tables, *parts,
        scale * _LOG2_E, window, num_tiles, num_splits, q.stride(0), q.stride(1),
        batch.block_tables.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=_padded(head_dim),
        BLOCK_SIZE=block_size,
        LEAST_TOKENS=least_tokens, PLACES=places, TURNS=turns, TILE_ROWS=tile_rows,
        BLOCK_KEYS=block_keys, MIN_SPAN=_MIN_SPAN, PREFETCHED=_PREFETCHED,
        FIXED_SPAN=_FIXED_SPAN if is_fixed else 0, WINDOWED=window > 0,
        TWO_LOOPS=tile_rows > 2 * _DECODE_ROWS and window == 0 and not is_fixed,
        HEADS_FIRST=tile_rows <= 2 * _DECODE_ROWS, SPLIT=num_splits > 1,
        PARTS_AT_ONCE=max(1, num_warps // 2 * _DECODE_ROWS // tile_rows), PDL=pdl,
        num_warps=num_warps, num_stages=num_stages,
        **launch_options(pdl),
    )  # fmt: skip
    return out


def _most_long_tiles(places: int, tile_tokens: int) -> int:
    """The most long tiles that start in `places` consecutive places: the last of one sequence,
    which takes at least two places, and one per sequence that follows."""
    least = -(-(MAX_DECODE_QUERIES + 1) // tile_tokens)
    return 1 + -(-(places - 2) // least)


def _check(q: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, scale: float) -> None:
    if not all(tensor.is_contiguous() for tensor in (key_cache, value_cache, out, q[:1, :1])):
        raise ValueError("attention needs contiguous caches, a contiguous result and heads of q")
    if scale <= 0:
        raise ValueError(f"scale must be positive: {scale}")  # the largest score stays so, scaled


def _splits(num_tile_heads: int, max_context_len: int, window: int, is_fixed: bool) -> int:
    """Chosen from the sizes of a captured pass alone, so that it is valid at any context."""
    reach = min(max_context_len, window + _PREFILL_ROWS) if window else max_context_len
    if is_fixed:
        # One for each span, or none; a window may begin and end inside one.
        spans = -(-reach // _FIXED_SPAN) + (1 if window else 0)
        is_worth_it = 2 * num_tile_heads <= _TARGET_PROGRAMS
        return spans if is_worth_it and num_tile_heads * spans <= _MAX_PARTS else 1
    most = min(_MAX_SPLITS, -(-reach // _MIN_SPAN))
    return max(1, min(most, _TARGET_PROGRAMS // num_tile_heads))


def _parts(
    device: torch.device, num_tile_heads: int, num_splits: int, tile_rows: int, head_dim: int
) -> tuple[Tensor | None, ...]:
    """Scratch where programs that share a tile leave sums, maxima and weights, and count
    arrivals."""
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


def _config(
    tile_rows: int, head_dim: int, element_size: int, num_tile_heads: int | None
) -> tuple[int, int, int]:
    """Keys of a block, warps and stages; `num_tile_heads` is None where they must not
    depend on the pass."""
    if element_size > 2:
        return 16, 8, 2  # float32 does not use matrix units: larger blocks overflow the registers
    if tile_rows > 2 * _DECODE_ROWS:
        # Of heads wider than 128 shared memory holds two blocks beside the queries, not three.
        return 64, 8 if tile_rows > 64 else 4, 3 if _padded(head_dim) <= 128 else 2
    if num_tile_heads is None or _padded(head_dim) > 128:
        return 64, 4, 3
    if num_tile_heads <= _TARGET_PROGRAMS:
        # A split is one block at most contexts, read whole before anything is computed.
        return 128, 8, 2
    # Many programs hide each other's waiting, the better the more of them fit.
    return 32, 1 if num_tile_heads <= 3 * _TARGET_PROGRAMS else 2, 4


def _padded(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
