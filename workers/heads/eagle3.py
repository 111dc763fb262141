"""EAGLE-3: a decoder layer over the target's features and the embedding of the next token.

Most heads have one layer. Those trained by `speculators` may have more, as in a decoder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import ModelError
from outrider.kernels.types import Linear, Ops, RaggedBatch
from outrider.workers.heads.configs import Eagle3Config
from outrider.workers.heads.weights import HeadWeights
from outrider.workers.models.kv import KVCache
from outrider.workers.models.layers import (
    Attention,
    GatedMlp,
    Layer,
    NoNorm,
    Norm,
    RmsNorm,
    Rotation,
)
from outrider.workers.models.rope import rope_tables

_FC_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # old names of `fc_norm.i`


class Eagle3Head:
    """See `Head`. A state is the output of the layers; it replaces the features when the head
    continues from its own draft tokens."""

    def __init__(
        self,
        config: Eagle3Config,
        weights: HeadWeights,
        ops: Ops,
        max_position: int,
        target_embedding: Callable[[Eagle3Config, HeadWeights], Tensor],
    ) -> None:
        parts = _WeightReader(config, weights, ops)
        self.spec = config.spec
        self._config = config
        self._ops = ops
        self._input_norm = parts.input_norm()
        self._feature_norms = parts.feature_norms()
        self._fc = parts.fc()
        has_own = parts.has("embed_tokens")
        self._embedding = parts.embedding() if has_own else target_embedding(config, weights)
        self._embed_norm = parts.norm(f"{parts.first}.input_layernorm")
        self._hidden_norm = parts.norm(f"{parts.first}.hidden_norm")
        self._norm = parts.norm("norm")
        self._layers = parts.layers(self._norm if config.norm_output else NoNorm(), max_position)
        self._target_ids = parts.target_ids()
        self._lm_head = parts.lm_head()

    def tile_tokens(self, query_len: int) -> int:
        layer = self._config.layer
        return self._ops.tile_tokens(layer.num_heads, layer.num_kv_heads, query_len)

    def extend(
        self, features: Tensor, next_ids: Tensor, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        if self._input_norm is not None:
            # Features of large targets are wider than the norm kernels support.
            shape, eps = (self.spec.num_features,), self._config.layer.norm_eps
            features = functional.rms_norm(features, shape, self._input_norm, eps)
        if self._feature_norms:
            split = features.chunk(len(self._feature_norms), dim=-1)
            normed = [
                norm(part.contiguous())
                for norm, part in zip(self._feature_norms, split, strict=True)
            ]
            features = torch.cat(normed, dim=-1)
        return self._run(self._fc(features), next_ids, batch, kv)

    def step(
        self, state: Tensor, ids: Tensor, level: int, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        return self._run(state, ids, batch, kv)

    def logits(self, state: Tensor, level: int) -> Tensor:
        normed = state if self._config.norm_output else self._norm(state)
        logits = self._ops.logits(self._lm_head, normed)
        if self._target_ids is None:
            return logits
        by_target = logits.new_full((len(logits), self.spec.vocab_size), -torch.inf)
        return by_target.index_copy_(1, self._target_ids, logits)

    def _run(self, hidden: Tensor, ids: Tensor, batch: RaggedBatch, kv: KVCache | None) -> Tensor:
        if kv is None:
            raise ValueError("an eagle3 head has attention; pass it a KV cache.")
        embedded = self._embed_norm(self._ops.embed(ids, self._embedding))
        normed = self._hidden_norm(hidden)
        residual = normed if self._config.norm_before_residual else hidden
        x = torch.cat((embedded, normed), dim=-1)
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            mixed = layer.attention(x, batch, keys, values)
            x, residual = layer.after_attention.add(mixed, residual)
            x, residual = layer.after_mlp.add(layer.mlp(x), residual)
        return x


class _WeightReader:
    """Reads the weights of a head, under any of the names that checkpoints use."""

    def __init__(self, config: Eagle3Config, weights: HeadWeights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._names = frozenset(weights.names)
        self._prefix = "model." if "model.fc.weight" in self._names else ""
        is_original = f"{self._prefix}midlayer.hidden_norm.weight" in self._names
        self.first = "midlayer" if is_original else "layers.0"

    def has(self, name: str, what: str = "weight") -> bool:
        return self._stored(f"{name}.{what}") in self._names

    def norm(self, name: str, width: int | None = None) -> RmsNorm:
        spec = self._config.layer
        return RmsNorm(
            self._ops, self._read(f"{name}.weight", width or spec.hidden_size), spec.norm_eps
        )

    def input_norm(self) -> Tensor | None:
        if not self._config.norm_before_fc:
            return None
        return self._read("input_norm.weight", self._config.spec.num_features)

    def feature_norms(self) -> list[RmsNorm]:
        if not self._config.fc_norm:
            return []
        count, width = len(self._config.spec.layers), self._config.spec.hidden_size
        is_old = self.has(_FC_NORMS[0]) and count == len(_FC_NORMS)
        names = _FC_NORMS if is_old else [f"fc_norm.{index}" for index in range(count)]
        return [self.norm(name, width) for name in names]

    def fc(self) -> Linear:
        own = self._config.layer.hidden_size
        weight = self._read("fc.weight", own, self._config.spec.num_features)
        return self._ops.linear(weight, None)

    def embedding(self) -> Tensor:
        spec = self._config.layer
        return self._read("embed_tokens.weight", spec.vocab_size, spec.hidden_size)

    def layers(self, last: Norm, max_position: int) -> list[Layer]:
        """The first layer reads an embedding and a state, concatenated. Each layer ends with the
        norm of the next one's input, the last with `last`."""
        spec, made = self._config.layer, list[Layer]()
        assert spec.rope is not None  # only OPT has none, and no OPT configuration is a head's
        tables = rope_tables(spec.rope, spec.head_dim, max_position, self._weights.device)
        for number, window in enumerate(spec.windows):
            name, width = f"layers.{number}", spec.hidden_size
            if number == 0:
                name, width = self.first, 2 * spec.hidden_size
            is_last = number + 1 == spec.num_layers
            attention = self._attention(f"{name}.self_attn", width, window, tables)
            after = last if is_last else self.norm(f"layers.{number + 1}.input_layernorm")
            norm = self.norm(f"{name}.post_attention_layernorm")
            made.append(Layer(attention, norm, self._mlp(f"{name}.mlp"), after))
        return made

    def _attention(
        self, name: str, width: int, window: int, tables: tuple[Tensor, Tensor]
    ) -> Attention:
        spec = self._config.layer
        query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = [(f"{name}.q_proj", query), (f"{name}.k_proj", key_value)]
        rows.append((f"{name}.v_proj", key_value))
        # Decided by the tensors, not the family: some configurations are copied from a target whose
        # layers have biases that the head lacks. `out_bias` is stated by a key.
        has_bias = spec.out_bias or self.has(rows[0][0], "bias")
        return Attention(
            ops=self._ops,
            qkv=self._stacked(rows, width, has_bias),
            out=self._linear(f"{name}.o_proj", spec.hidden_size, query),
            rotation=self._rotation(name, *tables),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=window,
        )

    def _mlp(self, name: str) -> GatedMlp:
        spec = self._config.layer
        wide = spec.intermediate_size
        rows = [(f"{name}.gate_proj", wide), (f"{name}.up_proj", wide)]
        gate_up = self._stacked(rows, spec.hidden_size, self.has(rows[0][0], "bias"))
        return GatedMlp(
            self._ops, gate_up, self._linear(f"{name}.down_proj", spec.hidden_size, wide)
        )

    def target_ids(self) -> Tensor | None:
        """The target id of each draft token id; None if the vocabularies are the same."""
        size, vocab_size = self._config.draft_vocab_size, self._config.spec.vocab_size
        if "d2t" not in self._names:
            if size != vocab_size:
                raise ModelError(
                    f"this eagle3 head drafts {size} of {vocab_size} tokens and has no tensor d2t "
                    "to map them; get the complete checkpoint again."
                )
            return None
        offsets = self._weights.read("d2t", (size,), dtype=torch.int64)
        ids = torch.arange(size, device=offsets.device) + offsets
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < size:
            raise ModelError(
                f"d2t of this eagle3 head does not lead from each of {size} tokens to another one "
                f"of the target's {vocab_size}; get the checkpoint again."
            )
        return ids

    def lm_head(self) -> Linear:
        shape = (self._config.draft_vocab_size, self._config.layer.hidden_size)
        return self._ops.linear(self._weights.read("lm_head.weight", shape), None)

    def _rotation(self, name: str, cos: Tensor, sin: Tensor) -> Rotation:
        spec = self._config.layer
        if not self.has(f"{name}.q_norm"):
            return Rotation(cos, sin)
        query_norm = self._read(f"{name}.q_norm.weight", spec.head_dim)
        key_norm = self._read(f"{name}.k_norm.weight", spec.head_dim)
        return Rotation(cos, sin, query_norm, key_norm, spec.norm_eps)

    def _linear(self, name: str, num_rows: int, width: int) -> Linear:
        return self._stacked([(name, num_rows)], width, self.has(name, "bias"))

    def _stacked(self, rows: list[tuple[str, int]], width: int, has_bias: bool) -> Linear:
        weight = torch.cat([self._read(f"{name}.weight", count, width) for name, count in rows])
        biases = [self._read(f"{name}.bias", count) for name, count in rows] if has_bias else []
        return self._ops.linear(weight, torch.cat(biases) if biases else None)

    def _stored(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._weights.read(self._stored(name), shape)
