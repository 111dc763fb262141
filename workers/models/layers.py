"""The parts a decoder is composed of. All sizes are this rank's.

A norm's `add` takes a block's output and the residual stream and returns (input of the next block,
next residual stream). Pre-norm and post-norm differ only in the norm, so every family runs the same
sequence of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.types import Linear, Ops, RaggedBatch


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    ops: Ops
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """With `is_stream` the normalised sum is the stream itself (post-norm models)."""

    ops: Ops
    weight: Tensor
    bias: Tensor
    eps: float
    is_stream: bool

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        normed = self(total)
        return normed, normed if self.is_stream else total


@dataclass(frozen=True, slots=True)
class NoNorm:
    """The final norm of a model that has none."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, total


@dataclass(frozen=True, slots=True)
class Rotation:
    """Position tables, and Qwen3's norms applied to each head before them."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Attention:
    ops: Ops
    qkv: Linear
    out: Linear
    rotation: Rotation
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int

    def __call__(
        self, x: Tensor, batch: RaggedBatch, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        rotation = self.rotation
        query = self.ops.rotate_and_store(
            self.qkv(x),
            rotation.cos,
            rotation.sin,
            batch,
            key_cache,
            value_cache,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rotation.query_norm,
            rotation.key_norm,
            rotation.norm_eps,
        )
        mixed = self.ops.attention(query, key_cache, value_cache, batch, self.scale, self.window)
        return self.out(mixed)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    ops: Ops
    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class PlainMlp:
    up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    after_attention: Norm
    mlp: GatedMlp | PlainMlp
    after_mlp: Norm


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
}
