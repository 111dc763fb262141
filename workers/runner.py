"""Runs a decoder over ragged chunks of rows and a paged cache: what target and draft share."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.types import Guesses, Places, RaggedBatch
from outrider.workers.groups.collective import Alone, Collective
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.recorded.recording import MAX_RECORDED_TOKENS
from outrider.workers.recorded.runner_passes import RunnerPasses
from outrider.workers.sampling.vocab import VocabPart


class Chunk(NamedTuple):
    """Tokens of one row to compute, from position `start` on."""

    row: int
    start: int
    tokens: Sequence[int]


class Passed(NamedTuple):
    """What a pass leaves for those who read the target's hidden states; valid until the next."""

    chunks: Sequence[Chunk]
    features: Tensor  # [total tokens, ...]


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
        self.num_rows = num_rows
        self._block_size = kv.block_size
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables = [[0] * max_blocks for _ in range(num_rows)]
        self._recorded: RunnerPasses | None = None
        self._whole = decoder.whole_passes(kv)
        self._layers: tuple[int, ...] | None = None
        self.reader: str | None = None
        self.passed: Passed | None = None

    def hand_over(self, layers: Sequence[int], reader: str) -> None:
        """Before anything is recorded: passes are to leave what enters these layers of the decoder,
        or, if there are none, its hidden states, as `passed`. The `reader` is the proposer that
        wants it, of rows that it may draft for."""
        self._layers = tuple(layers)
        self.reader = reader
        self.decoder.tap(layers)

    def record(self, query_len: int, max_tokens: int = MAX_RECORDED_TOKENS) -> None:
        """Run passes of up to `max_tokens` tokens as recorded from now on, where kernels work on
        tiles: others read on the host how long sequences are, which a recording cannot.

        `query_len` is how many tokens a row usually has in a pass. Ranks of a group record
        together, and only if their sums can be recorded (`can_record` in `workers/groups/`).
        """
        if self.decoder.tile_tokens(query_len):
            self._recorded = RunnerPasses(
                self.decoder,
                self._compute,
                self._tables,
                self.max_model_len,
                query_len,
                max_tokens,
            )
            self._recorded.record()

    @property
    def recorded_sizes(self) -> Sequence[int]:
        """Passes of up to so many tokens each are padded to the next of these; none if none is
        recorded."""
        return () if self._recorded is None else self._recorded.sizes

    def forget_recordings(self) -> None:
        """To be done before the group is given up: NCCL would wait for ever until no recording
        holds its sums."""
        if self._recorded is not None:
            self._recorded.forget()
            self._recorded = None

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._tables[row][start : start + len(blocks)] = blocks
            if self._recorded is not None:
                self._recorded.extend_table(row, start, blocks)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], *, is_read: bool = True) -> Tensor:
        """Hidden states [total tokens, hidden] of all chunks, one after the other. Those of a
        recorded pass are valid until the next `forward`. Unless it `is_read` by whom passes are
        handed over to, it leaves nothing for them, which may take less."""
        is_read = is_read and self._layers is not None
        ids = [token for chunk in chunks for token in chunk.tokens]
        recorded = self._recorded
        if recorded is None or len(ids) > recorded.max_tokens:
            batch = self.batch_of(chunks, self.decoder.tile_tokens)
            hidden = self._compute(self.tensor(ids, torch.int64), batch, is_read)
            features = self.decoder.features if is_read and self._layers else hidden
        else:
            size = recorded.tile_tokens
            tiles = _tiles(chunks, [size] * len(chunks), size, [chunk.row for chunk in chunks])
            hidden = recorded.run(ids, *self._places(chunks), tiles)
            features = recorded.features[: len(ids)] if self._layers else hidden
        self.passed = Passed(chunks, features) if is_read else None
        return hidden

    def _compute(self, token_ids: Tensor, batch: RaggedBatch, is_tapped: bool = True) -> Tensor:
        known = self.known_ids(token_ids)
        return self.decoder.forward(known, batch, self.kv, is_tapped=is_tapped)

    def known_ids(self, token_ids: Tensor) -> Tensor:
        """Ids this model has an embedding for."""
        return token_ids.clamp(max=self.vocab_size - 1) if self._lacks_ids else token_ids

    def guess(
        self,
        chunk: Chunk,
        depth: int,
        num_ids: int,
        least_survival: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Guesses | None:
        """Up to so many of the first `num_ids` tokens behind the chunk, each but the last computed
        as well, in one call; None where that cannot be. See `WholePasses`."""
        if self._whole is None or self._lacks_ids:
            return None
        last = chunk.start + len(chunk.tokens) + depth - 2
        blocks = self._tables[chunk.row][: last // self._block_size + 1]
        return self._whole.guess(
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
        `num_ids`, perhaps of so many of the first ids only."""
        if len(indices) != hidden.shape[0]:
            hidden = hidden[torch.tensor(indices, dtype=torch.int64, device=self.device)]
        return self.decoder.logits(hidden, num_ids)[:, : len(self.vocab.held)]

    def score(
        self, chunks: Sequence[Chunk], wanted: Sequence[int], num_ids: int | None = None
    ) -> Tensor | None:
        """What follows the tokens of the chunks at the indices `wanted`, in one call: `forward` and
        `logits`, which is left to them where this is None. Nobody reads the pass."""
        whole, tokens = self._whole, self._few_tokens(chunks, wanted)
        if whole is None or tokens is None:
            return None
        num_ids = self.vocab_size if num_ids is None else min(num_ids, self.vocab_size)
        return whole.score(tokens, self._layout(chunks), wanted, num_ids)

    def best(self, chunks: Sequence[Chunk], wanted: Sequence[int]) -> list[int] | None:
        """Likewise, but only the best token of each, or `NO_TOKEN`, where nobody asks for more."""
        whole, tokens = self._whole, self._few_tokens(chunks, wanted)
        if whole is None or tokens is None:
            return None
        return whole.best(tokens, self._layout(chunks), wanted, self.vocab_size)

    def _few_tokens(self, chunks: Sequence[Chunk], wanted: Sequence[int]) -> list[int] | None:
        """Those of a pass that can be one call."""
        if self._whole is None or self._lacks_ids or not wanted:
            return None
        tokens = [token for chunk in chunks for token in chunk.tokens]
        if len(tokens) > self._whole.max_tokens:
            return None
        self.passed = None
        return tokens

    def scores(
        self, chunks: Sequence[Chunk], wanted: Sequence[int], num_ids: int | None = None
    ) -> Tensor:
        """`score` in one way or another."""
        scores = self.score(chunks, wanted, num_ids)
        if scores is not None:
            return scores
        return self.logits(self.forward(chunks), wanted, num_ids)

    def _places(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """Positions and slots of all tokens. Plain loops: a decode pass has a handful of tokens,
        where array operations cost more to call than to run."""
        size = self._block_size
        positions: list[int] = []
        slots: list[int] = []
        for row, start, tokens in chunks:
            table = self._tables[row]
            own = range(start, start + len(tokens))
            positions += own
            slots += [table[at // size] * size + at % size for at in own]
        return positions, slots

    def batch_of(self, chunks: Sequence[Chunk], tile_tokens: Callable[[int], int]) -> RaggedBatch:
        """Where the tokens of these chunks stand, in tiles as somebody wants them."""
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

    def _layout(self, chunks: Sequence[Chunk]) -> Places:
        positions, slots = self._places(chunks)
        contexts = [chunk.start + len(chunk.tokens) for chunk in chunks]
        ends = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
        max_blocks = -(-max(contexts) // self._block_size)
        tables = [self._tables[chunk.row][:max_blocks] for chunk in chunks]
        return Places(positions, slots, ends, contexts, tables)

    def tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        host = _host_tensor(values, dtype)
        if self.device.type == "cpu":
            return host
        # From ordinary memory the copy would wait for everything under way.
        pinned = host.pin_memory() if self.device.type == "cuda" else host
        return pinned.to(self.device, non_blocking=True)


_ARRAY_CODES = {torch.int32: "i", torch.int64: "q"}


def _host_tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
    """By way of an array: right after a pass, when nothing else is in the caches, torch takes three
    times as long to read lists."""
    rows = [row for row in values if isinstance(row, list)]
    flat = [each for row in rows for each in row] if rows else values
    if not flat:
        return torch.tensor(values, dtype=dtype)
    host = torch.frombuffer(array(_ARRAY_CODES[dtype], flat), dtype=dtype)
    return host.view(len(rows), -1) if rows else host


def _tiles(
    chunks: Sequence[Chunk], sizes: Sequence[int], step: int, table_rows: Sequence[int]
) -> list[list[int]]:
    """See `TileColumn`; each chunk's block table is at its place in `table_rows`, and how many of
    its tokens a tile takes in `sizes`. There is a place for one every `step` tokens."""
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
