"""The noise of `outrider.kernels.noise` inside kernels: the same integers, bit for bit.

The floats agree to a few units of 1e-6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.seeds import GOLDEN64, MULTIPLY64

_GOLDEN = tl.constexpr(GOLDEN64)
_MULTIPLY_1 = tl.constexpr(MULTIPLY64[0])
_MULTIPLY_2 = tl.constexpr(MULTIPLY64[1])
_ROW_DOMAIN = tl.constexpr(0x6F75747269646572)
_STREAM_BITS = tl.constexpr(3)
_TOKEN_STRIDE = tl.constexpr(0x9E3779B1)
_UNIT = tl.constexpr(2.0**-32)
_NUM_TERMS = tl.constexpr(12)  # of the series: the next one is below a float32's rounding


@triton.jit
def _mix64(z):
    z += _GOLDEN
    z = (z ^ (z >> 30)) * _MULTIPLY_1
    z = (z ^ (z >> 27)) * _MULTIPLY_2
    return z ^ (z >> 31)


@triton.jit
def row_state(seed, stream, position):
    """uint64: what the noise of a whole row hangs on."""
    place = ((position.to(tl.uint64) << _STREAM_BITS) | stream) * _GOLDEN
    return _mix64(_mix64(seed.to(tl.uint64) ^ _ROW_DOMAIN) + place)


@triton.jit
def token_bits(state, ids):
    """uint32: the noise of tokens `ids`, uniform over all integers."""
    x = ids.to(tl.uint32) * _TOKEN_STRIDE + state.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + (state >> 32).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _unit_interval(bits):
    return (bits.to(tl.float32) + 0.5) * _UNIT


@triton.jit
def _exponential_of_small(u):
    """-log1p(-u) = u + u^2 / 2 + u^3 / 3 + ... for u up to 1/4."""
    total = tl.full(u.shape, 1.0 / _NUM_TERMS, tl.float32)
    for i in tl.static_range(1, _NUM_TERMS):
        total = total * u + 1.0 / (_NUM_TERMS - i)
    return total * u


@triton.jit
def gumbel_of_bits(bits):
    """float32: -log(-log1p(-u)) with u = (bits + 1/2) / 2^32, always finite.

    Rounding 1 - u would lose most of a small u, hence the series; elsewhere 1 - u is made from the
    complement of the bits and never rounds to 0.
    """
    u = _unit_interval(bits)
    exponential = tl.where(u < 0.25, _exponential_of_small(u), -tl.log(_unit_interval(~bits)))
    return -tl.log(exponential)


@triton.jit
def gumbel(state, ids):
    """float32: standard Gumbel noise of tokens `ids` in the row of `state`."""
    return gumbel_of_bits(token_bits(state, ids))
