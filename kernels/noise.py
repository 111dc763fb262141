"""Counter-based noise: the same for every process, device, batch and depth of speculation.

The noise of a token is a hash of (seed, stream, position, token id) and nothing else. Seed, stream
and position are folded into a 64-bit state, once a row, by a strong 64-bit finaliser; each token id
then passes two rounds of 32-bit mixing, each keyed by one half of that state. Integers are
identical everywhere; the floats made of them agree to a few ulp.

Seeds are unsigned 64-bit numbers; tensors hold them as int64 in two's complement.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from outrider.kernels.seeds import GOLDEN64, MULTIPLY64, signed64

_MASK32 = (1 << 32) - 1
_ROW_DOMAIN = 0x6F75747269646572  # separates row states from sample seeds
_TOKEN_STRIDE = 0x9E3779B1
_ROUND1 = (0x85EBCA6B, 0xC2B2AE35)
_ROUND2 = (0x7FEB352D, 0x846CA68B)
_STREAM_BITS = 3


class NoiseStream(IntEnum):
    """Independent noise streams for one position, by use."""

    SHARED = 0  # the target's sample; a draft uses the same noise to predict it
    DRAFT = 1  # a draft's own sample under rejection sampling
    ACCEPT = 2  # the coin of an acceptance test
    RESIDUAL = 3  # the sample after a rejection


def noise_bits(
    seeds: Tensor, streams: Tensor, positions: Tensor, num_tokens: int, first_id: int = 0
) -> Tensor:
    """int64 [n, num_tokens] of values in [0, 2^32) for the rows' int64 [n] keys and the tokens
    from `first_id` on."""
    last = first_id + num_tokens
    tokens = torch.arange(first_id, last, dtype=torch.int64, device=seeds.device)
    return _token_bits(_row_state(seeds, streams, positions).unsqueeze(-1), tokens)


def gumbel(
    seeds: Tensor, streams: Tensor, positions: Tensor, num_tokens: int, first_id: int = 0
) -> Tensor:
    """float32 [n, num_tokens] of standard Gumbel noise, always finite; see `noise_bits`.

    Large values decide an argmax, and they come from small u, where floating point is densest.
    """
    return _gumbel(noise_bits(seeds, streams, positions, num_tokens, first_id))


def gumbel_of(seeds: Tensor, streams: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """As `gumbel`, for the tokens [n, m] alone."""
    return _gumbel(_token_bits(_row_state(seeds, streams, positions).unsqueeze(-1), tokens))


def _gumbel(bits: Tensor) -> Tensor:
    return _unit_interval(bits).neg_().log1p_().neg_().log_().neg_().float()


def uniform(seeds: Tensor, streams: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
    """float64 in the open interval (0, 1) for each (broadcast) key.

    float64, because float32 would round the largest values to 1 and fail a test `u < 1`.
    """
    return _unit_interval(_token_bits(_row_state(seeds, streams, positions), indices))


def _unit_interval(bits: Tensor) -> Tensor:
    return bits.double().add_(0.5).mul_(2.0**-32)


def _row_state(seeds: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    place = ((positions.long() << _STREAM_BITS) | streams.long()) * signed64(GOLDEN64)
    return _mix64_tensor(_mix64_tensor(seeds ^ signed64(_ROW_DOMAIN)) + place)


def _token_bits(state: Tensor, tokens: Tensor) -> Tensor:
    low, high = state & _MASK32, _shift_right(state, 32)
    x = (tokens * _TOKEN_STRIDE + low) & _MASK32
    x = _mix32(x, 16, 13, _ROUND1)
    x = (x + high) & _MASK32
    return _mix32(x, 16, 15, _ROUND2)


def _mix32(x: Tensor, first: int, second: int, multipliers: tuple[int, int]) -> Tensor:
    x = ((x ^ (x >> first)) * multipliers[0]) & _MASK32
    x = ((x ^ (x >> second)) * multipliers[1]) & _MASK32
    return x ^ (x >> 16)


def _mix64_tensor(z: Tensor) -> Tensor:
    z = z + signed64(GOLDEN64)
    z = (z ^ _shift_right(z, 30)) * signed64(MULTIPLY64[0])
    z = (z ^ _shift_right(z, 27)) * signed64(MULTIPLY64[1])
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own `>>` copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
