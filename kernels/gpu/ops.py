"""The operations as Triton kernels, for float32, float16 and bfloat16 on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from outrider.kernels.gpu import linear, norm, pointwise, rotary, sampling
from outrider.kernels.gpu.attention import paged_attention, tile_tokens_for
from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.norm import add_to_stream, rms_norm
from outrider.kernels.gpu.pointwise import check_dtypes
from outrider.kernels.gpu.stacked import StackedLinear
from outrider.kernels.gpu.stream import ResidualStream, close_stream, open_stream
from outrider.kernels.quantized import ActivationScheme, QuantizedWeight
from outrider.kernels.stored import StoredTable
from outrider.kernels.types import FusedOps, Linear, Pass, RaggedBatch


@dataclass(frozen=True, slots=True)
class GpuFusedOps:
    """See `outrider.kernels.types.FusedOps`."""

    def can_rotate(self, head_dim: int) -> bool:
        return linear.can_rotate(head_dim)

    def open_stream(self, ids: Tensor, table: Tensor, norm: Tensor) -> ResidualStream:
        check_dtypes(table, norm)
        return open_stream(ids, table, norm)

    def open_embedded(self, embedded: Tensor, norm: Tensor, eps: float) -> ResidualStream:
        return ResidualStream(embedded, rms_norm(embedded, norm, eps), None)

    def add(
        self, x: Tensor, residual: ResidualStream, next_norm: Tensor, eps: float
    ) -> ResidualStream:
        return add_to_stream(x, residual, next_norm, eps)

    def close_stream(self, stream: ResidualStream, eps: float, index: Tensor | None) -> Tensor:
        return close_stream(stream, eps, index)


@dataclass(frozen=True, slots=True)
class GpuOps:
    """See `outrider.kernels.types.Ops`. Nothing here waits for the device.

    Deterministic, every pass goes through the same kernels, which add up in the same order:
    products are cut up alike for all numbers of rows, attention has tiles of one size, and its
    positions are split at fixed places.
    """

    deterministic: bool = False

    @property
    def name(self) -> str:
        return "triton"

    @property
    def packing(self) -> None:
        return None

    @property
    def supports_strided_blocks(self) -> bool:
        return False

    @property
    def fused(self) -> FusedOps:
        return GpuFusedOps()

    def tile_tokens(self, num_heads: int, num_kv_heads: int, query_len: int) -> int:
        return tile_tokens_for(num_heads, num_kv_heads, query_len, self.deterministic)

    def captured(self, run: Pass) -> Pass:
        return run

    def whole_passes(self, run: Pass, table: StoredTable, block_size: int) -> None:
        return None

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        check_dtypes(weight, bias)
        return GpuLinear(weight, bias, self.deterministic)

    def with_activations(self, linear: Linear, scheme: ActivationScheme) -> Linear:
        assert isinstance(linear, GpuLinear)
        return linear.with_activations(scheme)

    def stacked(self, linears: Sequence[Linear]) -> Linear:
        return StackedLinear(cast(Sequence[GpuLinear], linears))

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return pointwise.embed(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return norm.layer_norm(x, weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return pointwise.silu_mul(gate_up)

    def rotate_and_store(
        self,
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
    ) -> Tensor:
        return rotary.rotate_and_store(
            qkv,
            cos,
            sin,
            batch,
            key_cache,
            value_cache,
            num_heads,
            num_kv_heads,
            head_dim,
            q_norm,
            k_norm,
            norm_eps,
        )

    def attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        check_dtypes(q, key_cache, value_cache)
        return paged_attention(
            q, key_cache, value_cache, batch, scale, window, is_fixed=self.deterministic
        )

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        assert isinstance(head, GpuLinear)
        return head.wide(hidden)

    def gumbel_argmax(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
    ) -> Tensor:
        check_dtypes(scores)
        return sampling.gumbel_argmax(scores, seeds, streams, positions)

    def gumbel_max(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor, first_id: int
    ) -> tuple[Tensor, Tensor]:
        check_dtypes(scores)
        return sampling.gumbel_max(scores, seeds, streams, positions, first_id)

    def probability_of(self, scores: Tensor, tokens: Tensor) -> Tensor:
        check_dtypes(scores)
        return sampling.probability_of(scores, tokens)
