"""Passes recorded as CUDA graphs, one for each of a few sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

MAX_RECORDED_TOKENS = 512
"""Larger passes hold prompts, and take so long that the host is ahead of the device anyway."""

MAX_MIXED_TOKENS = 2048
"""Passes of prompts beside decoding rows, recorded as well where no ranks are involved."""

# From, to, and every so many; the larger a pass, the smaller a part of it is padding.
_SIZE_STEPS = ((16, 64, 16), (64, 256, 32), (256, 512, 64), (512, 1024, 128), (1024, 2049, 256))

_KERNELS_PER_LAYER = 16  # at most: not fused, and summed over ranks
_KERNELS_PER_HEAD = 16  # layout, logits, choice and what follows from it
# What the driver keeps for a kernel of a recording, at the least.
_LEAST_KERNEL_BYTES = 4 * 2**10


def kernels_of(num_layers: int) -> int:
    """A bound on the kernels of one pass."""
    return _KERNELS_PER_LAYER * num_layers + _KERNELS_PER_HEAD


class RecordedPasses:
    """Runs `run(size)` for the smallest recorded size that holds what is asked for.

    `run` works on buffers at fixed addresses only, and does the same for the same size; `kernels`
    is about how many it launches. Where nothing can be recorded (no GPU) it is simply called.
    """

    def __init__(
        self,
        run: Callable[[int], None],
        sizes: Sequence[int],
        device: torch.device,
        kernels: int = _KERNELS_PER_HEAD,
    ) -> None:
        self._run = run
        self.sizes = sorted(set(sizes))
        self.kernels = kernels
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def size_for(self, wanted: int) -> int:
        return self.sizes[bisect_left(self.sizes, wanted)]

    @torch.inference_mode()
    def prepare(self, size: int) -> None:
        """Once for each size: compiles kernels and grows what they need for themselves, neither of
        which a recording can."""
        self._run(size)

    @torch.inference_mode()
    def record_size(self, size: int, pool: Any) -> None:
        """Of a size that was prepared."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device: NCCL's watchdog looks at its events.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._run(size)
        self._graphs[size] = graph

    @property
    def is_recordable(self) -> bool:
        return self._device.type == "cuda"

    def forget(self) -> None:
        """Run without recordings from now on."""
        self._graphs.clear()

    @torch.inference_mode()
    def run(self, wanted: int) -> None:
        size = self.size_for(wanted)
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()


def record_all(passes: Sequence[RecordedPasses], on_size: Callable[[], None]) -> None:
    """Record every size of all passes over one piece of memory, calling `on_size` after each. The
    largest come first: the others then fit the memory of these."""
    recordable = [each for each in passes if each.sizes and each.is_recordable]
    if not recordable:
        return
    sizes = [(each, each.largest) for each in recordable]
    sizes += [(each, size) for each in recordable for size in reversed(each.sizes[:-1])]
    for each, size in sizes:  # all before any is recorded, which gives the allocator's memory back
        each.prepare(size)
    pool = torch.cuda.graph_pool_handle()
    for each, size in sizes:
        each.record_size(size, pool)
        on_size()


def record_largest(passes: Sequence[RecordedPasses], device: torch.device) -> int:
    """Record the largest size of each; returns how many bytes the others may take beside it."""
    largest = [(each, each.largest) for each in passes if each.sizes]
    for each, size in largest:
        each.prepare(size)
    pool = torch.cuda.graph_pool_handle()
    # With the very first the driver takes what any needs: 70 MB, and for a hundred more only 12.
    _record(largest[:1], pool)
    before = _bytes_beside_tensors(device)
    _record(largest, pool)
    return bytes_of_others(passes, _bytes_beside_tensors(device) - before)


def _record(sizes: Sequence[tuple[RecordedPasses, int]], pool: Any) -> None:
    for each, size in sizes:
        each.record_size(size, pool)
        each.run(size)  # the driver takes some of its memory only then


def bytes_of_others(passes: Sequence[RecordedPasses], num_bytes: int) -> int:
    """A bound on what the driver keeps for all but the largest of the recordings, told from what it
    took for these. All share the tensors of the largest."""
    num_kernels = sum(each.kernels for each in passes if each.sizes)
    num_others = sum(each.kernels * (len(each.sizes) - 1) for each in passes if each.sizes)
    num_bytes = max(num_bytes, num_kernels * _LEAST_KERNEL_BYTES)
    return num_bytes * num_others * 5 // (4 * max(num_kernels, 1))


def _bytes_beside_tensors(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def row_sizes(most: int) -> list[int]:
    """Sizes worth recording for up to `most` rows: finer where a row more costs something."""
    sizes = [1, 2, 4, 8]
    for first, end, step in _SIZE_STEPS:
        sizes += range(first, end, step)
    return [size for size in sizes if size < most] + [most]
