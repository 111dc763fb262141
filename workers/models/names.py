"""Tensor names of a decoder in Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Module names; a layer's are relative to `layer(i)`, each with a `.weight` and maybe a bias.

    `norms` are the two norms of a layer in the order they are applied. `gate` is empty for an MLP
    without a gate.
    """

    embed: str
    final_norm: str
    layers: str
    query: str
    key: str
    value: str
    out: str
    norms: tuple[str, str]
    gate: str
    up: str
    down: str
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    head: str = "lm_head"
    positions: str = "model.decoder.embed_positions"
    project_in: str = "model.decoder.project_in"
    project_out: str = "model.decoder.project_out"

    def layer(self, index: int) -> str:
        return f"{self.layers}.{index}"


LLAMA = Names(
    embed="model.embed_tokens",
    final_norm="model.norm",
    layers="model.layers",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    norms=("input_layernorm", "post_attention_layernorm"),
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

OPT = Names(
    embed="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    layers="model.decoder.layers",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.out_proj",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    gate="",
    up="fc1",
    down="fc2",
)


def names_of(family: str) -> Names:
    return OPT if family == "opt" else LLAMA
