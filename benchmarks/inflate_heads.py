"""Enlarges a head with its target: the same drafts, at the cost of a real head's size.

The enlarged target's residual stream and final hidden state are the small one's padded with zeros,
so a head that reads no new dimension computes the same. As in a model, new dimensions of a state
stay zero, and new entries that cannot reach them are random.

A draft vocabulary is padded to the usual size: padding tokens get logits like any other and ids
above the target's vocabulary, which the proposer cuts off. So they are computed and never proposed.
Heads for the whole vocabulary keep it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.benchmarks.inflate import InflatedTensors, open_inflated
from outrider.benchmarks.inflate_recipes import (
    Axis,
    Recipe,
    Shape,
    attention_recipes,
    inflate_spec,
    mlp_recipes,
)
from outrider.checkpoints.files import read_json
from outrider.errors import ModelError
from outrider.kernels.types import Ops
from outrider.workers.heads.base import Head
from outrider.workers.heads.configs import (
    EAGLE3_LAYER,
    Eagle3Config,
    HeadConfig,
    MedusaConfig,
    MlpConfig,
)
from outrider.workers.heads.eagle3 import Eagle3Head
from outrider.workers.heads.formats import head_config, not_a_head
from outrider.workers.heads.medusa import MedusaHead
from outrider.workers.heads.mlp_speculator import MlpSpeculatorHead
from outrider.workers.heads.weights import HeadWeights, head_folder, open_weights
from outrider.workers.models.names import LLAMA
from outrider.workers.weights.checkpoint import checkpoint_folder, load_spec

_VOCABULARY = "d2t"
_FEATURE_NORM = re.compile(r"fc_norm\.\d+\.weight|aux_norm_(?:low|mid|high)\.weight")
_MLP_PART = re.compile(r"(?:speculator\.)?(emb|proj|head|ln)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The target's shape, also that of an EAGLE-3 head's layers, and the heads' own sizes: the
    usual EAGLE-3 head of an 8B model drafts 32,000 tokens, the usual MLP speculator is 3,072 wide.
    Larger sizes stay."""

    target: Shape
    draft_vocab_size: int = 32_000
    inner_dim: int = 3_072


