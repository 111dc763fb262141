"""Ranks as threads of this process: a group for tests of what tensor-parallel ranks do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.links.rank_messages import RankSettings

Result = TypeVar("Result")

RANK_SETTINGS = RankSettings(
    model="",
    revision=None,
    device="cpu",
    dtype="float32",
    quantization=None,
    cpu_kernels="auto",
    deterministic=True,
    num_threads=None,
    block_size=4,
    verification="shared",
    ngram_min=1,
    ngram_max=4,
    gpu_memory_utilization=0.9,
    has_fixed_kv=False,
    log_level="info",
    log_format="text",
    transfer_timeout_s=10.0,
)


class ThreadGroup:
    """A `Collective` for one thread; it fails where ranks differ in what they ask for."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = size
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # (operation, shape) in order
        self._shared = shared

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", tensor))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange("all_reduce", tensor)
        return sum(parts[1:], parts[0])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self._exchange("broadcast", tensor)[root])

    def _exchange(self, operation: str, tensor: Tensor) -> list[Tensor]:
        self.calls.append((operation, tuple(tensor.shape)))
        asked = (operation, tensor.dtype, tuple(tensor.shape))
        parts = self._shared.exchange(self.rank, (asked, tensor))
        assert all(other == asked for other, _ in parts), f"ranks differ: {parts}"
        return [part for _, part in parts]


class _Shared:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._parts: list[Any] = [None] * size

    def exchange(self, rank: int, part: Any) -> list[Any]:
        self._parts[rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def abort(self) -> None:
        self._barrier.abort()


_POOL = ThreadPoolExecutor(8)


def make_groups(size: int) -> list[ThreadGroup]:
    """The ends of one group, for threads that live longer than one piece of work."""
    shared = _Shared(size)
    return [ThreadGroup(rank, size, shared) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """`work` on every rank of a group of `size` threads; the first failure is raised."""
    shared = _Shared(size)

    def run(rank: int) -> Result:
        try:
            return work(ThreadGroup(rank, size, shared))
        except BaseException:
            shared.abort()
            raise

    futures = [_POOL.submit(run, rank) for rank in range(size)]
    failures = [future.exception() for future in futures]
    real = [failure for failure in failures if failure is not None]
    real.sort(key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
    if real:
        raise real[0]
    return [future.result() for future in futures]


def same_on_all(results: Sequence[Result]) -> Result:
    """What every rank returned."""
    assert all(result == results[0] for result in results), f"ranks differ: {results}"
    return results[0]
