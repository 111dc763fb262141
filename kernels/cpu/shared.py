"""Collectives of processes on one host, through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char, c_int32
from mmap import mmap

import torch
from torch import Tensor

from outrider.kernels.cpu.native import ALL_REDUCE, COUNTER_BYTES, CSharedEnd, check
from outrider.kernels.cpu.ops import CpuOps

BUFFER_BYTES = 1 << 18  # exchanged at a time; two buffers fit a core's own cache
NO_PROCESS = -1


def memory_bytes(size: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Shared memory of a group of `size` ranks."""
    return size * (COUNTER_BYTES + 2 * buffer_bytes)


class SharedEnd:
    """One rank's end of the group.

    All ranks call the same operations in the same order with tensors of the same sizes. If one has
    exited, or is late by more than `limit_s`, the others raise `RuntimeError`, and the group cannot
    be used any more.

    `memory` has `memory_bytes` and is zero before the first rank uses it. `processes` holds a pidfd
    per rank, to notice its exit at once, or `NO_PROCESS`.
    """

    def __init__(
        self, ops: CpuOps, memory: mmap, rank: int, processes: Sequence[int], limit_s: float
    ) -> None:
        size = len(processes)
        self.rank = rank
        self.size = size
        self._ops = ops
        self._mapped = c_char.from_buffer(memory)  # keeps the mapping where it is
        self._processes = (c_int32 * size)(*processes)
        self._end = CSharedEnd(
            addressof(self._mapped),
            addressof(self._processes),
            rank,
            size,
            (len(memory) // size - COUNTER_BYTES) // 2,
            int(limit_s * 1e9),
        )
        self._address = addressof(self._end)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of a contiguous float32 tensor, in place and in rank order.

        Added to a capture in progress.
        """
        if x.dtype is not torch.float32 or not x.is_contiguous():
            raise TypeError(f"all-reduce takes contiguous float32 tensors, not {x.dtype}.")
        arguments = (self._address, x.data_ptr(), x.numel())
        check(self._ops.library.all_reduce(*arguments), "all-reduce")
        self._ops.record(ALL_REDUCE, arguments, (self, x))
        return x

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape], in rank order."""
        self._ops.invalidate_capture()
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        code = self._ops.library.all_gather(
            self._address, tensor.data_ptr(), tensor.nbytes, gathered.data_ptr()
        )
        check(code, "all-gather")
        return gathered

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite `tensor` on every rank by that of `root`."""
        self._ops.invalidate_capture()
        dense = tensor.contiguous()
        code = self._ops.library.broadcast(self._address, dense.data_ptr(), dense.nbytes, root)
        check(code, "broadcast")
        if dense is not tensor and self.rank != root:
            tensor.copy_(dense)
