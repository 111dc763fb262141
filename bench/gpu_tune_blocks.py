"""Ways to cut up products of more than 64 rows, for `outrider.bench.gpu_tune` to try."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from outrider.kernels.gpu.tuning import SHARED_BYTES, LibraryConfig, LinearConfig

_LINES = 2
_BLOCKS = [(rows, rest) for rows in (64, 128, 256) for rest in (0, 32, 64, 128) if rest < rows]
_MOST_BLOCKS = 4
_ROUND_ROWS = 128
_LEAST_BLOCK = 128  # rows, where there are several: each block reads all the weights
_MOST_PADDING = 1.35
_PROGRAMS = (90, 280)  # of a launch that keeps 132 multiprocessors busy, where splits can choose
_MOST_SUMS = 192  # registers of a thread


def row_blocks(num_rows: int) -> list[tuple[int, int]]:
    """Blocks that a pass fills well: for each number of them the tightest in one piece, and one in
    two pieces where that is tighter."""
    found: list[tuple[int, int]] = []
    for count in range(1, _MOST_BLOCKS + 1):
        least, most = -(-num_rows // count), _MOST_PADDING * num_rows / count
        fitting = sorted(
            (rows + rest, rest, rows)
            for rows, rest in _BLOCKS
            if max(least, _LEAST_BLOCK if count > 1 else 0) <= rows + rest <= most
        )
        whole = next((each for each in fitting if not each[1]), None)
        kept = dict.fromkeys(each for each in (*fitting[:1], whole) if each is not None)
        found += [(rows, rest) for _, rest, rows in kept]
    return found


def library_ways(num_rows: int) -> list[LibraryConfig]:
    """The library's product as it is, by its other kernels, and of a rounder number of rows."""
    ways = [LibraryConfig(), LibraryConfig(biased=True), LibraryConfig(turned=True)]
    rounder = -(-num_rows // _ROUND_ROWS) * _ROUND_ROWS
    return ways + [LibraryConfig(rounder)] * (rounder > num_rows)


def block_candidates(
    num_features: int, depth: int, is_pair: bool, num_rows: int, most_features: int
) -> Iterator[LinearConfig]:
    """`num_features` counts pairs once, as configurations do."""
    pair = 2 if is_pair else 1
    for (rows, rest), held, deep, warps in product(
        row_blocks(num_rows), (64, 128, 256), (64, 128), (4, 8)
    ):
        block = rows + rest
        count = -(-num_rows // block)
        stages = min(SHARED_BYTES // ((held + block) * deep * 2), 6)
        sums = held * block // (32 * warps)
        if (
            held > most_features * pair
            or stages < 3
            or not 48 <= sums <= (_MOST_SUMS if warps == 8 else 96)
        ):
            continue
        if deep > 64 and (block > 128 or stages < 4) or held == 64 and count * block > 128:
            continue
        tiles = -(-num_features * pair // held) * count
        splits = [
            parts
            for parts in (1, 2, 3, 4, 7, 8)
            if _PROGRAMS[0] <= tiles * parts <= _PROGRAMS[1] and depth % (deep * parts) == 0
        ]
        for parts in splits[:2] if tiles < _PROGRAMS[1] else [1]:
            yield LinearConfig(held // pair, deep, warps, stages, parts, _LINES, rows, rest)
