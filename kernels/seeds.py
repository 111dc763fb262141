"""Seeds of samples: the part of the noise that needs no tensor."""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
MULTIPLY64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SAMPLE_DOMAIN = 0x73616D706C657321


def signed64(value: int) -> int:
    """The int64 that holds an unsigned 64-bit value's bits."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def sample_seed(seed: int, index: int) -> int:
    """The unsigned 64-bit seed of sample `index` of a request with `seed`."""
    return _mix64((_mix64((seed & MASK64) ^ _SAMPLE_DOMAIN) + index * GOLDEN64) & MASK64)


def _mix64(z: int) -> int:
    z = (z + GOLDEN64) & MASK64
    z = ((z ^ (z >> 30)) * MULTIPLY64[0]) & MASK64
    z = ((z ^ (z >> 27)) * MULTIPLY64[1]) & MASK64
    return z ^ (z >> 31)
