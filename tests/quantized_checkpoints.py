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
class Ints:
    """Whole numbers in words: a scale, and perhaps a zero point, for `group` inputs."""

    layout: str  # "compressed", "awq", "gptq" or "gptq_v2"
    bits: int = 4
    group: int = 32
    has_zeros: bool = True  # "compressed" leaves them out; others store the middle
    is_reordered: bool = False
    is_negative: bool = False  # scales and numbers have the other sign, as auto-round's may


@dataclass(frozen=True)
class Layer:
    """How a linear layer is quantized."""

    weight: str = "channel"  # or "tensor", "block"
    inputs: str = "token"  # or "whole", "group", "static"
    scale_name: str = "weight_scale"
    ints: Ints | None = None  # in place of all that


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


def _words(numbers: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """int32 words of numbers [n, m], side by side along m; `order` are those of a word."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_word))
    each = padded.view(padded.shape[0], -1, per_word)
    total = torch.zeros(each.shape[:2], dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        total += each[:, :, number] << (bits * place)
    return (total - ((total >> 31) << 32)).to(torch.int32)


def packed(weight: Tensor, form: Ints) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that are stored, and the weight they stand for."""
    (outputs, inputs), largest = weight.shape, 2**form.bits - 1
    groups = torch.arange(inputs) // form.group
    if form.is_reordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    count = int(groups.max()) + 1
    scales = torch.empty(outputs, count)
    zeros = torch.full((outputs, count), 2 ** (form.bits - 1))
    for g in range(count):
        own = weight[:, groups == g]
        if form.has_zeros:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, g] = ((high - low) / (largest - 1)).half().float()
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, largest).long()
        else:
            scales[:, g] = (own.abs().amax(1) / (largest // 2)).half().float()
    numbers = ((weight / scales[:, groups]).round().long() + zeros[:, groups]).clamp(0, largest)
    if form.is_negative:
        scales, numbers = -scales, 2 * zeros[:, groups] - numbers
        numbers = numbers.clamp(0, largest)
    meant = (numbers - zeros[:, groups]).float() * scales[:, groups]
    if form.layout == "compressed":
        made = {
            "weight_packed": _words(numbers, form.bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if form.has_zeros:
            made["weight_zero_point"] = _words(zeros.t(), form.bits).t().contiguous()
        if form.is_reordered:
            made["weight_g_idx"] = groups.to(torch.int32)
    elif form.layout == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        made = {
            "qweight": _words(numbers.t(), form.bits, order),
            "qzeros": _words(zeros.t(), form.bits, order),
            "scales": scales.t().half(),
        }
    else:
        stored = zeros - 1 if form.layout == "gptq" else zeros
        made = {
            "qweight": _words(numbers, form.bits).t(),
            "qzeros": _words(stored.t(), form.bits),
            "scales": scales.t().half(),
            "g_idx": groups.to(torch.int32),
        }
    return {name: tensor.contiguous() for name, tensor in made.items()}, meant


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
        if layer.ints is not None:
            del tensors[f"{name}.weight"]
            made, weight = packed(module.weight, layer.ints)
            module.weight.copy_(weight)
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in made.items()}
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


def packed_group(form: Ints, *targets: str) -> dict[str, Any]:
    """Of `config_groups`, without activations."""
    weights = {
        "num_bits": form.bits,
        "type": "int",
        "strategy": "group",
        "group_size": form.group,
        "symmetric": not form.has_zeros,
        "dynamic": False,
    }
    return {"targets": [*targets], "weights": weights, "input_activations": None}


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


def _packed(form: Ints) -> Form:
    config = compressed(packed_group(form, "Linear")) | {"format": "pack-quantized"}
    return Form(config, Layer(ints=form), _body)


def _awq(form: Ints) -> Form:
    config = {"quant_method": "awq", "bits": 4, "group_size": form.group, "version": "gemm"}
    return Form(config | {"zero_point": True}, Layer(ints=form), _body)


def _gptq(form: Ints) -> Form:
    config = {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": form.group,
        "desc_act": form.is_reordered,
        "sym": not form.has_zeros,
        "checkpoint_format": form.layout,
    }
    return Form(config, Layer(ints=form), _body)


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
INT_FORMS = {
    "compressed-tensors: 4 bits": _packed(Ints("compressed", has_zeros=False)),
    "compressed-tensors: 4 bits, zero points": _packed(Ints("compressed")),
    "compressed-tensors: 4 bits, small groups": _packed(Ints("compressed", group=16)),
    "compressed-tensors: 4 bits, in an order": _packed(
        Ints("compressed", has_zeros=False, is_reordered=True)
    ),
    "compressed-tensors: 8 bits": _packed(Ints("compressed", 8, has_zeros=False)),
    "compressed-tensors: 8 bits, zero points": _packed(Ints("compressed", 8)),
    "awq": _awq(Ints("awq")),
    "awq: one group": _awq(Ints("awq", group=128)),
    "gptq: negative scales": _gptq(Ints("gptq", has_zeros=False, is_negative=True)),
    "gptq": _gptq(Ints("gptq")),
    "gptq: symmetric": _gptq(Ints("gptq", has_zeros=False)),
    "gptq: in an order": _gptq(Ints("gptq", is_reordered=True)),
    "gptq: 8 bits": _gptq(Ints("gptq", 8)),
    "gptq_v2": _gptq(Ints("gptq_v2")),
}
ALL_FORMS = FORMS | INT_FORMS


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
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """A sum in another order may round an input to the next number of fp8, from where on the rest
    of that text differs: by less than fp8 does."""
    prompts = [random_prompt(length, seed=length) for length in lengths]

    def logits_of(group: ThreadGroup) -> list[Tensor]:
        shard = Shard() if num_ranks == 1 else Shard(group.rank, num_ranks, group.all_reduce)
        decoder = load_model(
            saved.folder, ops=make_ops(), dtype=torch.float32, device=device, shard=shard, **options
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
    assert errors[len(errors) // 4] < tolerance
    assert errors[-1] < 0.05
