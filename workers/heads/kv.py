"""A head's own KV cache, in blocks of the same size as its target's."""

from __future__ import annotations

import torch

from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.kv import KVCache


def head_kv(
    spec: HeadSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVCache | None:
    """Whole on every rank, like the head; None for a head without attention."""
    if not spec.keeps_kv:
        return None
    sizes = (spec.num_own_layers, spec.num_kv_heads, spec.head_dim)
    return KVCache.sized(*sizes, num_blocks, block_size, dtype, device)


def head_bytes_per_block(spec: HeadSpec, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block, keys and values together."""
    size = spec.num_own_layers * spec.num_kv_heads * spec.head_dim
    return 2 * size * block_size * dtype.itemsize
