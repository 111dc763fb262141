"""Runs a decoder over ragged chunks of rows and a paged cache: what target and draft share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.types import RaggedBatch
from outrider.workers.collective import Alone, Collective
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.sampling.vocab import VocabPart


class Chunk(NamedTuple):
    """Tokens of one row to compute, from position `start` on."""

    row: int
    start: int
    tokens: Sequence[int]


class Runner:
    """A decoder, its KV cache and the block table of every row.

    `vocab_size` is that of the target. A draft of the same tokenizer may be padded to another
    size: it never proposes ids the target lacks, and reads ids it lacks as its last one, which
    can only cost it a guess. `vocab` says for which of those ids this rank has the logits, and
    `group` are the ranks that hold the decoder together.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        num_rows: int,
        max_model_len: int,
        vocab_size: int,
        group: Collective | None = None,
    ) -> None:
        self.decoder = decoder
        self.vocab_size = min(vocab_size, decoder.spec.vocab_size)
        self.vocab = _vocab_part(decoder, self.vocab_size, group or Alone())
        self._lacks_ids = decoder.spec.vocab_size < vocab_size
        self.device = decoder.device
        self.kv = kv
        self._block_size = kv.block_size
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables = [[0] * max_blocks for _ in range(num_rows)]

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._tables[row][start : start + len(blocks)] = blocks

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states [total tokens, hidden] of all chunks, one after the other."""
        ids = [token for chunk in chunks for token in chunk.tokens]
        token_ids = self.known_ids(torch.tensor(ids, dtype=torch.int64, device=self.device))
        return self.decoder.forward(token_ids, self._batch(chunks), self.kv)

    def known_ids(self, token_ids: Tensor) -> Tensor:
        """Ids this model has an embedding for."""
        return token_ids.clamp(max=self.vocab_size - 1) if self._lacks_ids else token_ids

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Sequence[int]) -> Tensor:
        """float32 [len(indices), len(vocab.held)] of the hidden states at `indices`."""
        if len(indices) != hidden.shape[0]:
            hidden = hidden[torch.tensor(indices, dtype=torch.int64, device=self.device)]
        return self.decoder.logits(hidden)[:, : len(self.vocab.held)]

    def _batch(self, chunks: Sequence[Chunk]) -> RaggedBatch:
        """Plain loops: a decode pass has a handful of tokens, where array operations cost more
        to call than to run."""
        size = self._block_size
        positions: list[int] = []
        slots: list[int] = []
        ends, contexts = [0], []
        for row, start, tokens in chunks:
            context = start + len(tokens)
            table = self._tables[row]
            positions += range(start, context)
            slots += [table[at // size] * size + at % size for at in range(start, context)]
            ends.append(len(positions))
            contexts.append(context)
        max_context = max(contexts)
        max_blocks = -(-max_context // size)
        tables = [self._tables[chunk.row][:max_blocks] for chunk in chunks]
        max_query_len = max(len(chunk.tokens) for chunk in chunks)
        tile_tokens = self.decoder.tile_tokens(max_query_len)
        return RaggedBatch(
            positions=self._tensor(positions, torch.int64),
            slots=self._tensor(slots, torch.int64),
            cu_query_lens=self._tensor(ends, torch.int32),
            context_lens=self._tensor(contexts, torch.int32),
            block_tables=self._tensor(tables, torch.int32),
            max_query_len=max_query_len,
            max_context_len=max_context,
            tiles=self._tiles(chunks, tile_tokens) if tile_tokens else None,
        )

    def _tiles(self, chunks: Sequence[Chunk], tile_tokens: int) -> Tensor:
        tiles: list[list[int]] = []
        first = 0
        for index, chunk in enumerate(chunks):
            for at in range(0, len(chunk.tokens), tile_tokens):
                count = min(tile_tokens, len(chunk.tokens) - at)
                tiles.append([first + at, count, chunk.start + at, index])
            first += len(chunk.tokens)
        return self._tensor(tiles, torch.int32)

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _vocab_part(decoder: Decoder, limit: int, group: Collective) -> VocabPart:
    shard = decoder.shard
    if (group.rank, group.size) != (shard.rank, shard.size):
        raise ModelError(
            f"the decoder is rank {shard.rank} of {shard.size} but its group says rank "
            f"{group.rank} of {group.size}; build both from the same tensor_parallel."
        )
    partitions = [Partition.of(decoder.spec, Shard(rank, group.size)) for rank in range(group.size)]
    return VocabPart.of([partition.vocab for partition in partitions], limit, group)
