"""From tokens to tokens in one call of C; see whole_passes.c."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64
from functools import cached_property
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu.native import CBatch, CGuesser, check
from outrider.kernels.cpu.recording import MAX_ROWS, RepeatedPass
from outrider.kernels.cpu.stored import CpuTable
from outrider.kernels.noise import Stream
from outrider.kernels.types import Guesses, Places


class CpuWholePasses:
    """See `WholePasses`."""

    max_tokens = MAX_ROWS

    def __init__(
        self, run: RepeatedPass, table: CpuTable, block_size: int, library: SimpleNamespace
    ) -> None:
        self._run = run
        self._library = library
        self._block_size = block_size
        self._table = table
        self._logits = torch.empty((MAX_ROWS, table.packed.shape[0]), dtype=torch.float32)
        self._parts: dict[tuple[int, int], Tensor] = {}  # of the logits: slicing takes a while

    @cached_property
    def _norms(self) -> Tensor | None:
        return self._table.norms()

    def score(
        self, tokens: list[int], places: Places, wanted: Sequence[int], vocab_size: int
    ) -> Tensor | None:
        if not self._pass(tokens, places, wanted, vocab_size, None, None):
            return None
        return self._part(len(wanted), vocab_size)

    def best(
        self, tokens: list[int], places: Places, wanted: Sequence[int], vocab_size: int
    ) -> list[int] | None:
        norms, best = self._norms, (c_int64 * len(wanted))()
        address = None if norms is None else norms.data_ptr()
        if not self._pass(tokens, places, wanted, vocab_size, address, best):
            return None
        return best[:]

    def _pass(
        self,
        tokens: list[int],
        places: Places,
        wanted: Sequence[int],
        vocab_size: int,
        norms: int | None,
        best: Any,
    ) -> bool:
        """`outrider_score`; False where there is no such pass."""
        recording = self._run.recording(len(tokens))
        if recording is None:
            return False
        count, num_sequences = len(wanted), len(places.context_lens)
        max_blocks = len(places.block_tables[0])
        wide = array("q", chain(tokens, places.positions, places.slots, wanted))
        tables = chain.from_iterable(places.block_tables)
        narrow = array("i", chain(places.cu_query_lens, places.context_lens, tables))
        ids, half = wide.buffer_info()[0], narrow.buffer_info()[0]
        row = len(tokens) * wide.itemsize
        contexts = half + (num_sequences + 1) * narrow.itemsize
        batch = CBatch(
            ids + row,
            ids + 2 * row,
            half,
            contexts,
            contexts + num_sequences * narrow.itemsize,
            len(tokens),
            num_sequences,
            max_blocks,
        )
        code = self._library.score(
            self._table.address,
            recording.as_pass,
            addressof(batch),
            ids,
            ids + 3 * row,
            count,
            vocab_size,
            self._logits.data_ptr(),
            norms,
            best,
        )
        check(code)
        return True

    def _part(self, num_rows: int, vocab_size: int) -> Tensor:
        shape = num_rows, vocab_size
        part = self._parts.get(shape)
        if part is None:
            part = self._parts[shape] = self._logits[:num_rows, :vocab_size]
        return part

    def guess(
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
