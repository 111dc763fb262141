"""Passes recorded as CUDA graphs, one for each of a few sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

MAX_RECORDED_TOKENS = 512
"""Larger passes hold prompts, and take so long that the host is ahead of the device anyway."""

_WARM_UPS = 2


class RecordedPasses:
    """Runs `run(size)` for the smallest recorded size that holds what is asked for.

    `run` works on buffers at fixed addresses only, and does the same for the same size. Where
    nothing can be recorded (no GPU) it is simply called.
    """

    def __init__(
        self, run: Callable[[int], None], sizes: Sequence[int], device: torch.device
    ) -> None:
        self._run = run
        self.sizes = sorted(set(sizes))
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def size_for(self, wanted: int) -> int:
        return self.sizes[bisect_left(self.sizes, wanted)]

    @torch.inference_mode()
    def record(self, pool: Any, on_size: Callable[[], None]) -> None:
        """Record every size, the largest first: the smaller ones then fit its memory."""
        if self._device.type != "cuda":
            return
        for size in reversed(self.sizes):
            for _ in range(_WARM_UPS):  # compiles kernels, which a recording cannot
                self._run(size)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device: NCCL's watchdog looks at its events.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._run(size)
            self._graphs[size] = graph
            on_size()

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


def row_sizes(most: int) -> list[int]:
    """Sizes worth recording for up to `most` rows: finer where a row more costs something."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, 1025, 64)]
    return [size for size in sizes if size < most] + [most]
