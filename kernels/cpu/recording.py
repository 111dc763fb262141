"""Recording a pass and running it again in one call, as CUDA graphs do on a GPU.

Between two small operations Python costs as much as the operations themselves. A pass over few
tokens is therefore recorded once for each number of tokens: which operation ran on which memory.
Running it again is one call with the same memory, new contents and a new batch.
"""

from __future__ import annotations

from ctypes import Array, addressof, memmove, sizeof
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu.native import CBatch, CCall

# Tensors of one shape take turns; a pass holds on to none of them for longer than this.
_TURNS = 8


class Recording:
    """What a pass over a fixed number of tokens did, and all the memory it did it with."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden.clone()  # the input; filled before each run
        self.batch = CBatch()
        self.result: Tensor | None = None
        self.is_complete = True  # nothing ran that could not be recorded
        self._calls: list[CCall] = []
        self._kept: list[Any] = []
        self._buffers: dict[tuple[int, ...], list[Tensor]] = {}
        self._taken: dict[tuple[int, ...], int] = {}
        self._table: Array[CCall] | None = None

    def add(self, operation: int, arguments: tuple[int, ...], eps: float, kept: Any) -> None:
        call = CCall(operation=operation, eps=eps)
        for index, argument in enumerate(arguments):
            call.arguments[index] = argument
        self._calls.append(call)
        self._kept.append(kept)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        buffers = self._buffers.setdefault(shape, [])
        taken = self._taken.get(shape, 0)
        self._taken[shape] = taken + 1
        if len(buffers) < _TURNS:
            buffers.append(torch.empty(shape, dtype=torch.float32))
        return buffers[taken % _TURNS]

    def set_batch(self, batch: CBatch) -> None:
        memmove(addressof(self.batch), addressof(batch), sizeof(CBatch))

    @property
    def calls(self) -> tuple[int, int]:
        """Address and number of the recorded calls."""
        if self._table is None:
            self._table = (CCall * len(self._calls))(*self._calls)
        return addressof(self._table), len(self._calls)
