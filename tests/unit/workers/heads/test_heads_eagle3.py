"""EAGLE-3 heads against the method in plain torch: dense attention, one sequence at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from c_kernels import skip_without_compiler
from checkpoints import save_checkpoint
from head_tools import (
    BACKENDS,
    CPU,
    Drafted,
    HeadRun,
    assert_same,
    load,
    random_weights,
    target_spec,
    write,
)
from torch import Tensor

from outrider.errors import ModelError
from outrider.workers.heads.base import Head
from outrider.workers.heads.kv import head_bytes_per_block, head_kv
from outrider.workers.weights.checkpoint import load_spec

pytestmark = pytest.mark.model
HIDDEN, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, DIM, WIDE = 32, 96, 40, 4, 2, 8, 48
LENGTHS, DEPTH = (1, 6, 13), 4
QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def weights_of(config: dict[str, Any], tensors: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """As the original implementation names them; `tensors` are those of later versions."""
    hidden, features = config["hidden_size"], config.get("target_hidden_size", HIDDEN)
    query, key_value = HEADS * DIM, KV_HEADS * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * features),
        "embed_tokens.weight": (VOCAB, hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (WIDE, hidden),
        "midlayer.mlp.up_proj.weight": (WIDE, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, WIDE),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    for number in range(1, config["num_hidden_layers"]):  # as decoders have them
        shapes |= {
            name.replace("midlayer", f"layers.{number}"): (
                (size[0], hidden) if name.endswith(QKV) else size
            )
            for name, size in shapes.items()
            if name.startswith("midlayer") and "hidden_norm" not in name
        }
    later: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.bias": (query,),
        "midlayer.self_attn.k_proj.bias": (key_value,),
        "midlayer.self_attn.v_proj.bias": (key_value,),
        "midlayer.self_attn.o_proj.bias": (hidden,),
        "midlayer.self_attn.q_norm.weight": (DIM,),
        "midlayer.self_attn.k_norm.weight": (DIM,),
        "input_norm.weight": (3 * features,),
        **{f"fc_norm.{index}.weight": (features,) for index in range(3)},
    }
    shapes |= {name: shape for name, shape in later.items() if name.startswith(tensors or " ")}
    weights = random_weights(shapes)
    if config["draft_vocab_size"] < VOCAB:
        chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
        chosen = chosen[: config["draft_vocab_size"]].sort().values
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return weights


class PlainEagle3:
    """The method as its authors describe it, for one sequence."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self._config = config
        self._weights = {
            name: value.double() if value.is_floating_point() else value
            for name, value in weights.items()
        }
        self._layers = ["midlayer"] + [
            f"layers.{number}" for number in range(1, config["num_hidden_layers"])
        ]
        self._keys: dict[str, list[Tensor]] = {layer: [] for layer in self._layers}
        self._values: dict[str, list[Tensor]] = {layer: [] for layer in self._layers}

    def draft(self, features: Tensor, ids: Tensor) -> Drafted:
        states = []
        for feature, token in zip(features.double(), ids, strict=True):
            states.append(self._run(self._fc(feature), int(token)))
        drafted, logits = [states[-1]], []
        for _ in range(DEPTH):
            logits.append(self._logits(drafted[-1]))
            if len(drafted) < DEPTH:
                drafted.append(self._run(drafted[-1], int(logits[-1].argmax())))
        return Drafted(torch.stack(states), torch.stack(drafted[1:]), torch.stack(logits))

    def _fc(self, feature: Tensor) -> Tensor:
        if "input_norm.weight" in self._weights:
            feature = self._norm("input_norm", feature)
        if "fc_norm.0.weight" in self._weights:
            parts = feature.chunk(3)
            feature = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
        return F.linear(feature, self._weights["fc.weight"])

    def _run(self, hidden: Tensor, token: int) -> Tensor:
        embedded = self._weights["embed_tokens.weight"][token]
        normed = self._norm("midlayer.hidden_norm", hidden)
        both = torch.cat((self._norm("midlayer.input_layernorm", embedded), normed))
        out = normed if self._config.get("norm_before_residual") else hidden
        out = self._layer("midlayer", out, both)
        for layer in self._layers[1:]:
            out = self._layer(layer, out, self._norm(f"{layer}.input_layernorm", out))
        return self._norm("norm", out) if self._config.get("norm_output") else out

    def _layer(self, layer: str, residual: Tensor, x: Tensor) -> Tensor:
        residual = residual + self._attend(layer, x)
        x = self._norm(f"{layer}.post_attention_layernorm", residual)
        gate = self._linear(f"{layer}.mlp.gate_proj", x)
        up = self._linear(f"{layer}.mlp.up_proj", x)
        return residual + self._linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)

    def _attend(self, layer: str, x: Tensor) -> Tensor:
        query, key, value = (
            self._linear(f"{layer}.self_attn.{name}_proj", x).view(-1, DIM) for name in "qkv"
        )
        if f"{layer}.self_attn.q_norm.weight" in self._weights:
            query = self._norm(f"{layer}.self_attn.q_norm", query)
            key = self._norm(f"{layer}.self_attn.k_norm", key)
        seen_keys, seen_values = self._keys[layer], self._values[layer]
        position = len(seen_keys)
        seen_keys.append(self._rotated(key, position))
        seen_values.append(value)
        types = self._config.get("layer_types", ["full_attention"] * len(self._layers))
        is_sliding = types[self._layers.index(layer)] == "sliding_attention"
        window = self._config["sliding_window"] if is_sliding else len(seen_keys)
        keys, values = (
            torch.stack(each[-window:], 1).repeat_interleave(HEADS // KV_HEADS, 0)
            for each in (seen_keys, seen_values)
        )
        scores = self._rotated(query, position)[:, None] @ keys.mT / math.sqrt(DIM)
        mixed = (scores.softmax(-1) @ values).flatten()
        return self._linear(f"{layer}.self_attn.o_proj", mixed)

    def _rotated(self, heads: Tensor, position: int) -> Tensor:
        theta = self._config.get("rope_theta", 10_000.0)
        angles = position * theta ** (-torch.arange(0, DIM, 2).double() / DIM)
        turn = torch.polar(torch.ones_like(angles), angles)
        first, second = heads.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def _logits(self, state: Tensor) -> Tensor:
        normed = state if self._config.get("norm_output") else self._norm("norm", state)
        logits = F.linear(normed, self._weights["lm_head.weight"])
        if "t2d" not in self._weights:
            return logits
        # Draft tokens are the marked target tokens in their order.
        return logits.new_full((VOCAB,), -torch.inf).masked_scatter_(self._weights["t2d"], logits)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._config["rms_norm_eps"])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        return F.linear(x, self._weights[f"{name}.weight"], bias)


