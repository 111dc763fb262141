"""Rotary position tables: default, linear, dynamic (NTK), llama3 and YaRN.

Tables are float32 for every model dtype, one row a position, and hold each frequency once;
the kernels apply them to the pairs (j, j + head_dim / 2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.workers.models.rope_spec import RopeSpec


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
    length it changes nothing, exactly as in `transformers` for any prompt within it. Scaling by
    each sequence's current length instead would make a cached key depend on when it was computed,
    and the text on batching.
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
    """Stretches long waves by `factor`, keeps short ones, blends between."""
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
