"""The paged key/value cache of one model on one rank."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec


class KVCache:
    """Per layer one key and one value tensor, [num_blocks, kv_heads, block_size, head_dim] each.

    Zeroed, because attention may multiply what it masks out, and garbage could be NaN.
    """

    __slots__ = ("block_size", "keys", "num_blocks", "values")

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard | None = None,
    ) -> None:
        kv_heads = len(Partition.of(spec, shard or Shard()).kv_heads)
        shape = (num_blocks, kv_heads, block_size, spec.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [_zeros(shape, dtype, device) for _ in spec.windows]
        self.values = [_zeros(shape, dtype, device) for _ in spec.windows]


def bytes_per_block(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, shard: Shard | None = None
) -> int:
    """Memory of one block over all layers, keys and values together."""
    kv_heads = len(Partition.of(spec, shard or Shard()).kv_heads)
    return 2 * spec.num_layers * kv_heads * block_size * spec.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """On a CPU as fresh pages, which are zero without anybody writing to all of them at a start."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
