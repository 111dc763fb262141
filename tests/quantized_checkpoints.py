"""Small quantized checkpoints in the layouts that others write, and models that compute what they
mean: written from the formats' descriptions, sharing nothing with the readers they test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import RaggedRun, random_model, random_prompt, reference_logits, shorten
from rank_threads import ThreadGroup, run_ranks
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.kernels.types import Ops
from outrider.workers.models.shard import Shard
from outrider.workers.weights.loader import load_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
}
BLOCK = 16
_LARGEST = 448.0


@dataclass(frozen=True)
class Layer:
    """How a linear layer is quantized."""

    weight: str = "channel"  # or "tensor", "block"
    inputs: str = "token"  # or "whole", "group", "static"
    scale_name: str = "weight_scale"


@dataclass(frozen=True)
class Form:
    """A checkpoint's `quantization_config`, and what it means for each layer."""

    config: Mapping[str, Any]
    layer: Layer = field(default_factory=Layer)
    others: Callable[[str, Layer], Layer | None] = lambda name, layer: layer
    beside: Mapping[str, Any] | None = None  # hf_quant_config.json, in place of `config`

    @property
    def scalar(self) -> tuple[int, ...]:
        """The shape of a single scale."""
        return (1,) if self.config.get("quant_method") == "compressed-tensors" else ()

    def of(self, name: str) -> Layer | None:
        return self.others(name, self.layer)


