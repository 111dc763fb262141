"""Which part of a model one tensor-parallel rank holds.

A rank is the same decoder with smaller sizes. Splits may be uneven, so any number of ranks up to
the number of attention heads works: no head is padded, and a key/value head is held by several
ranks only where there are more ranks than such heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import ModelError
from outrider.workers.models.spec import ModelSpec

if TYPE_CHECKING:  # models are checked without torch, whose import takes seconds
    from torch import Tensor


def _single_rank_reduce(partial: Tensor) -> Tensor:
    return partial


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group; `reduce` sums a tensor over the group.

    `is_repeatable`: `reduce` is an operation of the kernels, so passes with it can be replayed; see
    `Ops.captured`.
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], Tensor] = _single_rank_reduce
    is_repeatable: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ModelError(
                f"tensor-parallel rank is {self.rank}; it must be from 0 to {self.size - 1}."
            )


@dataclass(frozen=True, slots=True)
class Partition:
    """The heads, intermediate columns and vocabulary rows of one rank."""

    heads: range
    kv_heads: range
    intermediate: range
    vocab: range

    @classmethod
    def of(cls, spec: ModelSpec, shard: Shard) -> Partition:
        if shard.size > spec.num_heads:
            raise ModelError(
                f"tensor_parallel is {shard.size} but the model has only {spec.num_heads} "
                f"attention heads; use at most {spec.num_heads}."
            )
        kv_heads = _kv_heads(spec.num_kv_heads, shard)
        return cls(
            heads=_heads(spec, shard, kv_heads),
            kv_heads=kv_heads,
            intermediate=_share(spec.intermediate_size, shard.rank, shard.size),
            vocab=_share(spec.vocab_size, shard.rank, shard.size),
        )


def _share(total: int, index: int, count: int) -> range:
    """Part `index` of `count` nearly equal parts."""
    return range(total * index // count, total * (index + 1) // count)


def _kv_heads(num_kv_heads: int, shard: Shard) -> range:
    if shard.size <= num_kv_heads:
        return _share(num_kv_heads, shard.rank, shard.size)
    held = shard.rank * num_kv_heads // shard.size
    return range(held, held + 1)


def _heads(spec: ModelSpec, shard: Shard, kv_heads: range) -> range:
    """Whole groups of query heads, or this rank's part of the one group it shares."""
    group = spec.num_heads // spec.num_kv_heads
    if shard.size <= spec.num_kv_heads:
        return range(kv_heads.start * group, kv_heads.stop * group)
    sharers = [
        rank
        for rank in range(shard.size)
        if rank * spec.num_kv_heads // shard.size == kv_heads.start
    ]
    part = _share(group, sharers.index(shard.rank), len(sharers))
    first = kv_heads.start * group
    return range(first + part.start, first + part.stop)
