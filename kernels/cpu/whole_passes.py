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

from outrider.kernels.cpu.capture import MAX_ROWS, CapturedPass
from outrider.kernels.cpu.native import CBatch, CDrafter, check
from outrider.kernels.cpu.stored import CpuTable
from outrider.kernels.noise import NoiseStream
from outrider.kernels.types import DraftTokens, RaggedLists


class CpuWholePasses:
    """See `WholePasses`."""

    max_tokens = MAX_ROWS

    def __init__(
        self, run: CapturedPass, table: CpuTable, block_size: int, library: SimpleNamespace
    ) -> None:
        self._run = run
        self._library = library
        self._block_size = block_size
        self._table = table
        self._logits = torch.empty((MAX_ROWS, table.packed.shape[0]), dtype=torch.float32)
        self._parts: dict[tuple[int, int], Tensor] = {}  # slices of the logits: slicing is slow

    @cached_property
    def _norms(self) -> Tensor | None:
        return self._table.norms()

    def score(
        self, tokens: list[int], lists: RaggedLists, logits_indices: Sequence[int], vocab_size: int
    ) -> Tensor | None:
        if not self._pass(tokens, lists, logits_indices, vocab_size, None, None):
            return None
        return self._part(len(logits_indices), vocab_size)

    def best(
        self, tokens: list[int], lists: RaggedLists, logits_indices: Sequence[int], vocab_size: int
    ) -> list[int] | None:
        norms, best = self._norms, (c_int64 * len(logits_indices))()
        address = None if norms is None else norms.data_ptr()
        if not self._pass(tokens, lists, logits_indices, vocab_size, address, best):
            return None
        return best[:]

    def _pass(
        self,
        tokens: list[int],
        lists: RaggedLists,
        logits_indices: Sequence[int],
        vocab_size: int,
        norms: int | None,
        best: Any,
    ) -> bool:
        """Call `outrider_score`; False if the pass is not captured."""
        capture = self._run.capture_of(len(tokens))
        if capture is None:
            return False
        count, num_sequences = len(logits_indices), len(lists.context_lens)
        max_blocks = len(lists.block_tables[0])
        wide = array("q", chain(tokens, lists.positions, lists.slots, logits_indices))
        tables = chain.from_iterable(lists.block_tables)
        narrow = array("i", chain(lists.cu_query_lens, lists.context_lens, tables))
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
            capture.as_pass,
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

    def draft(
        self,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        depth: int,
        vocab_size: int,
        least_survival: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> DraftTokens | None:
        first, following = (self._run.capture_of(count) for count in (len(tokens), 1))
        if first is None or following is None:
            return None
        own_blocks = (c_int32 * len(blocks))(*blocks)
        drafter = CDrafter(
            self._table.address,
            self._logits.data_ptr(),
            addressof(own_blocks),
            len(blocks),
            self._block_size,
            vocab_size,
            seed,
            NoiseStream.SHARED,
            temperature,
            least_survival,
        )
        drafts, confidences, count = (c_int64 * depth)(), (c_float * depth)(), c_int64()
        ids = (c_int64 * len(tokens))(*tokens)
        code = self._library.draft(
            byref(drafter),
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
        return DraftTokens(drafts[: count.value], confidences[: count.value])
