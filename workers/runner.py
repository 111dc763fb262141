"""Runs a decoder over ragged chunks of rows and a paged cache: what target and draft share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.types import RaggedBatch
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache


class Chunk(NamedTuple):
    """Tokens of one row to compute, from position `start` on."""

    row: int
    start: int
    tokens: Sequence[int]


class Runner:
    """A decoder, its KV cache and the block table of every row.

    `vocab_size` is that of the target. A draft of the same tokenizer may be padded to another
    size: it never proposes ids the target lacks, and reads ids it lacks as its last one, which
    can only cost it a guess.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, num_rows: int, max_model_len: int, vocab_size: int
    ) -> None:
        self.decoder = decoder
        self.vocab_size = min(vocab_size, decoder.spec.vocab_size)
        self._lacks_ids = decoder.spec.vocab_size < vocab_size
        self.device = decoder.device
        self._kv = kv
        self._block_size = kv.block_size
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables: NDArray[np.int32] = np.zeros((num_rows, max_blocks), dtype=np.int32)

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._tables[row, start : start + len(blocks)] = blocks

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states [total tokens, hidden] of all chunks, one after the other."""
        ids = [token for chunk in chunks for token in chunk.tokens]
        token_ids = torch.tensor(ids, dtype=torch.int64, device=self.device)
        if self._lacks_ids:
            token_ids.clamp_(max=self.vocab_size - 1)
        return self.decoder.forward(token_ids, self._batch(chunks), self._kv)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Sequence[int]) -> Tensor:
        """float32 [len(indices), vocab] of the hidden states at `indices`."""
        if len(indices) != hidden.shape[0]:
            hidden = hidden[torch.tensor(indices, dtype=torch.int64, device=self.device)]
        return self.decoder.logits(hidden)[:, : self.vocab_size]

    def _batch(self, chunks: Sequence[Chunk]) -> RaggedBatch:
        rows = np.array([chunk.row for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        lens = np.array([len(chunk.tokens) for chunk in chunks])
        ends = np.cumsum(lens)
        owner = np.repeat(np.arange(len(chunks)), lens)
        positions = np.arange(ends[-1]) + (starts - ends + lens)[owner]
        size = self._block_size
        slots = self._tables[rows[owner], positions // size].astype(np.int64) * size
        slots += positions % size
        contexts = starts + lens
        max_context = int(contexts.max())
        tables = self._tables[rows, : -(-max_context // size)]
        return RaggedBatch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            cu_query_lens=self._tensor(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._tensor(contexts.astype(np.int32)),
            block_tables=self._tensor(tables),
            max_query_len=int(lens.max()),
            max_context_len=max_context,
        )

    def _tensor(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
