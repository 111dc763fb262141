"""Parses the `config.json` of each kind of head; tensor names fill in what it omits.

A missing key means what it means to the software that wrote the file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.catalog.heads import HeadKind
from outrider.errors import ModelError
from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.spec import ModelSpec

# `speculators` omits from `transformer_layer_config` what equals the default of the model type.
_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "vocab_size": 32000},
    "qwen3": {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32},
}
_SHARED_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 32}
# The group is the layer's number; no number means the first layer.
EAGLE3_LAYER = re.compile(r"(?:model\.)?(?:midlayer|layers\.(\d+))\.")
_MAX_LAYERS = 16  # of an EAGLE-3 head: a draft model has no more
_MEDUSA_HEAD = re.compile(r"(?:medusa_heads?\.)?(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """`layer` has the sizes of the head's layers (usually one) and its hidden size."""

    spec: HeadSpec
    layer: ModelSpec
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(
        cls, config: Mapping[str, Any], names: Collection[str], target: ModelSpec
    ) -> Eagle3Config:
        layer = _eagle3_layer(config, names)
        own = layer.hidden_size
        hidden_size = int(config.get("target_hidden_size") or own)
        layers = _eagle3_layers(config, target)
        draft_vocab_size = int(config.get("draft_vocab_size") or layer.vocab_size)
        inside = _section(config, "eagle_config")
        bare = {name.removeprefix("model.") for name in names}

        def flag(name: str, tensors: tuple[str, ...] = ()) -> bool:
            """As stated, else whether the tensors it needs exist."""
            stated = inside.get(name, config.get(name))
            if stated is not None:
                return bool(stated)
            return not bare.isdisjoint(tensors)

        fc = own * hidden_size * len(layers)
        shares_embedding = bool(bare) and "embed_tokens.weight" not in bare  # the target's
        num_embedded = 0 if shares_embedding else layer.vocab_size
        vocabularies = own * (num_embedded + draft_vocab_size)
        # The first layer's QKV projections are twice as wide as in a decoder.
        wider = own * layer.head_dim * (layer.num_heads + 2 * layer.num_kv_heads)
        spec = HeadSpec(
            kind=HeadKind.EAGLE3,
            hidden_size=hidden_size,
            vocab_size=layer.vocab_size,
            layers=layers,
            state_size=own,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            num_own_layers=layer.num_layers,
            num_params=fc + layer.num_linear_weights + wider + vocabularies,
            made_for=_verifier(config),
        )
        return cls(
            spec=spec,
            layer=layer,
            draft_vocab_size=draft_vocab_size,
            norm_before_residual=flag("norm_before_residual"),
            norm_before_fc=flag("norm_before_fc", ("input_norm.weight",)),
            fc_norm=flag("fc_norm", ("fc_norm.0.weight", "aux_norm_low.weight")),
            norm_output=flag("norm_output"),
        )


@dataclass(frozen=True, slots=True)
class MlpConfig:
    spec: HeadSpec
    num_levels: int
    inner_dim: int
    is_tied: bool
    scales_input: bool

    @classmethod
    def read(
        cls, config: Mapping[str, Any], names: Collection[str], target: ModelSpec
    ) -> MlpConfig:
        del names
        emb_dim = int(config.get("emb_dim", config.get("hidden_size", 4096)))
        inner_dim = int(config.get("inner_dim") or emb_dim)
        num_levels = int(config.get("n_predict", 3))
        vocab_size = int(config.get("vocab_size", 32000))
        is_tied = bool(config.get("tie_weights", False))
        num_tables = 1 if is_tied else num_levels
        later = min(num_levels - 1, 1) if is_tied else num_levels - 1
        spec = HeadSpec(
            kind=HeadKind.MLP,
            hidden_size=emb_dim,
            vocab_size=vocab_size,
            state_size=inner_dim,
            max_depth=num_levels,
            num_params=2 * num_tables * inner_dim * (vocab_size + 1)
            + inner_dim * (emb_dim + later * inner_dim),
        )
        return cls(spec, num_levels, inner_dim, is_tied, bool(config.get("scale_input", False)))


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    spec: HeadSpec
    num_heads: int
    num_blocks: int

    @classmethod
    def read(
        cls, config: Mapping[str, Any], names: Collection[str], target: ModelSpec
    ) -> MedusaConfig:
        """Old configurations state neither sizes nor the right number of heads: tensors are counted
        instead."""
        is_own = config.get("model_type") == "medusa"
        vocab_size = int(config.get("vocab_size", target.vocab_size))
        truncated = config.get("truncated_vocab_size")
        if truncated is not None and int(truncated) < vocab_size:
            raise ModelError(
                f"truncated_vocab_size of this medusa head is {truncated}, and heads for a part of "
                f"the {vocab_size} tokens are not supported; take one for all of them."
            )
        found = [match for name in names if (match := _MEDUSA_HEAD.match(name))]
        counted = max((int(match[1]) + 1 for match in found), default=0)
        stated = config.get("medusa_num_heads") or (config.get("num_heads") if is_own else None)
        num_heads = max(int(stated or 0), counted) or 5
        blocks = config.get("medusa_num_layers") or (
            config.get("num_hidden_layers") if is_own else None
        )
        num_blocks = int(blocks or 1)
        hidden_size = int(config.get("hidden_size", target.hidden_size))
        each = hidden_size * (num_blocks * (hidden_size + 1) + vocab_size)
        spec = HeadSpec(
            kind=HeadKind.MEDUSA,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            state_size=hidden_size,
            max_depth=num_heads,
            num_params=num_heads * each,
            made_for=str(config.get("base_model_name_or_path") or ""),
        )
        return cls(spec, num_heads, num_blocks)


