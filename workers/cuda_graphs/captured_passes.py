"""Passes captured as CUDA graphs, one for each of a few sizes."""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

MAX_CAPTURED_TOKENS = 512
"""Larger passes hold prompts, and take long enough for the host to stay ahead of the device."""

MAX_MIXED_TOKENS = 2048
"""Passes that mix prompts with decoding rows, captured as well where there are no ranks."""

# (from, to, step): steps grow with the size, so padding stays a small part of a pass.
_SIZE_STEPS = ((16, 64, 16), (64, 256, 32), (256, 512, 64), (512, 1024, 128), (1024, 2049, 256))

_KERNELS_PER_LAYER = 28  # at most: not fused, of quantized weights, and summed over ranks
_KERNELS_PER_HEAD = 16  # layout, logits, sampling, acceptance
# The least that the driver keeps per captured kernel.
_MIN_KERNEL_BYTES = 4 * 2**10


def kernels_of(num_layers: int) -> int:
    """A bound on the kernels of one pass."""
    return _KERNELS_PER_LAYER * num_layers + _KERNELS_PER_HEAD


class CapturedPasses:
    """Runs `run(size)` for the smallest captured size that is large enough.

    `run` works on buffers at fixed addresses only, and does the same for the same size; `kernels`
    is about how many it launches. Without a GPU nothing is captured and `run` is called directly.
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

    def size_for(self, count: int) -> int:
        return self.sizes[bisect_left(self.sizes, count)]

    @torch.inference_mode()
    def warm_up(self, size: int) -> None:
        """Once per size: compiles kernels and allocates their workspaces, which cannot happen
        during capture."""
        self._run(size)

    @torch.inference_mode()
    def capture(self, size: int, pool: Any) -> None:
        """Capture a size that was warmed up."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: NCCL's watchdog polls its events.
        with (
            _paused_collection(),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self._run(size)
        self._graphs[size] = graph

    @property
    def can_capture_graphs(self) -> bool:
        return self._device.type == "cuda"

    def release(self) -> None:
        """Destroy the graphs; passes run uncaptured from now on."""
        self._graphs.clear()

    @torch.inference_mode()
    def run(self, count: int) -> None:
        size = self.size_for(count)
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    """Collecting another model's graphs during a capture would invalidate it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_all(passes: Sequence[CapturedPasses], on_size: Callable[[], None]) -> None:
    """Capture every size of all passes over one memory pool, calling `on_size` after each. The
    largest come first, so that the others fit into their memory."""
    capturable = [each for each in passes if each.sizes and each.can_capture_graphs]
    if not capturable:
        return
    sizes = [(each, each.largest) for each in capturable]
    sizes += [(each, size) for each in capturable for size in reversed(each.sizes[:-1])]
    for each, size in sizes:  # all before the first capture, which frees the allocator's cache
        each.warm_up(size)
    pool = torch.cuda.graph_pool_handle()
    for each, size in sizes:
        each.capture(size, pool)
        each.run(size)  # the driver allocates some of its memory on the first replay
        on_size()


def capture_largest(passes: Sequence[CapturedPasses], device: torch.device) -> int:
    """Capture the largest size of each; returns how many more bytes the others may take."""
    largest = [(each, each.largest) for each in passes if each.sizes]
    for each, size in largest:
        each.warm_up(size)
    pool = torch.cuda.graph_pool_handle()
    # The very first makes the driver allocate what all share: 70 MB; a hundred more take 12.
    _capture(largest[:1], pool)
    before = _bytes_beside_tensors(device)
    _capture(largest, pool)
    return bytes_of_other_graphs(passes, _bytes_beside_tensors(device) - before)


def _capture(sizes: Sequence[tuple[CapturedPasses, int]], pool: Any) -> None:
    for each, size in sizes:
        each.capture(size, pool)
        each.run(size)  # the driver allocates some of its memory on the first replay


def bytes_of_other_graphs(passes: Sequence[CapturedPasses], num_bytes: int) -> int:
    """A bound on the driver's memory for all graphs but the largest of each kind, extrapolated from
    the `num_bytes` of those. All share the tensors of the largest."""
    num_kernels = sum(each.kernels for each in passes if each.sizes)
    num_others = sum(each.kernels * (len(each.sizes) - 1) for each in passes if each.sizes)
    num_bytes = max(num_bytes, num_kernels * _MIN_KERNEL_BYTES)
    return num_bytes * num_others * 5 // (4 * max(num_kernels, 1))


def _bytes_beside_tensors(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def row_sizes(max_rows: int) -> list[int]:
    """Sizes worth capturing for up to `max_rows` rows: finer where one more row costs time."""
    sizes = [1, 2, 4, 8]
    for first, end, step in _SIZE_STEPS:
        sizes += range(first, end, step)
    return [size for size in sizes if size < max_rows] + [max_rows]
