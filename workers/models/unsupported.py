"""Rejects unsupported kinds of checkpoints by name, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.catalog.families import FAMILIES
from outrider.errors import ModelError
from outrider.workers.weights.formats.registry import schemes_of

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise for the contents of a `config.json` unless it is a dense decoder of a known family with
    weights that are whole or quantized in a known way."""
    family = config.get("model_type")
    refuse_experts(str(family), max(_count(config.get(key)) for key in _EXPERT_KEYS))
    if family not in FAMILIES:
        raise ModelError(
            f"model_type is {family!r}, which is not supported; known are {', '.join(FAMILIES)}."
        )
    schemes_of(config)


def refuse_experts(family: str, num_experts: int) -> None:
    if num_experts > 1:
        raise ModelError(
            f"this {family} model is a mixture of {num_experts} experts, which is not supported; "
            f"take a dense one of {', '.join(FAMILIES)}."
        )


def _count(value: Any) -> int:
    return value if type(value) is int else 0


def refuse_adapter(folder: str, adapter: Mapping[str, Any]) -> None:
    """Raise for a folder that holds an `adapter_config.json` but no model."""
    kind, base = adapter.get("peft_type") or "PEFT", adapter.get("base_model_name_or_path")
    raise ModelError(
        f"{folder} holds a {kind} adapter for {base!r}, not a model, and adapters are not "
        "supported; merge it into that model's weights and serve the result."
    )
