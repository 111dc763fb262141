"""How a small-row product is cut up, per shape: what was found best on a chip, or else a rule.

`python -m outrider.bench.gpu_tune` finds it and writes the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

LinearKind = Literal["linear", "gate_up", "qkv"]

SHARED_BYTES = 220 << 10  # of a multiprocessor, for one program
_TABLE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Each program takes `features` of the output (for pairs: so many pairs), `depth` inputs a
    step, `stages` steps ahead; `splits` programs share one tile's depth."""

    features: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    lines: int = 0  # cache lines of each weight row fetched before the input is there

    def within(self, stage_bytes: int) -> LinearConfig:
        """With no more stages of this size than shared memory holds."""
        most = max(1, SHARED_BYTES // stage_bytes)
        return self if self.stages <= most else replace(self, stages=most)


_forced: list[LinearConfig] = []


@contextmanager
def forced(config: LinearConfig) -> Iterator[None]:
    """Inside, every product is cut up this way."""
    _forced.append(config)
    try:
        yield
    finally:
        _forced.pop()


def linear_config(
    kind: LinearKind, num_features: int, depth: int, rows: int, is_8bit: bool = False
) -> LinearConfig:
    if _forced:
        return _forced[-1]
    return _known_config(kind, num_features, depth, rows, is_8bit)


def table_key(
    kind: LinearKind, num_features: int, depth: int, rows: int, is_8bit: bool = False
) -> str:
    return f"{kind}/{num_features}x{depth}/{rows}{'/8bit' if is_8bit else ''}"


@cache
def _known_config(
    kind: LinearKind, num_features: int, depth: int, rows: int, is_8bit: bool
) -> LinearConfig:
    """8-bit weights of a shape that was tuned for others only are cut up like those."""
    for key_8bit in (True, False) if is_8bit else (False,):
        known = _table().get(table_key(kind, num_features, depth, rows, key_8bit))
        if known is not None:
            return LinearConfig(**known)
    return _default_config(kind, num_features, rows, is_8bit)


def _default_config(kind: LinearKind, num_features: int, rows: int, is_8bit: bool) -> LinearConfig:
    # Half the bytes a weight: twice as many are under way, where the rows leave them the room.
    depth = 256 if is_8bit and rows <= 16 else 128
    warps = 8 if rows > 64 else 4
    if kind == "qkv":
        return LinearConfig(features=16, depth=depth, warps=warps, stages=4)
    wide = num_features >= 64 * 96
    return LinearConfig(
        features=64 if wide else 32, depth=depth, warps=warps, stages=3 if rows > 16 else 4
    )


@cache
def _table() -> dict[str, dict[str, int]]:
    if not _TABLE.exists():
        return {}
    table: dict[str, dict[str, int]] = json.loads(_TABLE.read_text())
    return table