def inputs(width: int = 3 * HIDDEN) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(11)
    features = [torch.randn(length, width, generator=generator) for length in LENGTHS]
    return features, [torch.randint(VOCAB, (n,), generator=generator) for n in LENGTHS]


def compare(
    head: Head,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    device: torch.device = CPU,
) -> list[Drafted]:
    features, ids = inputs(3 * config.get("target_hidden_size", HIDDEN))
    plain = [PlainEagle3(config, weights).draft(*each) for each in zip(features, ids, strict=True)]
    for chunk in (100, 5):
        run = HeadRun(head, len(LENGTHS), max(LENGTHS) + DEPTH, device)
        for ours, expected in zip(run.draft(features, ids, DEPTH, chunk), plain, strict=True):
            assert_same(ours, expected)
    return plain


VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "original": ({}, ()),
    "own rope": ({"rope_theta": 300.0}, ()),
    "full vocabulary": ({"draft_vocab_size": VOCAB}, ()),
    "norm before residual": ({"norm_before_residual": True}, ()),
    "norm output": ({"norm_output": True}, ()),
    "fc norms": ({"fc_norm": True}, ("fc_norm",)),
    "fc norms unstated": ({}, ("fc_norm",)),
    "norm before fc": ({"norm_before_fc": True}, ("input_norm",)),
    "norm before fc in eagle_config": (
        {"eagle_config": {"norm_before_fc": True}},
        ("input_norm",),
    ),
    "attention bias": (
        {"attention_bias": True},
        tuple(f"midlayer.self_attn.{name}_proj.bias" for name in "qkvo"),
    ),
    "query and key norms": (
        {"model_type": "qwen3", "head_dim": DIM},
        ("midlayer.self_attn.q_norm", "midlayer.self_attn.k_norm"),
    ),
    "a copied configuration's biases": ({"model_type": "qwen2"}, ()),
    "a wider target": ({"target_hidden_size": 48}, ()),
    "two layers": ({"num_hidden_layers": 2}, ()),
    "three layers, normed output": ({"num_hidden_layers": 3, "norm_output": True}, ()),
    "a window in the second layer": (
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 3,
        },
        (),
    ),
    "a window": ({"layer_types": ["sliding_attention"], "sliding_window": 3}, ()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_drafts_what_the_method_in_plain_torch_drafts(
    variant: str, backend: str | None, tmp_path: Path
) -> None:
    changes, tensors = VARIANTS[variant]
    config = CONFIG | changes
    weights = weights_of(config, tensors)
    target = target_spec(config.get("target_hidden_size", HIDDEN))
    head = load(write(tmp_path, config, weights), target, backend=backend)
    plain = compare(head, config, weights)
    assert len({token for each in plain for token in each.drafts}) >= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_on_a_gpu_drafts_what_the_method_in_plain_torch_drafts(
    variant: str, tmp_path: Path
) -> None:
    changes, tensors = VARIANTS[variant]
    config, device = CONFIG | changes, torch.device("cuda")
    weights = weights_of(config, tensors)
    target = target_spec(config.get("target_hidden_size", HIDDEN))
    head = load(write(tmp_path, config, weights), target, device=device)
    compare(head, config, weights, device)


def test_what_a_sequence_gets_is_the_same_to_the_bit_whoever_shares_its_passes(
    tmp_path: Path,
) -> None:
    skip_without_compiler()
    head = load(write(tmp_path, CONFIG, weights_of(CONFIG)), target_spec(), backend="c")
    features, ids = inputs()
    together = HeadRun(head, len(LENGTHS), max(LENGTHS) + DEPTH).draft(features, ids, DEPTH, 5)
    for feature, tokens, shared in zip(features, ids, together, strict=True):
        run = HeadRun(head, 1, max(LENGTHS) + DEPTH)
        (alone,) = run.draft([feature], [tokens], DEPTH, 100)
        for name in ("states", "draft_states", "logits"):
            assert torch.equal(getattr(alone, name), getattr(shared, name))


def test_a_pickled_checkpoint_gives_the_same_head(tmp_path: Path) -> None:
    weights = weights_of(CONFIG)
    folder = write(tmp_path, CONFIG, weights, file="pytorch_model.bin")
    compare(load(folder, target_spec()), CONFIG, weights)


def test_old_names_of_the_feature_norms_are_known(tmp_path: Path) -> None:
    weights = weights_of(CONFIG, ("fc_norm",))
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    renamed = {
        old[name.removesuffix(".weight")] + ".weight" if name.startswith("fc_norm") else name: value
        for name, value in weights.items()
    }
    compare(load(write(tmp_path, CONFIG, renamed), target_spec()), CONFIG, weights)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_names_of_speculators_and_a_prefix_are_known(num_layers: int, tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": num_layers}
    weights = weights_of(config)
    apart = ("lm_head", "d2t", "t2d")
    renamed = {
        name if name.startswith(apart) else "model." + name.replace("midlayer", "layers.0"): value
        for name, value in weights.items()
    }
    compare(load(write(tmp_path, config, renamed), target_spec()), config, weights)


def test_without_an_embedding_of_its_own_a_head_uses_the_targets(tmp_path: Path) -> None:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 6}
    model = save_checkpoint(tmp_path / "target", "llama", **sizes)
    weights = weights_of(CONFIG)
    del weights["embed_tokens.weight"]
    folder = write(tmp_path / "head", CONFIG, weights)
    head = load(folder, load_spec(tmp_path / "target"), tmp_path / "target")
    table = model.model.embed_tokens.weight.detach()
    compare(head, CONFIG, weights | {"embed_tokens.weight": table})


def test_a_targets_embedding_of_another_size_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"target_hidden_size": 48}
    weights = weights_of(config)
    del weights["embed_tokens.weight"]
    with pytest.raises(ModelError, match="size 48 does not fit its hidden size 32"):
        load(write(tmp_path, config, weights), target_spec(48))


