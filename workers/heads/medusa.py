"""Medusa: parallel heads, each predicting one position further from the same hidden state."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from outrider.kernels.types import Linear, Ops, RaggedBatch
from outrider.workers.heads.configs import MedusaConfig
from outrider.workers.heads.weights import HeadWeights
from outrider.workers.models.kv import KVCache

_PREFIX = re.compile(r"medusa_heads?\.")


@dataclass(frozen=True, slots=True)
class _SingleHead:
    blocks: tuple[Linear, ...]
    head: Linear

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + functional.silu(block(x))
        return ops.logits(self.head, x)


class MedusaHead:
    """See `Head`. A state is the target's hidden state; draft tokens do not change it."""

    def __init__(self, config: MedusaConfig, weights: HeadWeights, ops: Ops) -> None:
        self.spec = config.spec
        self._ops = ops
        layout = _Layout.of(weights.names)
        self._heads = [
            _single_head(config, weights, ops, layout, index) for index in range(config.num_heads)
        ]

    def tile_tokens(self, query_len: int) -> int:
        return 0

    def extend(
        self, features: Tensor, next_ids: Tensor, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        return features

    def step(
        self, state: Tensor, ids: Tensor, level: int, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        return state

    def logits(self, state: Tensor, level: int) -> Tensor:
        return self._heads[level](self._ops, state)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tensor names of a file: those of the method's authors, or vLLM's."""

    prefix: str
    is_vllm: bool
    has_bias: bool

    @classmethod
    def of(cls, names: Collection[str]) -> _Layout:
        found = next((match[0] for name in names if (match := _PREFIX.match(name))), "")
        is_vllm = any(name.startswith(f"{found}blocks.") for name in names)
        return cls(found, is_vllm, any(name.endswith(".bias") for name in names))

    def block(self, head: int, layer: int) -> str:
        name = f"blocks.{head}.layers.{layer}" if self.is_vllm else f"{head}.{layer}.linear"
        return f"{self.prefix}{name}"

    def head(self, head: int, num_blocks: int) -> str:
        name = f"lm_heads.{head}" if self.is_vllm else f"{head}.{num_blocks}"
        return f"{self.prefix}{name}.weight"


def _single_head(
    config: MedusaConfig, weights: HeadWeights, ops: Ops, layout: _Layout, index: int
) -> _SingleHead:
    width, vocab_size = config.spec.hidden_size, config.spec.vocab_size
    blocks = []
    for layer in range(config.num_blocks):
        name = layout.block(index, layer)
        weight = weights.read(f"{name}.weight", (width, width))
        bias = weights.read(f"{name}.bias", (width,)) if layout.has_bias else None
        blocks.append(ops.linear(weight, bias))
    head = weights.read(layout.head(index, config.num_blocks), (vocab_size, width))
    return _SingleHead(tuple(blocks), ops.linear(head, None))
