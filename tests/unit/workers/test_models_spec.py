"""Reading configurations, old and new, and the rotary tables made from them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, random_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import ModelError
from outrider.workers.models.rope import inverse_frequencies, rope_tables
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.models.spec import ModelSpec

LLAMA = VARIANTS["llama"][1] | {"model_type": "llama"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parameter_count_is_that_of_transformers(variant: str) -> None:
    model = random_model(variant)
    spec = ModelSpec.from_hf(json.loads(model.config.to_json_string(use_diff=True)))
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'bert'.*granite, llama, mistral, opt, qwen2, qwen3"):
        ModelSpec.from_hf({"model_type": "bert"})


def test_a_missing_size_is_named() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    with pytest.raises(ModelError, match="lacks 'intermediate_size'"):
        ModelSpec.from_hf(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'.*known are default"),
        (
            {"rope_parameters": {"rope_type": "linear", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"model_type": "opt", "activation_function": "tanh", "ffn_dim": 4}, "'tanh'"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": 4096, "num_key_value_heads": 1}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 4_000_000_000}, "num_hidden_layers"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings"),
        ({"max_position_embeddings": 2**32 - 1}, "max_position_embeddings"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e6}}, "max_position_embeddings, stretched,"),
        ({"rope_scaling": {"type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "divisors", "divisors": [math.nan] * 8}}, "a rope divisor"),
        ({"rope_scaling": {"type": "divisors", "divisors": [1.0] * 3}}, "3 rope divisors"),
        ({"rope_scaling": {"type": "divisors", "divisors": 1.0}}, "rope divisors"),
        ({"model_type": "granite", "logits_scaling": "x"}, "logits_scaling"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types",
        ),
        ({"model_type": "opt", "ffn_dim": 0}, "ffn_dim"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} (is|are|has|for) "):
        ModelSpec.from_hf(LLAMA | changes)


def test_a_number_that_is_null_is_missing() -> None:
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        ModelSpec.from_hf(LLAMA | {"hidden_size": None})
    assert ModelSpec.from_hf(LLAMA | {"rms_norm_eps": None}).norm_eps == 1e-6


@pytest.mark.parametrize("method", ["bitsandbytes", "mxfp4", "quark", "auto-round"])
def test_quantized_weights_are_refused_by_the_name_of_their_method(method: str) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_hf(config)
    assert str(caught.value) == (
        f"the checkpoint's weights are quantized by {method!r}, which is not read; take one "
        "quantized by compressed-tensors, fp8, modelopt, awq, gptq, the checkpoint it was made "
        "from, whose weights quantization='fp8' or 'int8' rounds to 8 bits when they are loaded, "
        "or a GGUF file."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "deepseek_v3", "n_routed_experts": 256},
        {"num_local_experts": 4},
    ],
)
def test_a_mixture_of_experts_is_refused_as_one(changes: dict[str, Any]) -> None:
    config = LLAMA | changes
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_hf(config)
    num_experts = list(changes.values())[-1]
    assert str(caught.value) == (
        f"this {config['model_type']} model is a mixture of {num_experts} experts, which is not "
        "supported; take a dense one of granite, llama, mistral, opt, qwen2, qwen3."
    )


def test_one_expert_is_none() -> None:
    assert ModelSpec.from_hf(LLAMA | {"num_local_experts": 0}) == ModelSpec.from_hf(LLAMA)


def test_old_and_new_spellings_of_rope_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert ModelSpec.from_hf(old) == ModelSpec.from_hf(new)
    rope = ModelSpec.from_hf(new).rope
    assert rope is not None and rope.theta == 5e5


def test_yarn_serves_the_stretched_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert ModelSpec.from_hf(LLAMA | {"rope_scaling": scaling}).max_position == 4096


@pytest.mark.parametrize(
    ("value", "expected"), [(2, (2,)), ([5, 6], (5, 6)), (None, ()), (0, (0,))]
)
def test_ending_ids_may_be_one_several_or_none(value: Any, expected: tuple[int, ...]) -> None:
    assert ModelSpec.from_hf(LLAMA | {"eos_token_id": value}).eos_ids == expected


def test_a_mistral_without_the_key_has_the_window_transformers_gives_it() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert ModelSpec.from_hf(mistral).windows == (4096, 4096)
    assert ModelSpec.from_hf(mistral | {"sliding_window": None}).windows == (0, 0)


def test_a_qwen_window_applies_only_when_switched_on() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert ModelSpec.from_hf(qwen).windows == (0, 0)
    assert ModelSpec.from_hf(qwen | {"use_sliding_window": True}).windows == (0, 8)
    named = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    assert ModelSpec.from_hf(qwen | named).windows == (8, 0)


@pytest.mark.parametrize("num_positions", [1024, 1500, 4096])
def test_dynamic_scaling_is_that_of_transformers_for_the_longest_sequence(
    num_positions: int,
) -> None:
    config = random_model("llama-dynamic").config
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=num_positions)
    rope = RopeSpec.from_hf(config.to_dict())
    found = inverse_frequencies(rope, config.head_dim, num_positions)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_dynamic_scaling_changes_nothing_within_the_trained_length() -> None:
    rope = RopeSpec(kind="dynamic", factor=4.0, original_max_position=1024)
    for length in (1, 1024):
        assert torch.equal(
            inverse_frequencies(rope, 16, length), inverse_frequencies(RopeSpec(), 16, length)
        )


def test_tables_are_float32_and_hold_the_attention_factor() -> None:
    cos, sin = rope_tables(RopeSpec(attention_factor=1.5), 8, 10)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (10, 4)
    torch.testing.assert_close(cos**2 + sin**2, torch.full((10, 4), 1.5**2))