def test_d2t_holds_offsets_and_tokens_it_does_not_reach_are_never_guessed(tmp_path: Path) -> None:
    config = CONFIG | {"draft_vocab_size": 3}
    weights = weights_of(config)
    weights["d2t"] = torch.tensor([4, 4, 93])
    head = load(write(tmp_path, config, weights), target_spec())
    logits = head.logits(torch.randn(2, HIDDEN), 0)
    assert logits.shape == (2, VOCAB)
    assert logits.dtype == torch.float32
    assert logits[0].isfinite().nonzero().flatten().tolist() == [4, 5, 95]


def test_ids_are_not_rounded_with_the_weights(tmp_path: Path) -> None:
    """In 16 bits there is no 257."""
    config = CONFIG | {"draft_vocab_size": 2, "vocab_size": 300}
    weights = weights_of(config)
    weights["embed_tokens.weight"] = torch.zeros(300, HIDDEN)
    weights["d2t"] = torch.tensor([257, 257])
    folder = write(tmp_path, config, weights)
    head = load(folder, target_spec(vocab_size=300), dtype=torch.bfloat16)
    logits = head.logits(torch.randn(1, HIDDEN).bfloat16(), 0)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [257, 258]


@pytest.mark.parametrize("d2t", [None, [0, 0, 96], [0, -1, 5]])
def test_a_vocabulary_that_leads_nowhere_is_refused(d2t: list[int] | None, tmp_path: Path) -> None:
    config = CONFIG | {"draft_vocab_size": 3}
    weights = weights_of(config)
    del weights["d2t"]
    if d2t is not None:
        weights["d2t"] = torch.tensor(d2t)
    with pytest.raises(ModelError, match="d2t"):
        load(write(tmp_path, config, weights), target_spec())


