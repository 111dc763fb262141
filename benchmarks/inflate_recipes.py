"""The shapes of enlarged models, and the recipes of their tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.workers.models.names import LLAMA
from outrider.workers.models.spec import ModelSpec

# Other scalings depend on the pair's index, so pairs that moved apart would rotate differently.
WIDENABLE_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an enlarged model; the vocabulary stays."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, "
                f"{self.num_kv_heads}."
            )


SHAPES = {
    "llama-3.1-8b": Shape(4096, 32, 32, 8, 128, 14336),
    "llama-3.2-1b": Shape(2048, 16, 32, 8, 64, 8192),
    "110m": Shape(768, 4, 12, 4, 64, 3072),
    "llama-3.1-70b": Shape(8192, 80, 64, 8, 128, 28672),
    "70b-slice": Shape(8192, 32, 64, 8, 128, 28672),
}


def fitted(shape: Shape, spec: ModelSpec) -> Shape:
    """The shape, enlarged where the model is larger."""
    kv_heads = max(shape.num_kv_heads, spec.num_kv_heads)
    group = max(shape.num_heads // shape.num_kv_heads, _group(spec))
    return dataclasses.replace(
        shape,
        hidden_size=max(shape.hidden_size, spec.hidden_size),
        num_layers=max(shape.num_layers, spec.num_layers),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=-(-shape.head_dim // spec.head_dim) * spec.head_dim,
        intermediate_size=max(shape.intermediate_size, spec.intermediate_size),
    )


def inflate_spec(spec: ModelSpec, shape: Shape) -> ModelSpec:
    """The enlarged model's spec; `ModelError` if its function would change."""
    if spec.family != "llama":
        raise ModelError(f"a {spec.family} model cannot be enlarged; only llama models can.")
    for field in dataclasses.fields(Shape):
        old, new = getattr(spec, field.name), getattr(shape, field.name)
        if field.name != "tied" and new < old:
            raise ModelError(f"{field.name} is {new} but the model has {old}; use at least {old}.")
    if shape.tied and not spec.tied:
        raise ModelError("the model's head differs from its embedding; use a shape with tied off.")
    inflated = dataclasses.replace(
        spec,
        **dataclasses.asdict(shape),
        embed_size=shape.hidden_size,
        windows=(0,) * shape.num_layers,
        attention_scale=shape.head_dim**-0.5,
        norm_eps=spec.norm_eps * spec.hidden_size / shape.hidden_size,
    )
    _check_heads(spec, inflated)
    return inflated


def _check_heads(old: ModelSpec, new: ModelSpec) -> None:
    if _group(new) < _group(old):
        raise ModelError(
            f"{_group(new)} query heads share a key head but in the model {_group(old)} do; "
            "use more query heads or fewer key heads."
        )
    if new.head_dim == old.head_dim:
        return
    if new.head_dim % old.head_dim:
        raise ModelError(
            f"head_dim is {new.head_dim}, not a multiple of the model's {old.head_dim}, so rotary "
            "frequencies would change."
        )
    if old.rope is None or old.rope.kind not in WIDENABLE_ROPES:
        raise ModelError(
            f"head_dim is {new.head_dim} but this model's rotary scaling depends on the size of "
            f"a head; keep it at {old.head_dim}."
        )


def _group(spec: ModelSpec) -> int:
    return spec.num_heads // spec.num_kv_heads


class Axis(NamedTuple):
    """A dimension of a tensor: its new size, and the new index of each old entry."""

    size: int
    places: Tensor  # int64 [old size]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is made: filled, cleared in part, then the old tensor copied to its places.

    `cleared` are rows whose entries in the old columns must come from the old tensor only. A new
    layer has no old tensor, hence no `old_name`.
    """

    axes: tuple[Axis, ...]
    fill: Literal["random", "zero", "norm"]
    scale: float = 1.0
    cleared: Tensor | None = None
    old_name: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)


def recipes_of(old: ModelSpec, new: ModelSpec) -> dict[str, Recipe]:
    """The recipe of every tensor of the enlarged model, grouped by layer."""
    hidden = Axis(new.hidden_size, torch.arange(old.hidden_size))
    table = (Axis(new.vocab_size, torch.arange(old.vocab_size)), hidden)
    norm = Recipe((hidden,), "norm", scale=(old.hidden_size / new.hidden_size) ** 0.5)
    embed, head = f"{LLAMA.embed}.weight", f"{LLAMA.head}.weight"
    final_norm = f"{LLAMA.final_norm}.weight"
    recipes = {
        embed: Recipe(table, "zero", old_name=embed),
        final_norm: dataclasses.replace(norm, old_name=final_norm),
    }
    if not new.tied:
        recipes[head] = Recipe(table, "random", old_name=embed if old.tied else head)
    layer = {f"{name}.weight": norm for name in LLAMA.norms}
    layer |= attention_recipes(old, new, hidden, hidden) | mlp_recipes(old, new, hidden)
    for index in range(new.num_layers):
        for module, recipe in layer.items():
            name = f"{LLAMA.layer(index)}.{module}"
            old_name = name if index < old.num_layers else None
            recipes[name] = dataclasses.replace(recipe, old_name=old_name)
    return recipes


def attention_recipes(
    old: ModelSpec, new: ModelSpec, read: Axis, hidden: Axis
) -> dict[str, Recipe]:
    """Recipes of attention that reads `read` and adds to `hidden`, which are equal in a decoder."""
    size, spread = new.head_dim, new.head_dim // old.head_dim
    first = torch.arange(old.head_dim // 2) * spread
    within = torch.cat([first, first + size // 2])  # a pair is elements j and j + head_dim / 2
    heads, kv_heads = torch.arange(old.num_heads), torch.arange(old.num_kv_heads)
    # Old groups start new ones, so a query head keeps its KV head.
    heads = heads // _group(old) * _group(new) + heads % _group(old)
    query = Axis(new.num_heads * size, (heads[:, None] * size + within).flatten())
    key = Axis(new.num_kv_heads * size, (kv_heads[:, None] * size + within).flatten())
    whole_heads = (heads[:, None] * size + torch.arange(size)).flatten()
    scale = old.attention_scale / new.attention_scale
    inputs = {
        LLAMA.query: Recipe((query, read), "random", scale, whole_heads),
        LLAMA.key: Recipe((key, read), "random"),
        LLAMA.value: Recipe((key, read), "random"),
    }
    out = {LLAMA.out: Recipe((hidden, query), "zero")}
    return _with_biases(inputs, old.qkv_bias) | _with_biases(out, old.out_bias)


def mlp_recipes(old: ModelSpec, new: ModelSpec, hidden: Axis) -> dict[str, Recipe]:
    inner = Axis(new.intermediate_size, torch.arange(old.intermediate_size))
    modules = {
        LLAMA.gate: Recipe((inner, hidden), "random"),
        LLAMA.up: Recipe((inner, hidden), "random"),
        LLAMA.down: Recipe((hidden, inner), "zero"),
    }
    return _with_biases(modules, old.mlp_bias)


def _with_biases(modules: dict[str, Recipe], has_bias: bool) -> dict[str, Recipe]:
    recipes = {f"{module}.weight": recipe for module, recipe in modules.items()}
    if has_bias:
        for module, recipe in modules.items():
            recipes[f"{module}.bias"] = dataclasses.replace(recipe, axes=recipe.axes[:1])
    return recipes
