"""Captures a pass and replays it in one call, as CUDA graphs do on a GPU.

Between small operations Python costs as much as the operations themselves. A pass over few tokens
is therefore captured once per number of tokens: which operation ran on which memory. A replay is
one call with the same memory, new contents and a new batch.
"""

from __future__ import annotations

from ctypes import Array, addressof, memmove, sizeof
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.kernels.cpu.native import CBatch, CCall, CPass, check
from outrider.kernels.types import Pass, RaggedBatch

# Buffers of one shape are reused in turn; a pass needs none of them for longer than this.
_TURNS = 8
MAX_ROWS = 8  # beyond, the operations are long enough to hide Python


class PassCapture:
    """The operations of a pass over a fixed number of tokens, and all their memory."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden.clone()  # the input; filled before each run
        self.batch = CBatch()
        self.result: Tensor | None = None
        self.is_complete = True  # no operation ran that cannot be captured
        self._calls: list[CCall] = []
        self._kept: list[Any] = []
        self._buffers: dict[tuple[int, ...], list[Tensor]] = {}
        self._taken: dict[tuple[int, ...], int] = {}
        self._table: Array[CCall] | None = None
        self._as_pass: CPass | None = None

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
        """Address and number of the captured calls."""
        if self._table is None:
            self._table = (CCall * len(self._calls))(*self._calls)
        return addressof(self._table), len(self._calls)

    @property
    def as_pass(self) -> int:
        """The address of the C struct for a replay."""
        if self._as_pass is None:
            assert self.result is not None
            address, count = self.calls
            self._as_pass = CPass(
                address,
                addressof(self.batch),
                self.hidden.data_ptr(),
                self.result.data_ptr(),
                count,
                self.hidden.shape[0],
            )
        return addressof(self._as_pass)


class CapturingOps(Protocol):
    """Operations that add themselves to `capture` while there is one."""

    capture: PassCapture | None

    @property
    def library(self) -> SimpleNamespace: ...


class CapturedPass:
    """A pass that is captured on its first run with a number of tokens, and replayed from then
    on."""

    def __init__(self, run: Pass, ops: CapturingOps) -> None:
        self._run = run
        self._ops = ops
        self._captures: dict[int, PassCapture | None] = {}

    def __call__(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        num_rows = hidden.shape[0]
        if num_rows > MAX_ROWS:
            return self._run(hidden, batch)
        if num_rows not in self._captures:
            self._captures[num_rows], result = self._record(hidden, batch)
            return result
        capture = self._captures[num_rows]
        if capture is None:
            return self._run(hidden, batch)
        return self._replay(capture, hidden, batch)

    def capture_of(self, num_rows: int) -> PassCapture | None:
        """The capture of a pass over `num_rows` tokens, if there is one."""
        return self._captures.get(num_rows)

    def _record(self, hidden: Tensor, batch: RaggedBatch) -> tuple[PassCapture | None, Tensor]:
        """The capture, None if the pass contains anything but these operations, and the pass's
        result, whose KV is written to the cache last.

        Verified by trial: captured on one input, the replay on another must match the pass bit for
        bit.
        """
        expected = self._run(hidden, batch)
        capture = self._ops.capture = PassCapture((1.0 - hidden).contiguous())
        capture.set_batch(batch_struct(batch))
        try:
            capture.result = self._run(capture.hidden, batch)
        finally:
            self._ops.capture = None
        if capture.is_complete:
            repeated = self._replay(capture, hidden, batch)
            if torch.equal(repeated, expected):
                return capture, repeated
        return None, self._run(hidden, batch)

    def _replay(self, capture: PassCapture, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        assert capture.result is not None
        capture.hidden.copy_(hidden)
        capture.set_batch(batch_struct(batch))
        check(self._ops.library.replay(*capture.calls))
        return capture.result.clone()


def batch_struct(batch: RaggedBatch) -> CBatch:
    tensors = (
        (batch.positions, torch.int64),
        (batch.slots, torch.int64),
        (batch.cu_query_lens, torch.int32),
        (batch.context_lens, torch.int32),
        (batch.block_tables, torch.int32),
    )
    for tensor, dtype in tensors:
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"RaggedBatch tensors must be contiguous {dtype}, not {tensor.dtype}.")
    return CBatch(
        *(tensor.data_ptr() for tensor, _ in tensors),
        batch.positions.shape[0],
        batch.context_lens.shape[0],
        batch.block_tables.shape[1],
    )
