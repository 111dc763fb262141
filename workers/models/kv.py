"""The paged key/value cache of one model on one rank."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import CapacityError
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec


class KVCache:
    """Per layer one key and one value tensor, [num_blocks, kv_heads, block_size, head_dim] each.

    Zeroed, because attention may multiply masked values, and garbage could be NaN. On a CPU blocks
    may be interleaved: all layers' keys and values of one block are adjacent. Then only used blocks
    occupy memory, even with huge pages.
    """

    __slots__ = ("_interleaved", "block_size", "keys", "num_blocks", "values")

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard | None = None,
        *,
        is_interleaved: bool = False,
    ) -> None:
        """`is_interleaved`: a block's layers are adjacent, see `Ops.supports_strided_blocks`."""
        kv_heads = len(Partition.of(spec, shard or Shard()).kv_heads)
        shape = (num_blocks, kv_heads, block_size, spec.head_dim)
        self._allocate(spec.num_layers, shape, dtype, device, is_interleaved=is_interleaved)

    @classmethod
    def sized(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """For attention outside a decoder, such as a head's."""
        cache = cls.__new__(cls)
        cache._allocate(num_layers, (num_blocks, num_kv_heads, block_size, head_dim), dtype, device)
        return cache

    def _allocate(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_interleaved: bool = False,
    ) -> None:
        self.num_blocks, _, self.block_size, _ = shape
        self._interleaved: Tensor | None = None
        if is_interleaved and torch.device(device).type == "cpu":
            self._interleaved = blocks = _zeros(
                (shape[0], num_layers, 2, *shape[1:]), dtype, device
            )
            self.keys = [blocks[:, layer, 0] for layer in range(num_layers)]
            self.values = [blocks[:, layer, 1] for layer in range(num_layers)]
            return
        self.keys, self.values = (
            [_zeros(shape, dtype, device) for _ in range(num_layers)] for _ in range(2)
        )

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, all layers of each."""
        parts = [*self.keys, *self.values] if self._interleaved is None else [self._interleaved]
        for part in parts:
            for source, target in zip(sources, targets, strict=True):
                part[target].copy_(part[source])


def bytes_per_block(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, shard: Shard | None = None
) -> int:
    """Memory of one block over all layers, keys and values together."""
    kv_heads = len(Partition.of(spec, shard or Shard()).kv_heads)
    return 2 * spec.num_layers * kv_heads * block_size * spec.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """On a CPU as fresh pages, which the kernel zeroes lazily. Huge pages if available: a pass
    reads keys and values all over the cache and would miss the TLB every few kilobytes.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"cannot allocate {size / 2**30:.3g} GB for keys and values here ({error}); lower "
            "kv_cache_gb or max_model_len."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
