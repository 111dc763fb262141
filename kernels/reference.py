"""Plain torch: every operation in its simplest correct form, on any device and dtype.

The other backends are compared with it, and it runs where none of them can.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.noise import gumbel
from outrider.kernels.quantized import (
    ActivationScheme,
    QuantizedWeight,
    fake_quantize,
    whole,
)
from outrider.kernels.stored import StoredTable
from outrider.kernels.types import Linear, Pass, RaggedBatch

# On CPUs F.linear is a fast matrix-vector product at one row, oneDNN with packed weights wins at
# a few rows, and beyond that the two are close.
_MAX_PACKED_ROWS = 16
# Where a row of a packed oneDNN product has the same bits at every row count; not on x86-64.
_ROW_INDEPENDENT_MACHINES = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """See `outrider.kernels.types.Ops`. `deterministic` has an effect on CPUs only."""

    deterministic: bool = False

    @property
    def name(self) -> str:
        return "torch"

    @property
    def packing(self) -> None:
        return None

    @property
    def supports_strided_blocks(self) -> bool:
        return True

    @property
    def fused(self) -> None:
        return None

    def tile_tokens(self, num_heads: int, num_kv_heads: int, query_len: int) -> int:
        return 0

    def captured(self, run: Pass) -> Pass:
        return run

    def whole_passes(self, run: Pass, table: StoredTable, block_size: int) -> None:
        return None

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        """8-bit weights are dequantized."""
        weight = whole(weight)
        packable = _can_pack(weight)
        if self.deterministic and weight.device.type == "cpu":
            if packable and platform.machine() in _ROW_INDEPENDENT_MACHINES:
                packed = _pack(weight)
                return lambda x: _packed_linear(x, packed, bias)
            return lambda x: _linear_by_row(x, weight, bias)
        if packable:
            return _mixed_linear(weight, _pack(weight), bias)
        return lambda x: F.linear(x, weight, bias)

    def with_activations(self, linear: Linear, scheme: ActivationScheme) -> Linear:
        return lambda x: linear(fake_quantize(x, scheme))

    def stacked(self, linears: Sequence[Linear]) -> Linear:
        return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype) * weight

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

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
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        v = heads[:, num_heads + num_kv_heads :]
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, norm_eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, norm_eps)
        if cos is not None and sin is not None:
            row_cos, row_sin = cos[batch.positions].unsqueeze(1), sin[batch.positions].unsqueeze(1)
            q, k = _rotate(q, row_cos, row_sin), _rotate(k, row_cos, row_sin)
        block_size = key_cache.shape[2]
        block_ids, offsets = batch.slots // block_size, batch.slots % block_size
        key_cache[block_ids, :, offsets] = k
        value_cache[block_ids, :, offsets] = v
        return q.contiguous()

    def attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        one_by_one = self.deterministic and q.device.type == "cpu"
        out = torch.empty_like(q)
        for rows, keys, values in _sequences(batch, key_cache, value_cache):
            num_queries = rows.stop - rows.start
            first = keys.shape[1] - num_queries
            if not one_by_one:
                out[rows] = _attend(q[rows], keys, values, scale, first, window)
                continue
            for i in range(num_queries):
                stop = first + i + 1
                start = max(0, stop - window) if window else 0
                row = slice(rows.start + i, rows.start + i + 1)
                visible = slice(start, stop)
                out[row] = _attend(
                    q[row], keys[:, visible], values[:, visible], scale, stop - start - 1, 0
                )
        return out.flatten(1)

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        return head(hidden).float()

    def gumbel_argmax(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
    ) -> Tensor:
        return self.gumbel_max(scores, seeds, streams, positions, 0)[1]

    def gumbel_max(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor, first_id: int
    ) -> tuple[Tensor, Tensor]:
        noisy = scores + gumbel(seeds, streams, positions, scores.shape[-1], first_id)
        columns = noisy.argmax(-1, keepdim=True)
        return noisy.gather(-1, columns).squeeze(-1), columns.squeeze(-1)

    def probability_of(self, scores: Tensor, tokens: Tensor) -> Tensor:
        return scores.float().softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, packed.shape[0])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _mixed_linear(weight: Tensor, packed: Tensor, bias: Tensor | None) -> Linear:
    def apply(x: Tensor) -> Tensor:
        if 1 < x.shape[0] <= _MAX_PACKED_ROWS:
            return _packed_linear(x, packed, bias)
        return F.linear(x, weight, bias)

    return apply


def _linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One product a row, each on a fresh copy, since a library may choose its code by alignment."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    for i in range(x.shape[0]):
        out[i] = F.linear(x[i].clone(), weight, bias)
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def _sequences(
    batch: RaggedBatch, key_cache: Tensor, value_cache: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each sequence's token rows with its keys and values as [KV, context, D]."""
    block_size = key_cache.shape[2]
    bounds = batch.cu_query_lens.tolist()
    for b, context_len in enumerate(batch.context_lens.tolist()):
        if bounds[b] == bounds[b + 1]:
            continue
        blocks = batch.block_tables[b, : -(-context_len // block_size)].long()
        keys, values = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len].contiguous()
            for cache in (key_cache, value_cache)
        )
        yield slice(bounds[b], bounds[b + 1]), keys, values


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, first: int, window: int
) -> Tensor:
    """q [n, H, D] at positions first.. over keys and values [KV, context, D]; [n, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = keys.shape
    grouped = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.transpose(1, 2)).float() * scale
    scores = scores.view(num_kv_heads, -1, num_queries, context_len)
    query_at = torch.arange(first, first + num_queries, device=q.device).unsqueeze(1)
    key_at = torch.arange(context_len, device=q.device)
    hidden = key_at > query_at
    if window:
        hidden |= key_at <= query_at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
    out = torch.matmul(weights.view(num_kv_heads, -1, context_len), values)
    return out.view(num_heads, num_queries, head_dim).transpose(0, 1)
