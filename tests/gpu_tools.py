"""What tests of GPU kernels share: they run on a GPU, or without one in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.kernels.types import RaggedBatch

HAS_CUDA = torch.cuda.is_available()
GPU_MARKS = [pytest.mark.gpu if HAS_CUDA else pytest.mark.thorough]
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
# The interpreter multiplies matrices of bfloat16 wrongly: numpy has no such type.
DTYPES = (
    (torch.float32, torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float32, torch.float16)
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def ragged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    block_size: int,
    tile_tokens: int | Sequence[int],  # of each sequence; there is a place for the fewest
    num_blocks: int,
    generator: torch.Generator,
    empty_tiles: int = 0,
) -> RaggedBatch:
    """Sequences of (queries, context) over shuffled blocks; `context` counts the queries."""
    order = torch.randperm(num_blocks, generator=generator).tolist()
    max_blocks = max(-(-context // block_size) for _, context in lengths)
    sizes = [tile_tokens] * len(lengths) if isinstance(tile_tokens, int) else tile_tokens
    positions: list[int] = []
    tables, slots, ends, tiles = [], [], [0], []
    for row, (queries, context) in enumerate(lengths):
        table = [order.pop() for _ in range(-(-context // block_size))]
        own = range(context - queries, context)
        slots += [table[at // block_size] * block_size + at % block_size for at in own]
        for first in range(0, queries, min(sizes)):
            count = 0 if first % sizes[row] else min(sizes[row], queries - first)
            tiles.append((ends[-1] + first, count, own.start + first, row))
        positions += own
        ends.append(ends[-1] + queries)
        tables.append(table + [0] * (max_blocks - len(table)))
    tiles += [(0, 0, 0, 0)] * empty_tiles

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return RaggedBatch(
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        cu_query_lens=tensor(ends, torch.int32),
        context_lens=tensor([context for _, context in lengths], torch.int32),
        block_tables=tensor(tables, torch.int32),
        max_query_len=max(queries for queries, _ in lengths),
        max_context_len=max(context for _, context in lengths),
        tiles=tensor(tiles, torch.int32),
    )


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64; NaN if `out` holds one."""
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))
