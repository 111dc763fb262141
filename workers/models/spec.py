"""The specification of a model, parsed from a checkpoint's configuration.

A family is only a set of values: the decoder never branches on its name. Configurations are read as
plain JSON, so a checkpoint loads the same under any version of `transformers`; a missing key means
what it means there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.errors import ModelError
from outrider.workers.models.checks import BOUNDS, COUNT, checked
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.models.unsupported import refuse_unsupported


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and variants of one decoder-only transformer.

    `windows` holds one entry a layer, 0 meaning full attention. `embed_size` differs from
    `hidden_size` only if embeddings are projected (OPT 350m). Learned positions, if any, begin
    after `position_offset` unused rows of their table.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    windows: tuple[int, ...]
    embed_size: int
    attention_scale: float
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_affine: bool = True
    norm_after: bool = False
    final_norm: bool = True
    qk_norm: bool = False
    activation: Literal["silu", "relu", "gelu"] = "silu"
    gated: bool = True
    rope: RopeSpec | None = field(default_factory=RopeSpec)
    position_offset: int = 0
    num_learned_positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads is {self.num_heads}, not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}; the checkpoint's config.json is wrong."
            )
        if self.rope is not None:
            self.rope.check_head(self.head_dim)
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"layer_types has {len(self.windows)} entries and num_hidden_layers is "
                f"{self.num_layers}; the checkpoint's config.json is wrong."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read the contents of a Hugging Face `config.json`."""
        refuse_unsupported(config)
        config = checked(config)
        family = str(config["model_type"])
        try:
            return _opt(config) if family == "opt" else _llama_like(family, config)
        except KeyError as error:
            raise ModelError(
                f"config.json of this {family} model lacks {error.args[0]!r}; "
                "get the complete checkpoint again."
            ) from None

    def with_max_position(self, max_position: int) -> ModelSpec:
        """The same model for sequences of another maximum length."""
        learned = self.num_learned_positions - self.position_offset
        if self.rope is None and max_position > learned:
            raise ModelError(
                f"max_position is {max_position} but the model learned only {learned} positions; "
                f"use at most {learned}."
            )
        return dataclasses.replace(self, max_position=max_position)

    @property
    def num_linear_weights(self) -> int:
        """Number of weights in the layers' linears, without biases: those that are quantized."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        mlp = self.intermediate_size * (3 if self.gated else 2)
        return self.num_layers * self.hidden_size * (heads * self.head_dim + mlp)

    @property
    def num_params(self) -> int:
        """Number of weights; tied embeddings count once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norm_size = (
            0 if not self.norm_affine else self.hidden_size * (2 if self.norm == "layer" else 1)
        )
        attention = self.qkv_bias * (q_size + 2 * kv_size) + self.out_bias * self.hidden_size
        attention += self.qk_norm * 2 * self.head_dim
        wide = self.intermediate_size * (2 if self.gated else 1)
        mlp = self.mlp_bias * (wide + self.hidden_size)
        embeddings = self.vocab_size * self.embed_size * (1 if self.tied else 2)
        if self.embed_size != self.hidden_size:
            embeddings += 2 * self.embed_size * self.hidden_size
        embeddings += self.num_learned_positions * self.hidden_size
        return (
            self.num_linear_weights
            + self.num_layers * (attention + mlp + 2 * norm_size)
            + embeddings
            + (norm_size if self.final_norm else 0)
        )


def _llama_like(family: str, config: Mapping[str, Any]) -> ModelSpec:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"hidden_act is {activation!r}; {family} models are supported with 'silu' only."
        )
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (
        128 if family == "qwen3" else _head_dim(config["hidden_size"], num_heads)
    )
    attention_bias = bool(config.get("attention_bias", False))
    scale = config.get("attention_multiplier", 1.0) if family == "granite" else head_dim**-0.5
    multipliers = _granite_multipliers(config) if family == "granite" else {}
    has_bias_keys = family in ("llama", "granite")
    return ModelSpec(
        family=family,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position=_max_position(config),
        windows=_windows(family, config),
        embed_size=config["hidden_size"],
        attention_scale=float(scale),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qk_norm=family == "qwen3",
        rope=RopeSpec.from_hf(config),
        qkv_bias=family == "qwen2" or (attention_bias and family != "mistral"),
        out_bias=attention_bias and family in ("llama", "granite", "qwen3"),
        mlp_bias=has_bias_keys and bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=eos_ids(config),
        **multipliers,
    )


def _granite_multipliers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(config.get("embedding_multiplier", 1.0)),
        "residual_multiplier": float(config.get("residual_multiplier", 1.0)),
        "logits_divisor": float(config.get("logits_scaling", 1.0)),
    }


def _opt(config: Mapping[str, Any]) -> ModelSpec:
    activation = config.get("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise ModelError(
            f"activation_function is {activation!r}; opt models are supported with relu and gelu."
        )
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = _head_dim(hidden_size, num_heads)
    max_position = config.get("max_position_embeddings", 2048)
    norm_first = bool(config.get("do_layer_norm_before", True))
    has_bias = bool(config.get("enable_bias", True))
    return ModelSpec(
        family="opt",
        hidden_size=hidden_size,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config["ffn_dim"],
        vocab_size=config["vocab_size"],
        max_position=max_position,
        windows=(0,) * config["num_hidden_layers"],
        embed_size=config.get("word_embed_proj_dim") or hidden_size,
        attention_scale=head_dim**-0.5,
        norm_eps=1e-5,
        norm="layer",
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
        norm_after=not norm_first,
        final_norm=norm_first and not config.get("_remove_final_layer_norm", False),
        activation=activation,
        gated=False,
        rope=None,
        position_offset=2,
        num_learned_positions=max_position + 2,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        tied=bool(config.get("tie_word_embeddings", True)),
        eos_ids=eos_ids(config),
    )


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if num_heads > hidden_size:
        raise ModelError(
            f"num_attention_heads is {num_heads}, more than hidden_size {hidden_size}; the "
            "checkpoint's config.json is wrong."
        )
    return hidden_size // num_heads


def _max_position(config: Mapping[str, Any]) -> int:
    """YaRN checkpoints often state the length before stretching; the stretched one is served."""
    stated: int = config.get("max_position_embeddings", 2048)
    rope = RopeSpec.from_hf(config)
    if rope.kind != "yarn":
        return stated
    stretched = max(stated, int(rope.original_max_position * rope.factor))
    BOUNDS["max_position_embeddings"].check("max_position_embeddings, stretched,", stretched)
    return stretched


def _windows(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers: int = config["num_hidden_layers"]
    is_qwen = family in ("qwen2", "qwen3") and config.get("use_sliding_window", False)
    if family != "mistral" and not is_qwen:
        return (0,) * num_layers
    window: int = COUNT.check("sliding_window", config.get("sliding_window", 4096) or 0)
    if family == "mistral":
        return (window,) * num_layers
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if not isinstance(kinds, list):
        raise ModelError(
            f"layer_types is {kinds!r}, and has to be a list; the checkpoint's config.json is "
            "wrong."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of a configuration: absent, one id or a list. Ignores what is not an id."""
    value = config.get("eos_token_id")
    listed = value if isinstance(value, list | tuple) else (value,)
    return tuple(each for each in listed if type(each) is int and each >= 0)
