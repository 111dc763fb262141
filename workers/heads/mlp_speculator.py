"""The MLP speculator: a small recurrent network over the tokens drafted so far."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.types import Linear, Ops, RaggedBatch
from outrider.workers.heads.configs import MlpConfig
from outrider.workers.heads.weights import HeadWeights
from outrider.workers.models.kv import KVCache

_EPS = 1e-6
_PREFIX = "speculator."


@dataclass(frozen=True, slots=True)
class _Level:
    embedding: Tensor
    project: Linear
    norm_weight: Tensor
    norm_bias: Tensor
    head: Linear


class MlpSpeculatorHead:
    """See `Head`. A state is that of the network after `level` draft tokens."""

    def __init__(self, config: MlpConfig, weights: HeadWeights, ops: Ops) -> None:
        self.spec = config.spec
        self._ops = ops
        self._levels = _levels(config, weights, ops)
        # The norm after the sum makes only the ratio of the two weights matter.
        state_weight = 0.5 ** (0.5 / config.num_levels)
        emb_weight = math.sqrt((1 - state_weight**2) * (config.inner_dim / 2))
        self._token_share = emb_weight / state_weight
        width = config.spec.hidden_size
        self._input_scale: Tensor | None = None
        if config.scales_input:
            self._input_scale = torch.ones(width, dtype=weights.dtype, device=weights.device)

    def tile_tokens(self, query_len: int) -> int:
        return 0

    def extend(
        self, features: Tensor, next_ids: Tensor, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        if self._input_scale is not None:
            features = self._ops.rms_norm(features, self._input_scale, _EPS) / math.sqrt(2)
        return self._run(features, next_ids, self._levels[0])

    def step(
        self, state: Tensor, ids: Tensor, level: int, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        return self._run(state, ids, self._levels[level])

    def logits(self, state: Tensor, level: int) -> Tensor:
        return self._ops.logits(self._levels[level].head, state)

    def _run(self, state: Tensor, ids: Tensor, level: _Level) -> Tensor:
        token = self._ops.embed(ids, level.embedding)
        mixed = torch.add(level.project(state), token, alpha=self._token_share)
        normed = self._ops.rms_norm(mixed, level.norm_weight, _EPS) + level.norm_bias
        return functional.gelu(normed)


def _levels(config: MlpConfig, weights: HeadWeights, ops: Ops) -> list[_Level]:
    """Tied levels share all but the first projection, whose input has another size."""
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in weights.names) else ""
    inner, vocab_size = config.inner_dim, config.spec.vocab_size

    def project(index: int) -> Linear:
        width = inner if index else config.spec.hidden_size
        return ops.linear(weights.read(f"{prefix}proj.{index}.weight", (inner, width)), None)

    def read(index: int, projection: Linear) -> _Level:
        head = weights.read(f"{prefix}head.{index}.weight", (vocab_size, inner))
        return _Level(
            weights.read(f"{prefix}emb.{index}.weight", (vocab_size, inner)),
            projection,
            weights.read(f"{prefix}ln.{index}.weight", (inner,)),
            weights.read(f"{prefix}ln.{index}.bias", (inner,)),
            ops.linear(head, None),
        )

    if not config.is_tied:
        return [read(index, project(index)) for index in range(config.num_levels)]
    first = read(0, project(0))
    if config.num_levels == 1:
        return [first]
    later = dataclasses.replace(first, project=project(1))
    return [first] + [later] * (config.num_levels - 1)
