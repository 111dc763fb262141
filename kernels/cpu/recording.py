"""Recording a pass and running it again in one call, as CUDA graphs do on a GPU.

Between two small operations Python costs as much as the operations themselves. A pass over few
tokens is therefore recorded once for each number of tokens: which operation ran on which memory.
Running it again is one call with the same memory, new contents and a new batch.
"""

from __future__ import annotations

from ctypes import Array, addressof, memmove, sizeof
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.kernels.cpu.native import CBatch, CCall, CPass, check
from outrider.kernels.types import Pass, RaggedBatch

# Tensors of one shape take turns; a pass holds on to none of them for longer than this.
_TURNS = 8
MAX_ROWS = 8  # beyond, the operations are long enough to hide Python


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
        """Address and number of the recorded calls."""
        if self._table is None:
            self._table = (CCall * len(self._calls))(*self._calls)
        return addressof(self._table), len(self._calls)

    @property
    def as_pass(self) -> int:
        """The address of all a repetition needs, in C's layout."""
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


class Recorder(Protocol):
    """Operations that note in `recording` what they do while there is one."""

    recording: Recording | None

    @property
    def library(self) -> SimpleNamespace: ...


class RepeatedPass:
    """A pass that is recorded when it first comes with a number of tokens, and repeated then."""

    def __init__(self, run: Pass, recorder: Recorder) -> None:
        self._run = run
        self._recorder = recorder
        self._recordings: dict[int, Recording | None] = {}

    def __call__(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        num_rows = hidden.shape[0]
        if num_rows > MAX_ROWS:
            return self._run(hidden, batch)
        if num_rows not in self._recordings:
            self._recordings[num_rows], result = self._record(hidden, batch)
            return result
        recording = self._recordings[num_rows]
        if recording is None:
            return self._run(hidden, batch)
        return self._replay(recording, hidden, batch)

    def recording(self, num_rows: int) -> Recording | None:
        """Of a pass over so many tokens, if there is one by now."""
        return self._recordings.get(num_rows)

    def _record(self, hidden: Tensor, batch: RaggedBatch) -> tuple[Recording | None, Tensor]:
        """The recording, None if the pass does anything else than these operations, and what the
        pass gives, whose KV is the last that is written to the cache.

        Found out by trial: what is recorded on one input must give, on another, bit for bit what
        the pass gives.
        """
        expected = self._run(hidden, batch)
        recording = self._recorder.recording = Recording((1.0 - hidden).contiguous())
        recording.set_batch(batch_struct(batch))
        try:
            recording.result = self._run(recording.hidden, batch)
        finally:
            self._recorder.recording = None
        if recording.is_complete:
            repeated = self._replay(recording, hidden, batch)
            if torch.equal(repeated, expected):
                return recording, repeated
        return None, self._run(hidden, batch)

    def _replay(self, recording: Recording, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        assert recording.result is not None
        recording.hidden.copy_(hidden)
        recording.set_batch(batch_struct(batch))
        check(self._recorder.library.replay(*recording.calls))
        return recording.result.clone()


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
