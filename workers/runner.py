"""Runs a decoder over ragged chunks of rows and a paged KV cache; shared by target and draft."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.types import DraftTokens, RaggedBatch, RaggedLists
from outrider.workers.cuda_graphs.captured_passes import MAX_CAPTURED_TOKENS
from outrider.workers.cuda_graphs.runner_passes import RunnerPasses
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.sampling.vocab import VocabPart


class RowChunk(NamedTuple):
    """Tokens of one row to compute, from position `start` on."""

    row: int
    start: int
    tokens: Sequence[int]


class PassFeatures(NamedTuple):
    """Features of a target pass, for a head to draft from; valid until the next pass."""

    chunks: Sequence[RowChunk]
    features: Tensor  # [total tokens, ...]


class Runner:
    """A decoder, its KV cache and the block table of every row.

    `vocab_size` is that of the target. A draft of the same tokenizer may be padded to another
    size: it never proposes ids the target lacks, and reads ids it lacks as its last id, which can
    only lower acceptance. `vocab` says for which ids this rank has logits; `group` are the ranks of
    this decoder.
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
        self.vocab = _vocab_part(decoder, self.vocab_size, group or SingleRankGroup())
        self._lacks_ids = decoder.spec.vocab_size < vocab_size
        self.device = decoder.device
        self.kv = kv
        self.num_rows = num_rows
        self._block_size = kv.block_size
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables = [[0] * max_blocks for _ in range(num_rows)]
        self._captured: RunnerPasses | None = None
        self._whole = decoder.whole_passes(kv)
        self._layers: tuple[int, ...] | None = None
        self.feature_reader: str | None = None
        self.last_pass: PassFeatures | None = None

    def expose_features(self, layers: Sequence[int], feature_reader: str) -> None:
        """From now on passes leave the input of these layers of the decoder, or its hidden states
        if there are none, in `last_pass`. `feature_reader` is the proposer that reads it for the
        rows it may draft for. Call before capturing."""
        self._layers = tuple(layers)
        self.feature_reader = feature_reader
        self.decoder.tap(layers)

    def capture(self, query_len: int, max_tokens: int = MAX_CAPTURED_TOKENS) -> None:
        """Capture passes of up to `max_tokens` tokens, if kernels work on tiles: others read
        sequence lengths on the host, which a CUDA graph cannot.

        `query_len` is how many tokens a row usually has in a pass. Ranks of a group capture
        together, and only if their all-reduce can be captured (`can_capture` in `workers/groups/`).
        """
        if self.decoder.tile_tokens(query_len):
            self._captured = RunnerPasses(
                self.decoder,
                self._compute,
                self._tables,
                self.max_model_len,
                query_len,
                max_tokens,
            )
            self._captured.capture()

    @property
    def captured_sizes(self) -> Sequence[int]:
        """Numbers of tokens that passes are padded to; empty if nothing is captured."""
        return () if self._captured is None else self._captured.sizes

    def release_graphs(self) -> None:
        """Call before the group is destroyed: NCCL waits forever while a CUDA graph holds its
        collectives."""
        if self._captured is not None:
            self._captured.release()
            self._captured = None

    def add_rows(self, count: int) -> range:
        """Rows beside those of requests, see `ScratchRows`."""
        first, max_blocks = len(self._tables), len(self._tables[0])
        self._tables += [[0] * max_blocks for _ in range(count)]
        return range(first, first + count)

    def table(self, row: int) -> Sequence[int]:
        """The row's blocks; beyond those it has, anything."""
        return self._tables[row]

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._tables[row][start : start + len(blocks)] = blocks
            if self._captured is not None:
                self._captured.extend_table(row, start, blocks)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[RowChunk], *, keep_features: bool = True) -> Tensor:
        """Hidden states [total tokens, hidden] of all chunks, concatenated. Those of a captured
        pass are valid until the next `forward`. Without `keep_features` the pass leaves no
        `last_pass`, which may take less time."""
        keep_features = keep_features and self._layers is not None
        ids = [token for chunk in chunks for token in chunk.tokens]
        captured = self._captured
        if captured is None or len(ids) > captured.max_tokens:
            batch = self.batch_of(chunks, self.decoder.tile_tokens)
            hidden = self._compute(self.tensor(ids, torch.int64), batch, keep_features)
            features = self.decoder.features if keep_features and self._layers else hidden
        else:
            size = captured.tile_tokens
            tiles = _tiles(chunks, [size] * len(chunks), size, [chunk.row for chunk in chunks])
            hidden = captured.run(ids, *self._places(chunks), tiles)
            features = captured.features[: len(ids)] if self._layers else hidden
        self.last_pass = PassFeatures(chunks, features) if keep_features else None
        return hidden

    def _compute(self, token_ids: Tensor, batch: RaggedBatch, is_tapped: bool = True) -> Tensor:
        known = self.known_ids(token_ids)
        return self.decoder.forward(known, batch, self.kv, is_tapped=is_tapped)

    def known_ids(self, token_ids: Tensor) -> Tensor:
        """The ids, clamped to those this model has an embedding for."""
        return token_ids.clamp(max=self.vocab_size - 1) if self._lacks_ids else token_ids

    def guess(
        self,
        chunk: RowChunk,
        depth: int,
        num_ids: int,
        least_survival: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> DraftTokens | None:
        """Draft up to `depth` tokens after the chunk in one call, choosing among the first
        `num_ids` ids; computes the KV of all but the last. None if unsupported. See
        `WholePasses`."""
        if self._whole is None or self._lacks_ids:
            return None
        last = chunk.start + len(chunk.tokens) + depth - 2
        blocks = self._tables[chunk.row][: last // self._block_size + 1]
        return self._whole.draft(
            chunk.tokens,
            chunk.start,
            blocks,
            depth,
            num_ids,
            least_survival,
            temperature,
            seed,
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Sequence[int], num_ids: int | None = None) -> Tensor:
        """float32 [len(indices), len(vocab.held)] of the hidden states at `indices`; with
        `num_ids`, possibly of the first `num_ids` ids only."""
        if len(indices) != hidden.shape[0]:
            hidden = hidden[torch.tensor(indices, dtype=torch.int64, device=self.device)]
        return self.decoder.logits(hidden, num_ids)[:, : len(self.vocab.held)]

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden], gathered from all ranks."""
        return self.vocab.gather(self.decoder.logits(hidden)[:, : len(self.vocab.held)])

    def score(
        self, chunks: Sequence[RowChunk], logit_indices: Sequence[int], num_ids: int | None = None
    ) -> Tensor | None:
        """Logits of the pass's tokens at `logit_indices`, in one call. None if unsupported: then
        use `forward` and `logits`. Leaves no `last_pass`."""
        whole, tokens = self._whole, self._few_tokens(chunks, logit_indices)
        if whole is None or tokens is None:
            return None
        num_ids = self.vocab_size if num_ids is None else min(num_ids, self.vocab_size)
        return whole.score(tokens, self._layout(chunks), logit_indices, num_ids)

    def best(self, chunks: Sequence[RowChunk], logit_indices: Sequence[int]) -> list[int] | None:
        """As `score`, but only the best token of each row of logits, or `NO_TOKEN`."""
        whole, tokens = self._whole, self._few_tokens(chunks, logit_indices)
        if whole is None or tokens is None:
            return None
        return whole.best(tokens, self._layout(chunks), logit_indices, self.vocab_size)

    def _few_tokens(
        self, chunks: Sequence[RowChunk], logit_indices: Sequence[int]
    ) -> list[int] | None:
        """The tokens of a pass small enough to run in one call, else None."""
        if self._whole is None or self._lacks_ids or not logit_indices:
            return None
        tokens = [token for chunk in chunks for token in chunk.tokens]
        if len(tokens) > self._whole.max_tokens:
            return None
        self.last_pass = None
        return tokens

    def scores(
        self, chunks: Sequence[RowChunk], logit_indices: Sequence[int], num_ids: int | None = None
    ) -> Tensor:
        """`score`, or `forward` and `logits` where it is unsupported."""
        scores = self.score(chunks, logit_indices, num_ids)
        if scores is not None:
            return scores
        return self.logits(self.forward(chunks), logit_indices, num_ids)

    def _places(self, chunks: Sequence[RowChunk]) -> tuple[list[int], list[int]]:
        """Positions and slots of all tokens. Plain loops: a decode pass has a handful of tokens,
        for which array operations cost more to call than to run."""
        size = self._block_size
        positions: list[int] = []
        slots: list[int] = []
        for row, start, tokens in chunks:
            table = self._tables[row]
            own = range(start, start + len(tokens))
            positions += own
            slots += [table[at // size] * size + at % size for at in own]
        return positions, slots

    def batch_of(
        self, chunks: Sequence[RowChunk], tile_tokens: Callable[[int], int]
    ) -> RaggedBatch:
        """The layout of these chunks, cut into tiles of `tile_tokens(query_len)` tokens."""
        places = self._layout(chunks)
        lengths = [len(chunk.tokens) for chunk in chunks]
        max_query_len = max(lengths)
        few, many = (tile_tokens(n) for n in (min(lengths), max_query_len))
        num_places = many // few if many > few else 0
        sizes = [few if tile_tokens(n) == few else num_places * few for n in lengths]
        tiles = _tiles(chunks, sizes, few, range(len(chunks))) if few else None
        return RaggedBatch(
            positions=self.tensor(places.positions, torch.int64),
            slots=self.tensor(places.slots, torch.int64),
            cu_query_lens=self.tensor(places.cu_query_lens, torch.int32),
            context_lens=self.tensor(places.context_lens, torch.int32),
            block_tables=self.tensor(places.block_tables, torch.int32),
            max_query_len=max_query_len,
            max_context_len=max(places.context_lens),
            tiles=None if tiles is None else self.tensor(tiles, torch.int32),
            places_of_long_tile=num_places,
        )

    def _layout(self, chunks: Sequence[RowChunk]) -> RaggedLists:
        positions, slots = self._places(chunks)
        contexts = [chunk.start + len(chunk.tokens) for chunk in chunks]
        ends = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
        max_blocks = -(-max(contexts) // self._block_size)
        tables = [self._tables[chunk.row][:max_blocks] for chunk in chunks]
        return RaggedLists(positions, slots, ends, contexts, tables)

    def tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        host = _host_tensor(values, dtype)
        if self.device.type == "cpu":
            return host
        # From pageable memory the copy would synchronise with the device.
        pinned = host.pin_memory() if self.device.type == "cuda" else host
        return pinned.to(self.device, non_blocking=True)


_ARRAY_CODES = {torch.int32: "i", torch.int64: "q"}


def _host_tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
    """Via an array: right after a pass, with cold caches, torch takes three times as long to read
    lists."""
    rows = [row for row in values if isinstance(row, list)]
    flat = [each for row in rows for each in row] if rows else values
    if not flat:
        return torch.tensor(values, dtype=dtype)
    host = torch.frombuffer(array(_ARRAY_CODES[dtype], flat), dtype=dtype)
    return host.view(len(rows), -1) if rows else host


def _tiles(
    chunks: Sequence[RowChunk], sizes: Sequence[int], step: int, table_rows: Sequence[int]
) -> list[list[int]]:
    """See `TileColumn`. For each chunk, `table_rows` has the row of its block table and `sizes` its
    tokens per tile. There is a slot for a tile every `step` tokens."""
    tiles: list[list[int]] = []
    first = 0
    for chunk, size, table_row in zip(chunks, sizes, table_rows, strict=True):
        for at in range(0, len(chunk.tokens), step):
            count = 0 if at % size else min(size, len(chunk.tokens) - at)
            tiles.append([first + at, count, chunk.start + at, table_row])
        first += len(chunk.tokens)
    return tiles


def _vocab_part(decoder: Decoder, limit: int, group: Collective) -> VocabPart:
    shard = decoder.shard
    if (group.rank, group.size) != (shard.rank, shard.size):
        raise ModelError(
            f"the decoder is rank {shard.rank} of {shard.size} but its group says rank "
            f"{group.rank} of {group.size}; build both from the same tensor_parallel."
        )
    partitions = [Partition.of(decoder.spec, Shard(rank, group.size)) for rank in range(group.size)]
    return VocabPart.of([partition.vocab for partition in partitions], limit, group)