def test_positions_are_rotated_up_to_the_longest_sequence_of_the_target(tmp_path: Path) -> None:
    """The head's own `max_position_embeddings` is often that of its training."""
    config = CONFIG | {"max_position_embeddings": 4}
    weights = weights_of(config)
    compare(load(write(tmp_path, config, weights), target_spec()), config, weights)


@pytest.mark.parametrize("stated", [0, 1, 3, 10**9])
def test_another_number_of_layers_than_there_are_is_refused(stated: int, tmp_path: Path) -> None:
    weights = weights_of(CONFIG | {"num_hidden_layers": 2})
    folder = write(tmp_path, CONFIG | {"num_hidden_layers": stated}, weights)
    with pytest.raises(ModelError, match=f"head is {stated}, and there are tensors of 2"):
        load(folder, target_spec())


def test_every_layer_keeps_keys_and_values(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 2}
    spec = load(write(tmp_path, config, weights_of(config)), target_spec()).spec
    kv = head_kv(spec, 3, 4, torch.float32, CPU)
    assert kv is not None
    held = sum(each.nbytes for each in (*kv.keys, *kv.values))
    assert held == 3 * head_bytes_per_block(spec, 4, torch.float32)
    assert held == 3 * 4 * 2 * 2 * KV_HEADS * DIM * 4
