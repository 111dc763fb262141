"""How a model turns by position, as its configuration says it; `rope.py` makes tables of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ModelError

ROPE_KINDS = ("default", "divisors", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of the rotary embedding.

    `original_max_position` is the length the model was trained at, before any stretching.
    `divisors`, one a frequency, are how a GGUF states any per-frequency scaling.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeSpec:
        """Accepts both `rope_parameters` and the older `rope_theta` with `rope_scaling`."""
        values = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = values.get("rope_type") or values.get("type") or "default"
        theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        if kind not in ROPE_KINDS:
            raise ModelError(
                f"rope_type is {kind!r}, which is not supported; known are {', '.join(ROPE_KINDS)}."
            )
        if kind == "default":
            return cls(theta=theta)
        if float(values.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelError("partial_rotary_factor is set; only whole heads can be rotated.")
        stated = int(config.get("max_position_embeddings", 2048))
        original = int(values.get("original_max_position_embeddings") or stated)
        factor = float(values.get("factor") or (stated / original if kind == "yarn" else 1.0))
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position=stated if kind == "dynamic" else original,
            low_freq_factor=float(values.get("low_freq_factor") or 1.0),
            high_freq_factor=float(values.get("high_freq_factor") or 4.0),
            beta_fast=float(values.get("beta_fast") or 32.0),
            beta_slow=float(values.get("beta_slow") or 1.0),
            truncate=bool(values.get("truncate", True)),
            attention_factor=_attention_factor(kind, factor, values),
            divisors=tuple(values.get("divisors") or ()),
        )


def _attention_factor(kind: str, factor: float, values: Mapping[str, Any]) -> float:
    """YaRN sharpens attention as it stretches; the factor scales both tables."""
    if kind != "yarn":
        return 1.0
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return sharpening(mscale) / sharpening(mscale_all_dim)
    return sharpening(1.0)