class InflatedHead(InflatedTensors):
    """`HeadWeights` of the enlarged head."""

    def __init__(
        self,
        small: HeadWeights,
        recipes: Mapping[str, Recipe],
        vocabulary: Tensor | None,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__(small, recipes, dtype, seed)
        self._vocabulary = vocabulary  # the d2t of an EAGLE-3 head

    @property
    def names(self) -> Collection[str]:
        return [*self.shapes, *([] if self._vocabulary is None else [_VOCABULARY])]

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if name == _VOCABULARY and self._vocabulary is not None:
            return self._vocabulary.to(dtype or self.dtype)
        found = super().read(name, shape, rows, columns)
        return found if dtype is None else found.to(dtype)


def load_inflated_head(
    source: str | Path,
    target: str | Path,
    shape: HeadShape,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    max_position: int | None = None,
    seed: int = 0,
) -> Head:
    """`load_head` of the head in `source`, enlarged with `target` to `shape.target`; it is made on
    `device`."""
    folder, target_folder = head_folder(source, None), checkpoint_folder(target)
    small = open_weights(folder, torch.float32, device)
    spec = load_spec(target_folder)
    config = head_config(read_json(folder / "config.json"), small.names, spec)
    if config is None:
        raise not_a_head(source)
    config.spec.check_fits(spec)
    inflated, weights = inflate_head(config, small, shape, dtype, seed)
    if isinstance(inflated, MlpConfig):
        return MlpSpeculatorHead(inflated, weights, ops)
    if isinstance(inflated, MedusaConfig):
        return MedusaHead(inflated, weights, ops)
    assert isinstance(config, Eagle3Config)
    if config.layer.hidden_size != spec.hidden_size and not _has_embedding(small.names):
        raise ModelError(
            f"this eagle3 head is {config.layer.hidden_size} wide and uses the embedding of its "
            f"target, which is {spec.hidden_size} wide; get the complete checkpoint again."
        )

    def embedding(_: Eagle3Config, __: HeadWeights) -> Tensor:
        stored = open_inflated(target_folder, shape.target, dtype, device, seed)
        return stored.read(f"{LLAMA.embed}.weight", (spec.vocab_size, shape.target.hidden_size))

    positions = max_position or spec.max_position
    return Eagle3Head(inflated, weights, ops, positions, embedding)


def inflate_head(
    config: HeadConfig, small: HeadWeights, shape: HeadShape, dtype: torch.dtype, seed: int = 0
) -> tuple[HeadConfig, InflatedHead]:
    """The enlarged head's configuration and weights."""
    vocabulary = None
    inflated: HeadConfig
    if isinstance(config, Eagle3Config):
        inflated = _inflate_eagle3(config, small.names, shape)
        recipes = _eagle3_recipes(config, inflated, small.names)
        vocabulary = _padded_vocabulary(config, inflated, small)
    elif isinstance(config, MlpConfig):
        inner_dim = max(config.inner_dim, shape.inner_dim)
        spec = dataclasses.replace(
            config.spec, hidden_size=shape.target.hidden_size, state_size=inner_dim
        )
        inflated = dataclasses.replace(config, spec=spec, inner_dim=inner_dim)
        recipes = _mlp_recipes(config, inflated, small.names)
    else:
        width = shape.target.hidden_size
        spec = dataclasses.replace(config.spec, hidden_size=width, state_size=width)
        inflated = dataclasses.replace(config, spec=spec)
        recipes = _medusa_recipes(config, inflated, small.names)
    num_params = sum(math.prod(recipe.shape) for recipe in recipes.values())
    spec = dataclasses.replace(inflated.spec, num_params=num_params)
    weights = InflatedHead(small, recipes, vocabulary, dtype, seed)
    return dataclasses.replace(inflated, spec=spec), weights


# -- EAGLE-3 --------------------------------------------------------------------------------------


def _inflate_eagle3(config: Eagle3Config, names: Collection[str], shape: HeadShape) -> Eagle3Config:
    own = dataclasses.replace(shape.target, num_layers=config.layer.num_layers)
    layer = inflate_spec(config.layer, own)
    layer = dataclasses.replace(layer, windows=config.layer.windows)
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names):
        raise ModelError(
            "this eagle3 head has norms of queries and keys, whose means would change with the "
            "size of a head; enlarge another one."
        )
    new, old = shape.target.hidden_size, config.spec.hidden_size
    is_normed = config.norm_before_fc or config.fc_norm
    if is_normed and old * layer.hidden_size != new * config.layer.hidden_size:
        raise ModelError(
            f"this eagle3 head is {config.layer.hidden_size} wide and norms features that are "
            f"{old} wide, so no epsilon suits both once they are enlarged; enlarge another one."
        )
    size = config.draft_vocab_size
    if _VOCABULARY in names:
        size = max(size, shape.draft_vocab_size)
    spec = dataclasses.replace(
        config.spec,
        hidden_size=new,
        vocab_size=config.spec.vocab_size + size - config.draft_vocab_size,
        state_size=layer.hidden_size,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
    )
    return dataclasses.replace(config, spec=spec, layer=layer, draft_vocab_size=size)


def _padded_vocabulary(old: Eagle3Config, new: Eagle3Config, small: HeadWeights) -> Tensor | None:
    """Offsets from draft ids to target ids; padding maps behind the target's vocabulary."""
    if _VOCABULARY not in small.names:
        return None
    known = small.read(_VOCABULARY, (old.draft_vocab_size,), dtype=torch.int64)
    past_end = old.spec.vocab_size - old.draft_vocab_size
    padding = known.new_full((new.draft_vocab_size - old.draft_vocab_size,), past_end)
    return torch.cat([known, padding])