HeadConfig = Eagle3Config | MlpConfig | MedusaConfig
READERS: dict[HeadKind, type[Eagle3Config] | type[MlpConfig] | type[MedusaConfig]] = {
    HeadKind.EAGLE3: Eagle3Config,
    HeadKind.MLP: MlpConfig,
    HeadKind.MEDUSA: MedusaConfig,
}


def _eagle3_layer(config: Mapping[str, Any], names: Collection[str]) -> ModelSpec:
    nested = config.get("transformer_layer_config")
    if isinstance(nested, Mapping):
        kind = str(nested.get("model_type", "qwen3"))
        layer = {**_SHARED_DEFAULTS, **_LAYER_DEFAULTS.get(kind, {}), "model_type": kind, **nested}
    else:
        layer = {"model_type": "llama", **config}
    num_layers = int(layer.get("num_hidden_layers", 1))
    found = {int(match[1] or 0) for name in names if (match := EAGLE3_LAYER.match(name))}
    if not 1 <= num_layers <= _MAX_LAYERS or (names and len(found) != num_layers):
        raise ModelError(
            f"num_hidden_layers of this eagle3 head is {num_layers}, and there are tensors of "
            f"{len(found)}; state as many as there are, from 1 to {_MAX_LAYERS}."
        )
    if not _section(config, "eagle_config").get("use_aux_hidden_state", True):
        raise ModelError(
            "use_aux_hidden_state of this eagle3 head is false, and heads that read no layers of "
            "the target are not supported; take one that does."
        )
    # The families' own rules for windows apply to deeper models.
    own = {"num_hidden_layers": num_layers, "layer_types": None, "use_sliding_window": False}
    spec = ModelSpec.from_hf({**layer, **own})
    types, window = layer.get("layer_types"), int(layer.get("sliding_window") or 0)
    if not isinstance(types, list) or len(types) != num_layers:
        return dataclasses.replace(spec, windows=(0,) * num_layers)
    windows = tuple(window if each == "sliding_attention" else 0 for each in types)
    return dataclasses.replace(spec, windows=windows)


def _eagle3_layers(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """The target layers whose inputs are read; by default as in EAGLE, vLLM and SGLang.

    There are two conventions. The top-level key is vLLM's and `speculators`': it lists layers by
    their input, and so does `layer_ids` inside `eagle_config`. The same key inside `eagle_config`
    is SGLang's and its trainer's: it lists layers by their output, which is the input of the next
    layer. All of them concatenate in the order of the layers, however these are listed.
    """
    key, num_layers = "eagle_aux_hidden_state_layer_ids", target.num_layers
    inside = _section(config, "eagle_config")
    entered = config.get(key) or inside.get("layer_ids") or ()
    stated = [int(layer) for layer in entered] or [
        int(layer) + 1 for layer in inside.get(key) or ()
    ]
    layers = tuple(sorted(stated)) or (2, num_layers // 2, num_layers - 3)
    if min(layers) < 0:
        raise ModelError(
            f"this eagle3 head reads the inputs of layers {list(layers)} of its target, which has "
            f"{num_layers}; state others as {key} in its config.json."
        )
    return layers


def _verifier(config: Mapping[str, Any]) -> str:
    verifier = _section(_section(config, "speculators_config"), "verifier")
    return str(verifier.get("name_or_path") or "")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
