"""Scratch memory of kernels: partial results and arrival counters.

One set per device, grown as needed and kept, because a captured pass keeps using the buffers of its
capture. Passes on one device run one after another, so they can share it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Scratch:
    """Buffers of one device. Replaced ones stay alive for the CUDA graphs that use them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._partial = torch.empty(0, dtype=torch.float32, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._replaced: list[Tensor] = []

    def take(self, num_floats: int, num_counters: int) -> tuple[Tensor, Tensor]:
        has_room = num_floats <= self._partial.numel() and num_counters <= self._counters.numel()
        is_recording = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_recording and not has_room:
            # Memory allocated during a capture belongs to its graph, but others would use it.
            raise RuntimeError("run kernels of these sizes once before capturing them")
        if num_floats > self._partial.numel():
            self._replaced.append(self._partial)
            self._partial = torch.empty(num_floats, dtype=torch.float32, device=self._device)
        if num_counters > self._counters.numel():
            self._replaced.append(self._counters)
            self._counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)
        return self._partial, self._counters


_scratch: dict[torch.device, _Scratch] = {}


def split_scratch(
    device: torch.device, num_tiles: int, num_splits: int, tile_floats: int
) -> tuple[Tensor | None, Tensor | None]:
    """Room for the partial results of each tile's splits, and a zero counter for each tile.

    Each kernel resets its counter to zero. One split needs neither.
    """
    if num_splits == 1:
        return None, None
    held = _scratch.setdefault(device, _Scratch(device))
    return held.take(num_tiles * num_splits * tile_floats, num_tiles)
