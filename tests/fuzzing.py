"""Input that nobody meant to send, from valid input and a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The same bytes with some of them changed, left out, doubled or put elsewhere."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(5):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + rng.randint(1, 8)]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                found[at:at] = found[at : at + rng.randint(1, 32)]
            case _:
                del found[at:]
    return bytes(found)


_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**64, 1e308, -0.0, "", "\ud800", "x" * 5000, [], [[]], {}, [None],
    {"type": "image_url"}, "\x00", [2**40], {"a": {"b": []}}, "🙂" * 100,
)  # fmt: skip


def strange_values(
    rng: random.Random, valid: dict[str, Any], count: int
) -> Iterator[dict[str, Any]]:
    """JSON objects like the valid one, with one to three fields of another kind."""
    for _ in range(count):
        found = dict(valid)
        for _ in range(rng.randint(1, 3)):
            found[rng.choice(sorted(valid))] = rng.choice(_STRANGE)
        yield found
