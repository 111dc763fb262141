"""Small heads with random weights, in the formats people have them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_checkpoint
from letters import letter_tokenizer
from safetensors.torch import save_file
from torch import Tensor

DEEP = "eagle3 of two layers"


def save_head(kind: str, folder: Path, target: Any, seed: int = 0) -> Path:
    """A head for this `transformers` model, in a folder of its own; of a kind, or `DEEP`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def norm(size: int) -> Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.2

    config, tensors = _WRITERS[kind](target.config, random, norm)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return folder


NUM_LETTERS = 30  # so few tokens that a head without sense is right now and then


def save_spelling(folder: Path, kind: str = "eagle3") -> None:
    """A target that spells in letters, and a head for it, as `target` and `head`."""
    target = save_checkpoint(folder / "target", vocab_size=NUM_LETTERS, num_hidden_layers=6)
    letter_tokenizer(NUM_LETTERS).save_pretrained(folder / "target")
    save_head(kind, folder / "head", target)


def _eagle3(config: Any, random: Any, norm: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    hidden, heads, kv_heads, head_dim = config.hidden_size, 4, 2, 16
    size = config.vocab_size - 2  # the last two are never guessed
    ids = torch.arange(size)
    known = ids.flip(0)
    query, key_value, wide = heads * head_dim, kv_heads * head_dim, 3 * hidden // 2
    layer = "midlayer"
    tensors = {
        "fc.weight": random(hidden, 3 * hidden),
        f"{layer}.input_layernorm.weight": norm(hidden),
        f"{layer}.hidden_norm.weight": norm(hidden),
        f"{layer}.post_attention_layernorm.weight": norm(hidden),
        f"{layer}.self_attn.q_proj.weight": random(query, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": random(key_value, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": random(key_value, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": random(hidden, query),
        f"{layer}.mlp.gate_proj.weight": random(wide, hidden),
        f"{layer}.mlp.up_proj.weight": random(wide, hidden),
        f"{layer}.mlp.down_proj.weight": random(hidden, wide),
        "norm.weight": norm(hidden),
        "lm_head.weight": random(size, hidden),
        "d2t": known - ids,
        "t2d": torch.arange(config.vocab_size) < size,
    }
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    return values, tensors


def _deep_eagle3(config: Any, random: Any, norm: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values, tensors = _eagle3(config, random, norm)
    for name, first in list(tensors.items()):
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            is_qkv = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            shape = (len(first), config.hidden_size) if is_qkv else first.shape
            own = norm(*shape) if len(shape) == 1 else random(*shape)
            tensors[name.replace("midlayer", "layers.1")] = own
    return values | {"num_hidden_layers": 2}, tensors


def _medusa(config: Any, random: Any, norm: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    hidden, count = config.hidden_size, 3
    tensors = {}
    for head in range(count):
        tensors[f"{head}.0.linear.weight"] = random(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = random(hidden)
        tensors[f"{head}.1.weight"] = random(config.vocab_size, hidden)
    values = {"medusa_num_heads": count, "medusa_num_layers": 1, "hidden_size": hidden}
    return values | {"vocab_size": config.vocab_size, "model_type": "medusa"}, tensors


def _mlp(config: Any, random: Any, norm: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    hidden, count, inner = config.hidden_size, 3, 48
    tensors = {}
    for level in range(count):
        own = f"speculator.{{}}.{level}"
        tensors[f"{own.format('emb')}.weight"] = random(config.vocab_size, inner)
        width = hidden if level == 0 else inner
        tensors[f"{own.format('proj')}.weight"] = random(inner, width)
        tensors[f"{own.format('head')}.weight"] = random(config.vocab_size, inner)
        tensors[f"{own.format('ln')}.weight"] = norm(inner)
        tensors[f"{own.format('ln')}.bias"] = random(inner)
    values = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "n_predict": count,
        "emb_dim": hidden,
        "inner_dim": inner,
        "tie_weights": False,
        "scale_input": True,
        "vocab_size": config.vocab_size,
    }
    return values, tensors


_WRITERS = {"eagle3": _eagle3, DEEP: _deep_eagle3, "medusa": _medusa, "mlp_speculator": _mlp}
