"""Small random checkpoints of every family, saved by `transformers`, and a way to run a decoder.

At the usual initializer_range of 0.02 such models emit one token forever and no comparison could
fail; 0.2 makes their logits depend on every token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from outrider.kernels.types import RaggedBatch
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache, bytes_per_block
from outrider.workers.weights.checkpoint import load_spec

VOCAB_SIZE = 320

_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GRANITE = _LLAMA | {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 5.0,
}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "init_std": 0.2,
    "word_embed_proj_dim": 64,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, **values}
    return {"rope_parameters": parameters}


# name -> (transformers class prefix, configuration)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "llama-tied": ("Llama", _LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", _LLAMA | {"head_dim": 32, "num_key_value_heads": 1}),
    "llama-linear": ("Llama", _LLAMA | _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _LLAMA | _rope("dynamic", factor=4.0)),
    "llama-llama3": (
        "Llama",
        _LLAMA
        | _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": (
        "Llama",
        _LLAMA | _rope("yarn", factor=4.0, original_max_position_embeddings=256),
    ),
    "llama-yarn-mscale": (
        "Llama",
        _LLAMA
        | _rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=128,
            mscale=0.7,
            mscale_all_dim=0.3,
            beta_fast=16.0,
            truncate=False,
        ),
    ),
    "mistral": ("Mistral", _LLAMA | {"sliding_window": None}),
    "mistral-window": ("Mistral", _LLAMA | {"sliding_window": 9}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen2-window": (
        "Qwen2",
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", _LLAMA | {"head_dim": 16}),
    "qwen3-biases": ("Qwen3", _LLAMA | {"head_dim": 32, "attention_bias": True}),
    "granite": ("Granite", _GRANITE),
    "granite-biases": (
        "Granite",
        _GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "opt": ("OPT", _OPT),
    "opt-350m": ("OPT", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-final-norm": ("OPT", _OPT | {"_remove_final_layer_norm": True}),
    "opt-bare": (
        "OPT",
        _OPT
        | {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
}
FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "granite", "opt", "opt-350m")


def random_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A `transformers` model of a variant with random weights, biases and norms included."""
    prefix, values = VARIANTS[variant]
    config = getattr(transformers, f"{prefix}Config")(**(values | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    _vary(model)
    return model


@torch.no_grad()
def _vary(model: Any) -> None:
    """Biases of 0 and norms of 1 would hide mistakes; a large bias would drown the tokens.

    Where the stream is normalised after each block, undamped blocks drown them as well.
    """
    is_post_norm = not getattr(model.config, "do_layer_norm_before", True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn_like(parameter) * 0.05)
        elif parameter.ndim == 1:
            parameter.copy_(1 + torch.randn_like(parameter) * 0.2)
        elif is_post_norm and ("out_proj" in name or "fc2" in name):
            parameter.mul_(0.3)


def save_checkpoint(folder: Path, variant: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Save `random_model` to `folder` and return it, as the reference to compare with."""
    shard_size = changes.pop("max_shard_size", "5GB")
    model = random_model(variant, seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


@torch.no_grad()
def shorten(target: Any, num_layers: int) -> Any:
    """A model of the target's first layers, with its embeddings, final norm and head."""
    config = type(target.config)(**(target.config.to_dict() | {"num_hidden_layers": num_layers}))
    short = type(target)(config).float().eval()
    short.load_state_dict(target.state_dict(), strict=False)
    return short


@torch.no_grad()
def damp(target: Any, first_layer: int, factor: float) -> None:
    for layer in target.model.layers[first_layer:]:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


@torch.no_grad()
def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """float32 [tokens, vocab] of one unpadded prompt."""
    logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0].float()
    return logits


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def kv_gb(num_tokens: int, *folders: Path, block_size: int) -> float:
    """Memory for so many tokens of models together."""
    per_block = sum(bytes_per_block(load_spec(f), block_size, torch.float32) for f in folders)
    return -(-num_tokens // block_size) * per_block / 2**30


class RaggedRun:
    """Feeds several prompts through a decoder in ragged passes over a scattered paged cache."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], block_size: int = 4):
        self._decoder = decoder
        self._prompts = prompts
        self._done = [0] * len(prompts)
        blocks_each = max(-(-len(prompt) // block_size) for prompt in prompts)
        num_blocks = blocks_each * len(prompts)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self._tables = order.reshape(len(prompts), blocks_each).to(torch.int32)
        self._kv = KVCache(
            decoder.spec, num_blocks, block_size, decoder.dtype, decoder.device, decoder.shard
        )

    def run(self, chunk: int) -> list[Tensor]:
        """Logits of every position of each prompt, at most `chunk` tokens of it a pass."""
        collected: list[list[Tensor]] = [[] for _ in self._prompts]
        while True:
            rows = [i for i, done in enumerate(self._done) if done < len(self._prompts[i])]
            if not rows:
                return [torch.cat(parts) for parts in collected]
            lens = [min(chunk, len(self._prompts[i]) - self._done[i]) for i in rows]
            for row, logits in zip(rows, self._step(rows, lens), strict=True):
                collected[row].append(logits)

    def _step(self, rows: list[int], lens: list[int]) -> tuple[Tensor, ...]:
        spans = [range(self._done[i], self._done[i] + n) for i, n in zip(rows, lens, strict=True)]
        token_ids = [self._prompts[i][p] for i, span in zip(rows, spans, strict=True) for p in span]
        device = self._decoder.device
        tile_size = self._decoder.tile_tokens(max(lens))
        batch = ragged_batch(spans, self._tables[rows], self._kv.block_size, tile_size, device)
        ids = torch.tensor(token_ids, device=device)
        hidden = self._decoder.forward(ids, batch, self._kv)
        for row, span in zip(rows, spans, strict=True):
            self._done[row] = span.stop
        rows_of_each: tuple[Tensor, ...] = self._decoder.logits(hidden).cpu().split(lens)
        return rows_of_each


def ragged_batch(
    spans: Sequence[range],
    tables: Tensor,
    block_size: int,
    tile_size: int,
    device: torch.device | str = "cpu",
) -> RaggedBatch:
    """The last positions of each sequence, whose blocks are a row of `tables`."""
    lens = [len(span) for span in spans]
    positions = torch.tensor([p for span in spans for p in span])
    owners = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lens))
    blocks = tables[owners, positions // block_size].long()
    batch = RaggedBatch(
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        cu_query_lens=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(lens),
        max_context_len=max(span.stop for span in spans),
        tiles=_tiles(spans, tile_size) if tile_size else None,
    )
    moved: dict[str, Any] = {
        field.name: value.to(device) if isinstance(value, Tensor) else value
        for field in dataclasses.fields(batch)
        for value in [getattr(batch, field.name)]
    }
    return RaggedBatch(**moved)


def _tiles(spans: Sequence[range], size: int) -> Tensor:
    tiles, first = [], 0
    for index, span in enumerate(spans):
        for at in range(0, len(span), size):
            tiles.append((first + at, min(size, len(span) - at), span.start + at, index))
        first += len(span)
    return torch.tensor(tiles, dtype=torch.int32)
