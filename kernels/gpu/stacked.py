"""Linear layers of the same inputs whose weights have different formats, as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.norm import add_to_stream
from outrider.kernels.gpu.pointwise import silu_mul
from outrider.kernels.gpu.rotary import rotate_and_store
from outrider.kernels.gpu.stream import ResidualStream, close_stream
from outrider.kernels.types import RaggedBatch


class StackedLinear:
    """See `FusedLinear`; a product for each part, and what follows them by itself."""

    def __init__(self, parts: Sequence[GpuLinear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def add(
        self, x: Tensor, residual: ResidualStream, next_norm: Tensor, eps: float
    ) -> ResidualStream:
        return add_to_stream(self(x), residual, next_norm, eps)

    def norm_gated(self, stream: ResidualStream, eps: float) -> Tensor:
        return silu_mul(self(close_stream(stream, eps)))

    def norm_rotate_store(
        self,
        stream: ResidualStream,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        batch: RaggedBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
    ) -> Tensor:
        qkv = self(close_stream(stream, eps))
        _, kv_heads, _, head_dim = key_cache.shape
        places = (cos, sin, batch, key_cache, value_cache, num_heads)
        return rotate_and_store(qkv, *places, kv_heads, head_dim)