def _eagle3_recipes(
    old: Eagle3Config, new: Eagle3Config, names: Collection[str]
) -> dict[str, Recipe]:
    before, after = old.layer, new.layer
    hidden = _first(before.hidden_size, after.hidden_size)
    both = _repeated(before.hidden_size, after.hidden_size, 2)
    width = old.spec.hidden_size, new.spec.hidden_size
    features = _repeated(*width, max(len(old.spec.layers), 1))
    norm = _norm(hidden)
    # The names of the tensors decide which biases exist.
    biased = dataclasses.replace(before, qkv_bias=True, out_bias=True, mlp_bias=True)
    layer = attention_recipes(biased, after, hidden, hidden) | mlp_recipes(biased, after, hidden)
    layer |= dict.fromkeys((f"{name}.weight" for name in (*LLAMA.norms, "hidden_norm")), norm)
    first = layer | attention_recipes(biased, after, both, hidden)
    outside = {
        "fc.weight": _zero_where_new(hidden, features),
        "input_norm.weight": _norm(features),
        "norm.weight": norm,
        "embed_tokens.weight": Recipe((_same(before.vocab_size), hidden), "zero"),
        "lm_head.weight": Recipe(
            (_first(old.draft_vocab_size, new.draft_vocab_size), hidden), "random"
        ),
    }
    recipes = {}
    for name in names:
        bare = name.removeprefix("model.")
        found = outside.get(bare)
        if match := EAGLE3_LAYER.match(name):
            found = (layer if int(match[1] or 0) else first).get(EAGLE3_LAYER.sub("", name))
        if _FEATURE_NORM.fullmatch(bare):
            found = _norm(_first(*width))
        if found is not None:  # others are never read
            recipes[name] = dataclasses.replace(found, old_name=name)
    return recipes


def _has_embedding(names: Collection[str]) -> bool:
    return any(name.removeprefix("model.") == "embed_tokens.weight" for name in names)


# -- the others -----------------------------------------------------------------------------------


def _medusa_recipes(
    old: MedusaConfig, new: MedusaConfig, names: Collection[str]
) -> dict[str, Recipe]:
    hidden = _first(old.spec.hidden_size, new.spec.hidden_size)
    block = _zero_where_new(hidden, hidden)
    bias = Recipe((hidden,), "zero")
    head = Recipe((_same(old.spec.vocab_size), hidden), "random")
    recipes = {}
    for name in names:
        is_block = ".linear." in name or "blocks." in name
        found = (bias if name.endswith(".bias") else block) if is_block else head
        recipes[name] = dataclasses.replace(found, old_name=name)
    return recipes


def _mlp_recipes(old: MlpConfig, new: MlpConfig, names: Collection[str]) -> dict[str, Recipe]:
    """Sums are scaled up by as much as the mean square over more dimensions shrinks, so that the
    norm's epsilon, which no file states, keeps its weight. The token embedding's share grows by the
    same factor by itself."""
    inner = _first(old.inner_dim, new.inner_dim)
    features = _first(old.spec.hidden_size, new.spec.hidden_size)
    growth = (new.inner_dim / old.inner_dim) ** 0.5
    first = growth
    if old.scales_input:  # the features have a norm, whose epsilon is negligible
        first *= (old.spec.hidden_size / new.spec.hidden_size) ** 0.5
    table = _same(old.spec.vocab_size)
    parts = {
        ("emb", "weight"): Recipe((table, inner), "zero"),
        ("head", "weight"): Recipe((table, inner), "random"),
        ("ln", "weight"): Recipe((inner,), "norm", scale=1 / growth),
        ("ln", "bias"): Recipe((inner,), "zero"),
    }
    recipes = {}
    for name in names:
        match = _MLP_PART.fullmatch(name)
        if match is None:
            continue
        part, draft_index, what = match.groups()
        if part == "proj":
            found = _zero_where_new(inner, inner if int(draft_index) else features)
            found = dataclasses.replace(found, scale=growth if int(draft_index) else first)
        else:
            found = parts[part, what]
        recipes[name] = dataclasses.replace(found, old_name=name)
    return recipes


# -- dimensions -----------------------------------------------------------------------------------


def _same(size: int) -> Axis:
    return _first(size, size)


def _first(old: int, new: int) -> Axis:
    if new < old:
        raise ModelError(f"a head {old} wide cannot be made {new} wide; use at least {old}.")
    return Axis(new, torch.arange(old))


def _repeated(old: int, new: int, count: int) -> Axis:
    """`count` parts of the same size, concatenated."""
    places = torch.arange(count)[:, None] * new + torch.arange(old)
    return Axis(count * new, places.flatten())


def _norm(axis: Axis) -> Recipe:
    return Recipe((axis,), "norm", scale=(len(axis.places) / axis.size) ** 0.5)


def _zero_where_new(rows: Axis, columns: Axis) -> Recipe:
    """New outputs are zero while new inputs are."""
    return Recipe((rows, columns), "random", cleared=torch.arange(rows.size))
