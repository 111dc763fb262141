"""Tile configurations of GEMMs with more than 64 rows, for `outrider.benchmarks.gpu_tune`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from outrider.kernels.gpu.tuning import SHARED_BYTES, LibraryConfig, LinearConfig

_LINES = 2
_BLOCKS = [(rows, rest) for rows in (64, 128, 256) for rest in (0, 32, 64, 128) if rest < rows]
_MAX_BLOCKS = 4
_ROUND_ROWS = 128
_MIN_BLOCK = 128  # rows, with several blocks: each reads all the weights
_MAX_PADDING = 1.35
_PROGRAMS = (90, 280)  # of a launch that keeps 132 multiprocessors busy, where splits can choose
_MAX_SUMS = 192  # registers of a thread


def row_blocks(num_rows: int) -> list[tuple[int, int]]:
    """Row blocks with little padding: for each count the tightest in one piece, and one in two
    pieces if that is tighter."""
    found: list[tuple[int, int]] = []
    for count in range(1, _MAX_BLOCKS + 1):
        minimum, maximum = -(-num_rows // count), _MAX_PADDING * num_rows / count
        fitting = sorted(
            (rows + rest, rest, rows)
            for rows, rest in _BLOCKS
            if max(minimum, _MIN_BLOCK if count > 1 else 0) <= rows + rest <= maximum
        )
        whole = next((each for each in fitting if not each[1]), None)
        kept = dict.fromkeys(each for each in (*fitting[:1], whole) if each is not None)
        found += [(rows, rest) for _, rest, rows in kept]
    return found


def library_configs(num_rows: int) -> list[LibraryConfig]:
    """The library's GEMM: as it is, with its other kernels, and with padded rows."""
    configs = [LibraryConfig(), LibraryConfig(biased=True), LibraryConfig(transposed=True)]
    rounder = -(-num_rows // _ROUND_ROWS) * _ROUND_ROWS
    return configs + [LibraryConfig(rounder)] * (rounder > num_rows)


def block_candidates(
    num_features: int, depth: int, is_pair: bool, num_rows: int, max_features: int
) -> Iterator[LinearConfig]:
    """`num_features` counts pairs once, as configurations do."""
    pair = 2 if is_pair else 1
    for (rows, rest), width, depth_tile, warps in product(
        row_blocks(num_rows), (64, 128, 256), (64, 128), (4, 8)
    ):
        block = rows + rest
        count = -(-num_rows // block)
        stages = min(SHARED_BYTES // ((width + block) * depth_tile * 2), 6)
        sums = width * block // (32 * warps)
        if (
            width > max_features * pair
            or stages < 3
            or not 48 <= sums <= (_MAX_SUMS if warps == 8 else 96)
        ):
            continue
        if depth_tile > 64 and (block > 128 or stages < 4) or width == 64 and count * block > 128:
            continue
        tiles = -(-num_features * pair // width) * count
        splits = [
            parts
            for parts in (1, 2, 3, 4, 7, 8)
            if _PROGRAMS[0] <= tiles * parts <= _PROGRAMS[1] and depth % (depth_tile * parts) == 0
        ]
        for parts in splits[:2] if tiles < _PROGRAMS[1] else [1]:
            yield LinearConfig(width // pair, depth_tile, warps, stages, parts, _LINES, rows, rest)
