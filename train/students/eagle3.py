"""An EAGLE-3 head: one or more layers over the target's features and the next token.

Training unrolls it as drafting does, several steps from every position. Slot i reads the features
of token i and the embedding of token i + 1, and predicts token i + 2. The next step reads its own
output and token i + 2, has position i + 1, and attends to the sequence's slots up to i and to its
own draft steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outrider.checkpoints.files import read_json
from outrider.errors import ConfigError
from outrider.train.loss import DraftOutputs
from outrider.train.modules import (
    INITIAL_STD,
    DecoderLayer,
    DraftKv,
    LayerSizes,
    RmsNorm,
    Rotary,
    linear,
)
from outrider.train.packing import PackedBatch, TeacherStates
from outrider.train.settings import Eagle3Sizes
from outrider.train.students.base import Student, rope_entries
from outrider.train.teacher import Teacher
from outrider.workers.models.rope_spec import RopeSpec

_FURTHER = "layers."
_ZERO_AT_START = ("o_proj.weight", "down_proj.weight")  # so that a new layer adds nothing


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """The default layers whose inputs the head reads."""
    return (2, num_layers // 2, num_layers - 3)


def chosen_layers(num_layers: int) -> tuple[int, ...]:
    """`feature_layers`, or other ones for a target with few layers."""
    default_layers = feature_layers(num_layers)
    if default_layers[0] < default_layers[1] < default_layers[2]:
        return default_layers
    if num_layers < 2:
        raise ConfigError(
            f"the target has {num_layers} layer, and an EAGLE-3 head reads three places of it; "
            "train another kind."
        )
    return (1, max(num_layers // 2, 1), num_layers - 1)


class _MidLayer(DecoderLayer):
    """Attention reads an embedding concatenated with a state."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(replace(sizes, input_width=2 * sizes.width))
        self.hidden_norm = RmsNorm(sizes.width, sizes.eps)


class _ExtraLayer(DecoderLayer):
    """Adds nothing at first, so a deeper head starts as the shallower one. Its weights are larger
    than usual because its output must reach the scale of the target's residual stream."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        for name, parameter in self.named_parameters():
            if name.endswith(_ZERO_AT_START):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=3 * INITIAL_STD)


class Eagle3Student(Student):
    """`counts` are how often the target wrote each token; the draft vocabulary is the most
    frequent ones."""

    embedding: Tensor
    vocabulary: Tensor

    def __init__(
        self, sizes: Eagle3Sizes, teacher: Teacher, context: int, counts: npt.NDArray[np.int64]
    ) -> None:
        super().__init__()
        spec = teacher.spec
        self._sizes, self._spec = sizes, spec
        self._target = read_json(teacher.folder / "config.json")
        self.layers = chosen_layers(spec.num_layers)
        self._intermediate = sizes.intermediate or spec.intermediate_size
        layer = replace(LayerSizes.of(spec), intermediate=self._intermediate)
        self.fc = linear(len(self.layers) * spec.hidden_size, layer.width)
        self.midlayer = _MidLayer(layer)
        self.further = nn.ModuleList(_ExtraLayer(layer) for _ in range(sizes.layers - 1))
        self.norm = RmsNorm(layer.width, layer.eps)
        ids = draft_tokens(counts, sizes.draft_vocab, spec.eos_ids)
        self.lm_head = nn.Linear(layer.width, len(ids), bias=False)
        theta = rope_entries(self._target)["rope_theta"]
        self._rotary = Rotary(RopeSpec(theta=theta), layer.head_dim, context + sizes.unroll)
        self.register_buffer("vocabulary", torch.from_numpy(ids), persistent=False)
        self.register_buffer("embedding", teacher.embedding.detach(), persistent=False)
        self._has_full_vocabulary = len(ids) == len(teacher.head)
        with torch.no_grad():
            self.lm_head.weight.copy_(teacher.head.float().cpu()[ids])

    def draft_outputs(self, batch: PackedBatch, teacher_states: TeacherStates) -> DraftOutputs:
        assert teacher_states.features is not None
        shape = batch.ids.shape
        first, documents = self.midlayer, batch.documents
        hidden = self.fc(teacher_states.features.view(*shape, -1)).float()
        draft_kv = [DraftKv() for _ in range(self._sizes.layers)]
        states = []
        for step in range(self._sizes.unroll):
            next_tokens = batch.ids.roll(-1 - step, 1)
            token = self.embedding[next_tokens].float()
            read = torch.cat([first.input_layernorm(token), first.hidden_norm(hidden)], -1)
            where = documents.positions + step, self._rotary, documents
            hidden = first(hidden, *where, draft_kv[0], read)
            for layer, layer_kv in zip(self.further, draft_kv[1:], strict=True):
                hidden = layer(hidden, *where, layer_kv)
            states.append(self.norm(hidden).flatten(0, 1))
        draft_indices = range(self._sizes.unroll)
        return DraftOutputs(
            states,
            [self.lm_head.weight],
            [0] * len(states),
            [1 + draft_index for draft_index in draft_indices],
            [self._sizes.decay**draft_index for draft_index in draft_indices],
            None if self._has_full_vocabulary else self.vocabulary,
        )

    def take_draft_vocabulary(self, checkpoint: Mapping[str, Tensor]) -> None:
        offsets = checkpoint.get("d2t")
        if offsets is None or len(offsets) != len(self.vocabulary):
            return
        ids = offsets + torch.arange(len(offsets))
        if bool(((ids >= 0) & (ids < len(self.embedding))).all()):
            self.vocabulary.copy_(ids)

    def is_optional(self, name: str) -> bool:
        return name.startswith(_FURTHER)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {_stored(name): value for name, value in self.state_dict().items()}
        if not self._has_full_vocabulary:
            ids = self.vocabulary.cpu()
            known = torch.zeros(len(self.embedding), dtype=torch.bool)
            known[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        return tensors

    def config(self) -> dict[str, Any]:
        spec = self._spec
        default_layers = feature_layers(spec.num_layers)
        stated = {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": self._target.get("bos_token_id"),
            "draft_vocab_size": len(self.vocabulary),
            "eos_token_id": self._target.get("eos_token_id"),
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "hidden_size": spec.hidden_size,
            "intermediate_size": self._intermediate,
            "max_position_embeddings": spec.max_position,
            "num_attention_heads": spec.num_heads,
            "num_hidden_layers": self._sizes.layers,
            "num_key_value_heads": spec.num_kv_heads,
            "rms_norm_eps": spec.norm_eps,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": len(self.embedding),
            **rope_entries(self._target),
            **({} if self.layers == default_layers else stated),
        }


def _stored(name: str) -> str:
    """The checkpoint's name: extra layers are numbered from 1, behind the first one."""
    part, _, rest = name.partition(".")
    if part != "further":
        return name
    number, _, what = rest.partition(".")
    return f"{_FURTHER}{int(number) + 1}.{what}"


def draft_tokens(
    counts: npt.NDArray[np.int64], max_tokens: int, always: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """The ids of the most frequent tokens and of all in `always`, in ascending order."""
    ranked = counts.copy()
    ranked[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-ranked, kind="stable")
    return np.sort(order[:max_tokens]).astype(np.int64)
