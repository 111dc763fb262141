"""A pass in about five kernels a layer, for models whose layers can be fused.

It computes the same as `Decoder` does part by part. Each matrix product passes on the residual
stream with its next norm pending, so adding, normalising, rotating and gating need no kernels of
their own. Each product decides what to fuse by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from outrider.kernels.types import FusedLinear, FusedOps, Ops, RaggedBatch
from outrider.workers.models.kv import KVCache
from outrider.workers.models.layers import Attention, GatedMlp, Layer, Norm, RmsNorm
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
    embedding: Tensor
    first_norm: RmsNorm
    layers: tuple[_FusedLayer, ...]

    @classmethod
    def of(
        cls, ops: Ops, embedding: Tensor, first_norm: Norm, layers: Sequence[Layer]
    ) -> FusedPass | None:
        """None if a layer has a part that cannot be fused, or the kernels fuse nothing."""
        fused = ops.fused
        if fused is None or not isinstance(first_norm, RmsNorm):
            return None
        parts = [_fused_layer(layer, fused) for layer in layers]
        found = tuple(part for part in parts if part is not None)
        if len(found) < len(parts):
            return None
        return cls(ops, fused, embedding, first_norm, found)

    def __call__(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        kv: KVCache,
        index: Tensor | None,
        taps: Taps,
    ) -> Tensor:
        norm = self.first_norm
        stream = self.fused.open_stream(token_ids, self.embedding, norm.weight)
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
            stream = layer.out.add(mixed, stream, norm.weight, norm.eps)
            gated = layer.gate_up.norm_gated(stream, norm.eps)
            norm = layer.next_norm
            stream = layer.down.add(gated, stream, norm.weight, norm.eps)
        taps.observe(len(self.layers), stream.total)
        return self.fused.close_stream(stream, norm.eps, index)


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