def _fp8(value: Tensor) -> Tensor:
    return value.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def _quantized(weight: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """The values and scales that are stored, and the weight they stand for."""
    high, wide = {"tensor": weight.shape, "channel": (1, weight.shape[1])}.get(how, (BLOCK, BLOCK))
    scales = torch.empty(-(-weight.shape[0] // high), -(-weight.shape[1] // wide))
    values, meant = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[own].abs().max() / _LARGEST
            values[own] = _fp8(weight[own] / scales[i, j])
            meant[own] = values[own].float() * scales[i, j]
    return values, scales, meant


@dataclass
class Rounding:
    """Rounds the inputs of a layer before it is called."""

    how: str
    scale: float  # of "static"
    num_ranks: int = 1  # that have a part of the inputs each

    def __call__(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = given
        if self.how == "whole":
            return given
        if self.how == "static":
            return (_fp8(x / self.scale).float() * self.scale,)
        length = BLOCK if self.how == "group" else x.shape[-1] // self.num_ranks
        groups = x.view(*x.shape[:-1], -1, length)
        scales = groups.abs().amax(-1, keepdim=True) / _LARGEST
        return ((_fp8(groups / scales).float() * scales).flatten(-2),)


def _linears(model: Any) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}


@torch.no_grad()
def write(folder: Path, form: Form, seed: int = 0, num_layers: int = 2, **changes: Any) -> Any:
    """Save a random model in this form, and return the one that computes what it means."""
    whole = random_model("llama", seed, num_hidden_layers=num_layers, **(SIZES | changes))
    meant = shorten(whole, num_layers)
    tensors = {name: value.clone() for name, value in whole.state_dict().items()}
    roundings: list[Rounding] = []
    for name, module in _linears(meant).items():
        layer = form.of(name)
        if layer is None:
            continue
        values, scales, weight = _quantized(module.weight, layer.weight)
        if layer.weight == "tensor":
            scales = scales.reshape(form.scalar)
        module.weight.copy_(weight)
        tensors[f"{name}.weight"], tensors[f"{name}.{layer.scale_name}"] = values, scales
        scale = 0.01 + 0.001 * len(name)  # of static inputs; other layers have others
        if layer.inputs == "static":
            tensors[f"{name}.input_scale"] = torch.tensor(scale).reshape(form.scalar)
        rounding = Rounding(layer.inputs, scale)
        module.register_forward_pre_hook(rounding)
        if name.endswith(("o_proj", "down_proj")):
            roundings.append(rounding)
    meant.roundings_of_split_inputs = roundings
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(whole.config.to_json_string(use_diff=False))
    if form.beside is None:
        config["quantization_config"] = dict(form.config)
    else:
        (folder / "hf_quant_config.json").write_text(json.dumps(form.beside))
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def _numbers(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def group(weight: str, inputs: str, *targets: str) -> dict[str, Any]:
    """Of `config_groups`."""
    weights = _numbers(weight, dynamic=False)
    if weight == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    activations = {
        "whole": None,
        "token": _numbers("token", dynamic=True),
        "group": _numbers("group", dynamic=True, group_size=BLOCK),
        "static": _numbers("tensor", dynamic=False),
    }[inputs]
    return {"targets": [*targets], "weights": weights, "input_activations": activations}


def compressed(
    *groups: Mapping[str, Any], ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": dict(each) for i, each in enumerate(groups)},
        "ignore": [*ignore],
    }


def _body(name: str, layer: Layer) -> Layer | None:
    return None if name == "lm_head" else layer


def _mixed(name: str, layer: Layer) -> Layer | None:
    """Of the form "mixed": layers of QKV and of gate and up are quantized in different ways."""
    if name in ("lm_head", "model.layers.1.mlp.up_proj") or name.endswith("v_proj"):
        return None
    return Layer("tensor", "static") if name.endswith("k_proj") else layer


def _compressed(weight: str, inputs: str) -> Form:
    return Form(compressed(group(weight, inputs, "Linear")), Layer(weight, inputs), _body)


_OFFICIAL = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
_MODELOPT = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
FORMS = {
    "compressed-tensors: channels, tokens": _compressed("channel", "token"),
    "compressed-tensors: tensor, static": _compressed("tensor", "static"),
    "compressed-tensors: blocks, groups": _compressed("block", "group"),
    "compressed-tensors: channels, whole inputs": _compressed("channel", "whole"),
    "compressed-tensors: mixed": Form(
        compressed(
            group("channel", "token", "Linear"),
            group("tensor", "static", "re:.*k_proj$"),
            ignore=("re:.*\\.v_proj", "lm_head", "model.layers.1.mlp.up_proj"),
        ),
        others=_mixed,
    ),
    "compressed-tensors: the head too": Form(
        compressed(group("channel", "token", "Linear"), ignore=())
    ),
    "fp8: blocks": Form(
        _OFFICIAL | {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        Layer("block", "group", "weight_scale_inv"),
        _body,
    ),
    "fp8: dynamic": Form(_OFFICIAL | {"activation_scheme": "dynamic"}, Layer("tensor"), _body),
    "fp8: static": Form(
        _OFFICIAL | {"activation_scheme": "static"}, Layer("tensor", "static"), _body
    ),
    "modelopt: in config.json": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        Layer("tensor", "static"),
        _body,
    ),
    "modelopt: in a file of its own": Form({}, Layer("tensor", "static"), _body, _MODELOPT),
    "modelopt: channels, tokens": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, others=_body
    ),
}


@dataclass
class Saved:
    """A checkpoint, and the model that computes what it means."""

    folder: Path
    meant: Any


def assert_alike(
    saved: Saved,
    make_ops: Callable[[], Ops],
    device: Any = "cpu",
    lengths: tuple[int, ...] = (1, 9, 30),
    num_ranks: int = 1,
) -> None:
    """A sum in another order may round an input to the next number of fp8, from where on the rest
    of that text differs: by less than fp8 does."""
    prompts = [random_prompt(length, seed=length) for length in lengths]

    def logits_of(group: ThreadGroup) -> list[Tensor]:
        shard = Shard() if num_ranks == 1 else Shard(group.rank, num_ranks, group.all_reduce)
        decoder = load_model(
            saved.folder, ops=make_ops(), dtype=torch.float32, device=device, shard=shard
        )
        return RaggedRun(decoder, prompts).run(chunk=7)

    parts = run_ranks(num_ranks, logits_of)
    for rounding in saved.meant.roundings_of_split_inputs:
        rounding.num_ranks = num_ranks
    errors = []
    for index, prompt in enumerate(prompts):
        found = torch.cat([part[index] for part in parts], dim=-1)
        expected = reference_logits(saved.meant, prompt)
        errors += ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    errors.sort()
    assert errors[len(errors) // 4] < 1e-5
    assert errors[-1] < 0.05
