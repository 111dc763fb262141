"""Translates a GGUF header into a Hugging Face `config.json`, and its tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.errors import ModelError
from outrider.workers.models.checks import BOUNDS, COUNT
from outrider.workers.models.unsupported import refuse_experts

# Converters store these with interleaved query and key rows, for llama.cpp's rotary layout.
INTERLEAVED = ("llama", "granite")
ARCHITECTURES = ("granite", "llama", "qwen2", "qwen3")
ROPE_DIVISORS = "rope_freqs.weight"

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Header fields, and the `config.json` keys whose bounds apply to them.
_CHECKED_AS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that is not a weight of the model."""
    base, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if base in _TOP:
        return f"{_TOP[base]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if block is None or block[2] not in _BLOCK:
        return None
    return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"


def hf_config(
    fields: Mapping[str, Any], tensor_names: set[str], divisors: list[float] | None
) -> dict[str, Any]:
    """`fields` are the header's, with the tokenizer's size as `num_tokens`; `divisors` are the
    values of the tensor `rope_freqs.weight`, if there is one."""
    architecture = fields.get("general.architecture")
    experts = f"{architecture}.expert_count"
    refuse_experts(str(architecture), COUNT.check(experts, fields.get(experts) or 0))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"general.architecture is {architecture!r}, which is not supported in GGUF files; "
            f"known are {', '.join(ARCHITECTURES)}."
        )
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in fields.items()
        if key.startswith(f"{architecture}.")
    }
    for key, checked_as in _CHECKED_AS.items():
        if key in own:
            BOUNDS[checked_as].check(f"{architecture}.{key}", own[key])
    try:
        return _config(str(architecture), own, fields, tensor_names, divisors)
    except KeyError as error:
        raise ModelError(
            f"the GGUF header lacks '{architecture}.{error.args[0]}'; convert the model again."
        ) from None


def _config(
    architecture: str,
    own: Mapping[str, Any],
    fields: Mapping[str, Any],
    tensor_names: set[str],
    divisors: list[float] | None,
) -> dict[str, Any]:
    num_heads = own["attention.head_count"]
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": own.get("attention.key_length", own["embedding_length"] // num_heads),
        "vocab_size": own.get("vocab_size") or fields["num_tokens"],
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_names,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "rope_parameters": _rope(own, divisors),
    }
    if architecture == "granite":
        config |= {
            "embedding_multiplier": own.get("embedding_scale", 1.0),
            "residual_multiplier": own.get("residual_scale", 1.0),
            "attention_multiplier": own.get("attention.scale", 1.0),
            "logits_scaling": own.get("logit_scale", 1.0),
        }
    return config


def _rope(own: Mapping[str, Any], divisors: list[float] | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": own.get("rope.freq_base", 10_000.0),
    }
    if divisors is not None:
        return values | {"rope_type": "divisors", "divisors": divisors}
    kind = own.get("rope.scaling.type", "none")
    if kind != "none":
        values |= {
            "rope_type": kind,
            "factor": own["rope.scaling.factor"],
            "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
            "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
        }
    return values
