"""The configuration of a product by shape and rows: from a tuned table, or else a rule.

The table may leave a product to the library; without an entry those of more than `MAX_SMALL_ROWS`
rows are.

`python -m outrider.benchmarks.gpu_tune` measures and writes the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from outrider.kernels.gpu.stream import MAX_SMALL_ROWS, rows_of_block

LinearKind = Literal["linear", "gate_up", "qkv"]

SHARED_BYTES = 220 << 10  # of a multiprocessor, for one program
_TABLE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Each program takes `features` of the output (or pairs of them), `depth` inputs a
    step, `stages` steps ahead; `splits` programs share one tile's depth."""

    features: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    lines: int = 0  # cache lines of each weight row fetched before the input is there
    rows: int = 0  # of a block, then `rest` more; 0: as many as there are, up to a limit
    rest: int = 0

    def within(self, stage_bytes: int) -> LinearConfig:
        """With no more stages of this size than shared memory holds."""
        max_stages = max(1, SHARED_BYTES // stage_bytes)
        return self if self.stages <= max_stages else replace(self, stages=max_stages)


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """The product is left to the library, its epilogue to a separate kernel.

    For some numbers of rows the library selects a slow kernel: then the product is padded to
    `rows`, or gets a bias (of zeros if there is none), for which the library has other kernels, or
    is computed `transposed`, features by rows.
    """

    rows: int = 0
    biased: bool = False
    transposed: bool = False


ProductConfig = LinearConfig | LibraryConfig

_forced: list[ProductConfig] = []


@contextmanager
def forced(config: ProductConfig) -> Iterator[None]:
    """Use this configuration for every product inside; fixed ones never use the library's."""
    _forced.append(config)
    try:
        yield
    finally:
        _forced.pop()


def linear_config(
    kind: LinearKind, num_features: int, depth: int, rows: int, is_8bit: bool = False
) -> LinearConfig:
    """The configuration of our kernels for few rows."""
    if _forced and isinstance(_forced[-1], LinearConfig):
        return _forced[-1]
    return _known_config(kind, num_features, depth, rows, is_8bit)


def product_config(kind: LinearKind, num_features: int, depth: int, num_rows: int) -> ProductConfig:
    """The configuration for any number of rows with 16-bit weights."""
    return _forced[-1] if _forced else _known_product(kind, num_features, depth, num_rows)


def table_key(
    kind: LinearKind, num_features: int, depth: int, rows: int, is_8bit: bool = False
) -> str:
    return f"{kind}/{num_features}x{depth}/{rows}{'/8bit' if is_8bit else ''}"


@cache
def _known_product(kind: LinearKind, num_features: int, depth: int, num_rows: int) -> ProductConfig:
    """The entry of the next size in the table; without one, the rule."""
    for rows in _known_sizes(kind, num_features, depth):
        if rows >= num_rows:
            return _entry(_table()[table_key(kind, num_features, depth, rows)])
    if num_rows > MAX_SMALL_ROWS:
        return LibraryConfig()
    return _default_config(kind, num_features, rows_of_block(num_rows), False)


def _known_sizes(kind: LinearKind, num_features: int, depth: int) -> list[int]:
    start = table_key(kind, num_features, depth, 0)[:-1]
    ends = [key.removeprefix(start) for key in _table() if key.startswith(start)]
    return sorted(int(end) for end in ends if end.isdigit())


def _entry(known: dict[str, int]) -> ProductConfig:
    if "library" in known:
        biased, transposed = (bool(known.get(name, 0)) for name in ("biased", "transposed"))
        return LibraryConfig(known.get("rows", 0), biased, transposed)
    return LinearConfig(**known)


@cache
def _known_config(
    kind: LinearKind, num_features: int, depth: int, rows: int, is_8bit: bool
) -> LinearConfig:
    """8-bit weights without an entry use that of 16-bit weights of the shape."""
    for key_8bit in (True, False) if is_8bit else (False,):
        known = _table().get(table_key(kind, num_features, depth, rows, key_8bit))
        config = None if known is None else _entry(known)
        if isinstance(config, LinearConfig) and not config.rows:
            return config
    return _default_config(kind, num_features, rows, is_8bit)


def _default_config(kind: LinearKind, num_features: int, rows: int, is_8bit: bool) -> LinearConfig:
    # Half the bytes a weight: twice as many in flight, where the rows leave room.
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
