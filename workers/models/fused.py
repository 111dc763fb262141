"""A pass in about five kernels a layer, for models whose layers can be fused.

It computes the same as `Decoder` does part by part. Each matrix product passes on the residual
stream with its next norm pending, so adding, normalising, rotating and gating need no kernels of
their own. Each product decides what to fuse by the number of tokens. A shard all-reduces what it
adds to the stream, which takes two kernels more a layer beside the two all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from outrider.kernels.types import FusedLinear, FusedOps, Ops, RaggedBatch
from outrider.workers.models.kv import KVCache
from outrider.workers.models.layers import Attention, GatedMlp, Layer, Norm, RmsNorm
from outrider.workers.models.shard import Shard
from outrider.workers.models.taps import Taps


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    attention: Attention
    qkv: FusedLinear
    out: FusedLinear
    mlp_norm: RmsNorm
    gate_up: FusedLinear
    down: FusedLinear
    next_norm: RmsNorm


@dataclass(frozen=True, slots=True)
class FusedPass:
    """The layers of a decoder whose norms are RMS norms and whose MLPs are gated."""

    ops: Ops
    fused: FusedOps
    shard: Shard
    embedding: Tensor
    first_norm: RmsNorm
    layers: tuple[_FusedLayer, ...]

    @classmethod
    def of(
        cls,
        ops: Ops,
        shard: Shard,
        embedding: Tensor,
        first_norm: Norm,
        layers: Sequence[Layer],
    ) -> FusedPass | None:
        """None if a layer has a part that cannot be fused, or the kernels fuse nothing."""
        fused = ops.fused
        if fused is None or not isinstance(first_norm, RmsNorm):
            return None
        parts = [_fused_layer(layer, fused) for layer in layers]
        found = tuple(part for part in parts if part is not None)
        if len(found) < len(parts):
            return None
        return cls(ops, fused, shard, embedding, first_norm, found)

    def __call__(
        self,
        token_ids: Tensor,
        lookup: Callable[[Tensor], Tensor],
        batch: RaggedBatch,
        kv: KVCache,
        index: Tensor | None,
        taps: Taps,
    ) -> Tensor:
        """Hidden states after the final norm, or those at `index` alone. `lookup` embeds tokens
        over all ranks, for shards."""
        norm = self.first_norm
        stream = self._open(token_ids, lookup)
        for number, layer in enumerate(self.layers):
            taps.observe(number, stream.total)
            keys, values = kv.keys[number], kv.values[number]
            own = layer.attention
            query = layer.qkv.norm_rotate_store(
                stream,
                norm.eps,
                own.rotation.cos,
                own.rotation.sin,
                batch,
                keys,
                values,
                own.num_heads,
            )
            mixed = self.ops.attention(query, keys, values, batch, own.scale, own.window)
            norm = layer.mlp_norm
            stream = self._add(layer.out, mixed, stream, norm)
            gated = layer.gate_up.norm_gated(stream, norm.eps)
            norm = layer.next_norm
            stream = self._add(layer.down, gated, stream, norm)
        taps.observe(len(self.layers), stream.total)
        return self.fused.close_stream(stream, norm.eps, index)

    def _open(self, token_ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Any:
        """The stream of tokens, which `first_norm` follows."""
        norm = self.first_norm
        if self.shard.size == 1:
            return self.fused.open_stream(token_ids, self.embedding, norm.weight)
        return self.fused.open_embedded(lookup(token_ids), norm.weight, norm.eps)

    def _add(self, linear: FusedLinear, x: Tensor, stream: Any, norm: RmsNorm) -> Any:
        """The stream after a product, which `norm` follows."""
        if self.shard.size == 1:
            return linear.add(x, stream, norm.weight, norm.eps)
        # All ranks add the same sum by the same kernel: their streams have the same bits.
        return self.fused.add(self.shard.reduce(linear(x)), stream, norm.weight, norm.eps)


def _fused_layer(layer: Layer, fused: FusedOps) -> _FusedLayer | None:
    attention, mlp = layer.attention, layer.mlp
    after_attention, after_mlp = layer.after_attention, layer.after_mlp
    if not (
        isinstance(mlp, GatedMlp)
        and isinstance(after_attention, RmsNorm)
        and isinstance(after_mlp, RmsNorm)
        and attention.rotation.query_norm is None
        and fused.can_rotate(attention.head_dim)
    ):
        return None
    return _FusedLayer(
        attention,
        cast(FusedLinear, attention.qkv),
        cast(FusedLinear, attention.out),
        after_attention,
        cast(FusedLinear, mlp.gate_up),
        cast(FusedLinear, mlp.down),
        after_mlp,
    )
