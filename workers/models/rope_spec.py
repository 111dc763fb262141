"""Rotary embedding parameters from a configuration; `rope.py` makes the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ModelError
from outrider.workers.models.checks import DIVISOR, checked

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
        if not isinstance(values, Mapping):
            raise ModelError(
                f"rope_parameters are {values!r}, and have to be an object; the checkpoint's "
                "config.json is wrong."
            )
        values = checked(values, "rope_parameters.")
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
            divisors=_divisors(values.get("divisors")) if kind == "divisors" else (),
        )

    def check_head(self, head_dim: int) -> None:
        """Raise `ModelError` unless heads of this size can be rotated."""
        if head_dim % 2:
            raise ModelError(
                f"head_dim is {head_dim}, which is odd, and only pairs can be rotated; the "
                "checkpoint's configuration is wrong."
            )
        if self.kind == "dynamic" and head_dim == 2:
            raise ModelError("head_dim is 2, which rope_type 'dynamic' cannot stretch.")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ModelError(
                f"low_freq_factor is {self.low_freq_factor}, not below high_freq_factor "
                f"{self.high_freq_factor}; the checkpoint's config.json is wrong."
            )
        if self.kind == "divisors" and len(self.divisors) != head_dim // 2:
            raise ModelError(
                f"there are {len(self.divisors)} rope divisors for heads of {head_dim}, which take "
                f"{head_dim // 2}; get the complete checkpoint again."
            )


def _divisors(values: Any) -> tuple[float, ...]:
    """`values` may be anything a file holds."""
    if not isinstance(values, list):
        raise ModelError(
            f"rope divisors are {values!r}, and have to be a list; get the complete checkpoint "
            "again."
        )
    return tuple(DIVISOR.check("a rope divisor", value) for value in values)


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
