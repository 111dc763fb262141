"""GGUF files of random models, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stored_weights import stored_weight

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    if base.startswith("model.layers."):
        _, _, index, part = base.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[base]}.{kind}"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def header(writer: Any, model: Any, architecture: str) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_stored(path: Path, model: Any, kind_of: Callable[[str], str]) -> None:
    """A llama of `model`'s shape: every matrix is random, of the kind that its name is given. The
    model gets their values."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    header(writer, model, "llama")
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor.numpy())
            continue
        kind, module = kind_of(name), name.rsplit(".", 2)[-2]
        stored, whole = stored_weight(kind, tuple(tensor.shape), seed)
        form = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name(name), stored.blocks.numpy(), raw_dtype=form)
        if module in heads:
            whole = _uninterleave(whole, heads[module])
        tensor.copy_(whole)
    close(writer)


def _uninterleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
