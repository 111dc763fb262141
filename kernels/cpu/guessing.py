"""Drafting for one row in one call of C; see guess.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64
from types import SimpleNamespace

import torch

from outrider.kernels.cpu.native import CGuesser, check
from outrider.kernels.cpu.recording import RepeatedPass
from outrider.kernels.cpu.stored import CpuTable
from outrider.kernels.noise import Stream
from outrider.kernels.types import Guesses


class CpuGuesser:
    """See `Guesser`."""

    def __init__(
        self, run: RepeatedPass, table: CpuTable, block_size: int, library: SimpleNamespace
    ) -> None:
        self._run = run
        self._library = library
        self._block_size = block_size
        self._table = table
        self._logits = torch.empty(table.packed.shape[0], dtype=torch.float32)

    def __call__(
        self,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        depth: int,
        vocab_size: int,
        least_survival: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Guesses | None:
        first, following = (self._run.recording(count) for count in (len(tokens), 1))
        if first is None or following is None:
            return None
        own_blocks = (c_int32 * len(blocks))(*blocks)
        guesser = CGuesser(
            self._table.address,
            self._logits.data_ptr(),
            addressof(own_blocks),
            len(blocks),
            self._block_size,
            vocab_size,
            seed,
            Stream.SHARED,
            temperature,
            least_survival,
        )
        drafts, confidences, count = (c_int64 * depth)(), (c_float * depth)(), c_int64()
        ids = (c_int64 * len(tokens))(*tokens)
        code = self._library.guess(
            byref(guesser),
            first.as_pass,
            following.as_pass,
            ids,
            start,
            depth,
            drafts,
            confidences,
            byref(count),
        )
        check(code)
        return Guesses(drafts[: count.value], confidences[: count.value])
