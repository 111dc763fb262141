"""Rotary position tables: default, linear, dynamic (NTK), llama3 and YaRN.

Tables are float32 whatever the model's dtype, one row a position, and hold each frequency once;
the kernels apply them to the pairs (j, j + head_dim / 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def rope_tables(
    spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [num_positions, head_dim / 2] each."""
    frequencies = inverse_frequencies(spec, head_dim, num_positions).to(device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor


def inverse_frequencies(spec: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """float32 [head_dim / 2].

    Dynamic scaling is fixed by `num_positions`, the longest sequence served: up to the trained
    length it changes nothing, exactly as in `transformers` for any prompt within it. Letting it
    follow each sequence's length instead would make a cached key depend on when it was computed,
    and so the text on how the work was batched.
    """
    theta = spec.theta
    if spec.kind == "dynamic" and num_positions > spec.original_max_position:
        stretch = spec.factor * num_positions / spec.original_max_position - (spec.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    if spec.kind == "divisors":
        return plain / torch.tensor(spec.divisors, dtype=torch.float32)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    share_kept = (spec.original_max_position / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * plain / spec.factor + share_kept * plain


def _yarn(spec: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Blend by dimension, between those turning `beta_fast` and `beta_slow` times in training."""

    def dimension(rotations: float) -> float:
        span = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = stretched.clamp(0.0, 1.0)
    return plain / spec.factor * stretched + plain * (1 - stretched)


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
