"""An EAGLE-3 head: a layer over the target's features and the token behind, or some more.

It is trained as it is used: from every place it goes on for some steps from its own outputs. Slot
i is made of the features of token i and of token i + 1, and guesses token i + 2; a step further it
is made of its own output and of token i + 2, stands at position i + 1, and sees the true slots up
to i and its own since then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.loss import Guesses
from outrider.train.modules import (
    INITIAL_STD,
    DecoderLayer,
    LayerSizes,
    RmsNorm,
    Rotary,
    Slots,
    linear,
)
from outrider.train.packing import Batch, Seen
from outrider.train.settings import Eagle3Sizes
from outrider.train.students.base import Student, rope_entries
from outrider.train.teacher import Teacher
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.weights.files import read_json

_FURTHER = "layers."
_SILENT = ("o_proj.weight", "down_proj.weight")  # of a layer that adds nothing yet


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """Those whose input the head reads, where its configuration says nothing."""
    return (2, num_layers // 2, num_layers - 3)


def chosen_layers(num_layers: int) -> tuple[int, ...]:
    """As `feature_layers`, or what a target of few layers has."""
    usual = feature_layers(num_layers)
    if usual[0] < usual[1] < usual[2]:
        return usual
    if num_layers < 2:
        raise ConfigError(
            f"the target has {num_layers} layer, and an EAGLE-3 head reads three places of it; "
            "train another kind."
        )
    return (1, max(num_layers // 2, 1), num_layers - 1)


class _MidLayer(DecoderLayer):
    """Attention reads an embedding and a state side by side."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(replace(sizes, input_width=2 * sizes.width))
        self.hidden_norm = RmsNorm(sizes.width, sizes.eps)


class _FurtherLayer(DecoderLayer):
    """Adds nothing at first, so that a head begins as what fewer layers compute. What it adds has
    to become as large as a target's residual stream is, hence weights larger than usual."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        for name, parameter in self.named_parameters():
            if name.endswith(_SILENT):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=3 * INITIAL_STD)


class Eagle3Student(Student):
    """`counts` are how often the target has written each token; the most frequent are drafted."""

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
        self.further = nn.ModuleList(_FurtherLayer(layer) for _ in range(sizes.layers - 1))
        self.norm = RmsNorm(layer.width, layer.eps)
        ids = draft_tokens(counts, sizes.draft_vocab, spec.eos_ids)
        self.lm_head = nn.Linear(layer.width, len(ids), bias=False)
        theta = rope_entries(self._target)["rope_theta"]
        self._rotary = Rotary(RopeSpec(theta=theta), layer.head_dim, context + sizes.unroll)
        self.register_buffer("vocabulary", torch.from_numpy(ids), persistent=False)
        self.register_buffer("embedding", teacher.embedding.detach(), persistent=False)
        self._is_whole = len(ids) == len(teacher.head)
        with torch.no_grad():
            self.lm_head.weight.copy_(teacher.head.float().cpu()[ids])

    def guesses(self, batch: Batch, seen: Seen) -> Guesses:
        assert seen.features is not None
        shape = batch.ids.shape
        first, documents = self.midlayer, batch.documents
        hidden = self.fc(seen.features.view(*shape, -1)).float()
        slots = [Slots() for _ in range(self._sizes.layers)]
        states = []
        for step in range(self._sizes.unroll):
            following = batch.ids.roll(-1 - step, 1)
            token = self.embedding[following].float()
            read = torch.cat([first.input_layernorm(token), first.hidden_norm(hidden)], -1)
            where = documents.positions + step, self._rotary, documents
            hidden = first(hidden, *where, slots[0], read)
            for layer, own in zip(self.further, slots[1:], strict=True):
                hidden = layer(hidden, *where, own)
            states.append(self.norm(hidden).flatten(0, 1))
        levels = range(self._sizes.unroll)
        return Guesses(
            states,
            [self.lm_head.weight],
            [0] * len(states),
            [1 + level for level in levels],
            [self._sizes.decay**level for level in levels],
            None if self._is_whole else self.vocabulary,
        )

    def take_tokens(self, theirs: Mapping[str, Tensor]) -> None:
        offsets = theirs.get("d2t")
        if offsets is None or len(offsets) != len(self.vocabulary):
            return
        ids = offsets + torch.arange(len(offsets))
        if bool(((ids >= 0) & (ids < len(self.embedding))).all()):
            self.vocabulary.copy_(ids)

    def may_lack(self, name: str) -> bool:
        return name.startswith(_FURTHER)

    def tensors(self) -> dict[str, Tensor]:
        made = {_stored(name): value for name, value in self.state_dict().items()}
        if not self._is_whole:
            ids = self.vocabulary.cpu()
            known = torch.zeros(len(self.embedding), dtype=torch.bool)
            known[ids] = True
            made |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        return made

    def config(self) -> dict[str, Any]:
        spec = self._spec
        usual = feature_layers(spec.num_layers)
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
            **({} if self.layers == usual else stated),
        }


def _stored(name: str) -> str:
    """Further layers are counted from 1 on: the one they follow is the first, by whatever name."""
    part, _, rest = name.partition(".")
    if part != "further":
        return name
    number, _, what = rest.partition(".")
    return f"{_FURTHER}{int(number) + 1}.{what}"


def draft_tokens(
    counts: npt.NDArray[np.int64], most: int, always: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """The ids of the most frequent tokens, in ascending order; those that end a text are among
    them."""
    wanted = counts.copy()
    wanted[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-wanted, kind="stable")
    return np.sort(order[:most]).astype(np.int64)
