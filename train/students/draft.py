"""A draft model: a small llama with the target's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.checkpoints.files import read_json
from outrider.train.loss import DraftOutputs
from outrider.train.modules import DecoderLayer, LayerSizes, RmsNorm, Rotary
from outrider.train.packing import PackedBatch, TeacherStates
from outrider.train.settings import DraftSizes
from outrider.train.students.base import Student, rope_entries
from outrider.train.teacher import Teacher
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.models.spec import ModelSpec

_EPS = 1e-5


class _Trunk(nn.Module):
    def __init__(self, sizes: LayerSizes, num_layers: int, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, sizes.width)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(num_layers))
        self.norm = RmsNorm(sizes.width, sizes.eps)


class DraftStudent(Student):
    """The embedding, tied to the head, starts as the principal components of the target's; or the
    whole model starts as the target with some of its layers."""

    is_model = True

    def __init__(self, sizes: DraftSizes, teacher: Teacher, context: int) -> None:
        super().__init__()
        self._spec = teacher.spec
        self._target = read_json(teacher.folder / "config.json")
        self._layer = layer = layer_sizes(sizes, teacher.spec)
        num_layers = len(sizes.target_layers) or sizes.layers
        self.model = _Trunk(layer, num_layers, len(teacher.head))
        theta = rope_entries(self._target)["rope_theta"]
        self._rotary = Rotary(RopeSpec(theta=theta), layer.head_dim, context)
        with torch.no_grad():
            if sizes.target_layers:
                self.model.load_state_dict(teacher.trunk(sizes.target_layers))
            else:
                parts = principal_components(teacher.embedding.float(), sizes.width)
                self.model.embed_tokens.weight.copy_(parts)

    def draft_outputs(self, batch: PackedBatch, teacher_states: TeacherStates) -> DraftOutputs:
        x = self.model.embed_tokens(batch.ids)
        documents = batch.documents
        for layer in self.model.layers:
            x = layer(x, documents.positions, self._rotary, documents)
        state = self.model.norm(x).flatten(0, 1)
        return DraftOutputs([state], [self.model.embed_tokens.weight], [0], [0], [1.0])

    def tensors(self) -> dict[str, Tensor]:
        return {f"model.{name}": value for name, value in self.model.state_dict().items()}

    def config(self) -> dict[str, Any]:
        layer = self._layer
        tokens = {
            name: self._target[name]
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
            if self._target.get(name) is not None
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "dtype": "bfloat16",
            "head_dim": layer.head_dim,
            "hidden_act": "silu",
            "hidden_size": layer.width,
            "intermediate_size": layer.intermediate,
            "max_position_embeddings": self._spec.max_position,
            "mlp_bias": False,
            "num_attention_heads": layer.heads,
            "num_hidden_layers": len(self.model.layers),
            "num_key_value_heads": layer.kv_heads,
            "rms_norm_eps": layer.eps,
            "tie_word_embeddings": True,
            "vocab_size": len(self.model.embed_tokens.weight),
            **rope_entries(self._target),
            **tokens,
        }


def layer_sizes(sizes: DraftSizes, target: ModelSpec) -> LayerSizes:
    if sizes.target_layers:
        return LayerSizes.of(target)
    return LayerSizes(
        width=sizes.width,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=sizes.width // sizes.heads,
        intermediate=sizes.intermediate,
        eps=_EPS,
        input_width=sizes.width,
    )


def principal_components(embedding: Tensor, width: int) -> Tensor:
    """The largest components [tokens, width] of [tokens, any], scaled for training."""
    _, axes = torch.linalg.eigh(embedding.T @ embedding)
    parts = embedding @ axes.flip(-1)[:, :width]
    missing = width - parts.shape[1]
    if missing > 0:
        noise = torch.randn(len(parts), missing, dtype=parts.dtype) * float(parts.std()) * 0.1
        parts = torch.cat([parts, noise.to(parts.device)], -1)
    scaled: Tensor = parts * (width**-0.5 / parts.pow(2).mean().sqrt().clamp_min(1e-12))
    return scaled
