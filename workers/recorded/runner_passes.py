"""Passes of few tokens that the host lays out, recorded as CUDA graphs: those of ranks in processes
of their own.

What differs from pass to pass is copied to fixed addresses in one piece: where each token stands,
and the tiles attention works on. Block tables stay on the device, by row; only what changed since
the last pass is sent. Whatever a recording has room for beyond a pass is padding: tokens that are
stored nowhere, tiles of nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.types import RaggedBatch
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Partition
from outrider.workers.recorded.recording import (
    MAX_RECORDED_TOKENS,
    RecordedPasses,
    kernels_of,
    record_all,
    row_sizes,
)

logger = logging.getLogger(__name__)

Compute = Callable[[Tensor, RaggedBatch], Tensor]
"""Token ids [T] and where they stand to hidden states [T, hidden]."""

_TOKEN_FIELDS = 3  # slots, ids, positions
_TILE_FIELDS = 4  # see `TileColumn`
_NO_SLOT = -1

# A bound on what recordings take, see `recording_bytes`: the driver keeps so much for a kernel.
_BYTES_PER_KERNEL = 32 * 2**10
_LIBRARY_BYTES = 64 * 2**20  # workspace of the library's products on the stream of recordings


class _Inputs:
    """A pass as kernels read it, at fixed addresses: fields of tokens, then tiles, all int32."""

    def __init__(self, num_tokens: int, num_tiles: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._nothing = np.zeros(_TOKEN_FIELDS * num_tokens + _TILE_FIELDS * num_tiles, np.int32)
        self._nothing[:num_tokens] = _NO_SLOT
        # Passes run before there is anything to compute, to be recorded: they must store nothing.
        self._whole = torch.from_numpy(self._nothing).to(device, copy=True)
        split = _TOKEN_FIELDS * num_tokens
        self.slots, self.ids, self.positions = self._whole[:split].view(_TOKEN_FIELDS, num_tokens)
        self.tiles = self._whole[split:].view(num_tiles, _TILE_FIELDS)

    def fill(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        tiles: Sequence[Sequence[int]],
    ) -> None:
        """Copy a pass in behind those under way."""
        values = self._nothing.copy()
        split = _TOKEN_FIELDS * self._num_tokens
        tokens = values[:split].reshape(_TOKEN_FIELDS, self._num_tokens)
        tokens[:, : len(ids)] = (slots, ids, positions)
        values[split:].reshape(-1, _TILE_FIELDS)[: len(tiles)] = tiles
        self._whole.copy_(_host_tensor(values, self._whole.device), non_blocking=True)


class RunnerPasses:
    """Passes of up to `max_tokens` tokens of a runner's rows.

    A recording fixes how many tokens of a row a tile takes, whatever their number: as suits rows
    with `query_len` tokens. Longer chunks are right as well, in more tiles. It also fixes over how
    many programs attention splits a context, as suits the longest, `max_model_len`.
    """

    def __init__(
        self,
        decoder: Decoder,
        compute: Compute,
        tables: Sequence[Sequence[int]],
        max_model_len: int,
        query_len: int,
        max_tokens: int,
    ) -> None:
        device = decoder.device
        self._compute = compute
        self._max_model_len = max_model_len
        self._query_len = query_len
        self.tile_tokens = decoder.tile_tokens(query_len)
        self._tables = torch.tensor(tables, dtype=torch.int32, device=device)
        self._changes: dict[int, int] = {}  # blocks the device does not know of, by place in tables
        self._inputs = _Inputs(max_tokens, self._num_tiles(max_tokens), device)
        self._hidden = torch.zeros(
            max_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=device
        )
        # Of decoders that are tapped; else of no width.
        self.features = torch.zeros(
            max_tokens, decoder.num_features, dtype=decoder.dtype, device=device
        )
        self._decoder = decoder
        self._passes = RecordedPasses(self._run, row_sizes(max_tokens), device)

    @property
    def sizes(self) -> Sequence[int]:
        return self._passes.sizes

    @property
    def max_tokens(self) -> int:
        return self._passes.largest

    def record(self) -> None:
        """Ranks of a group do this together: their sums are part of every recording."""
        device = self._hidden.device
        if device.type != "cuda":
            return
        start_s, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        record_all([self._passes], lambda: None)
        logger.info(
            "%d passes of up to %d tokens recorded in %.1f s, %.0f MB",
            len(self._passes.sizes),
            self.max_tokens,
            time.monotonic() - start_s,
            (free - torch.cuda.mem_get_info(device)[0]) / 2**20,
        )

    def forget(self) -> None:
        self._passes.forget()

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        first = row * self._tables.shape[1] + start
        self._changes.update(zip(range(first, first + len(blocks)), blocks, strict=True))

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        tiles: Sequence[Sequence[int]],
    ) -> Tensor:
        """Hidden states of these tokens, valid until the next call. Tiles name tables by row."""
        self._flush_tables()
        self._inputs.fill(ids, positions, slots, tiles)
        self._passes.run(len(ids))
        return self._hidden[: len(ids)]

    def _run(self, size: int) -> None:
        inputs = self._inputs
        nobody = inputs.positions[:0]  # kernels that work on tiles do not ask for sequences
        batch = RaggedBatch(
            positions=inputs.positions[:size],
            slots=inputs.slots[:size],
            cu_query_lens=nobody,
            context_lens=nobody,
            block_tables=self._tables,
            max_query_len=self._query_len,
            max_context_len=self._max_model_len,
            tiles=inputs.tiles[: self._num_tiles(size)],
        )
        self._hidden[:size].copy_(self._compute(inputs.ids[:size], batch))
        if self._decoder.num_features:
            self.features[:size].copy_(self._decoder.features)

    def _num_tiles(self, size: int) -> int:
        """The most that so many tokens, of as many rows as there may be, are cut into."""
        num_rows = min(size, self._tables.shape[0])
        return min(num_rows + size // self.tile_tokens, size)

    def _flush_tables(self) -> None:
        if self._changes:
            changes = np.array([*self._changes.items()], dtype=np.int64).T.copy()
            device = self._tables.device
            places, blocks = _host_tensor(changes, device).to(device, non_blocking=True)
            self._tables.view(-1).index_put_((places,), blocks.to(self._tables.dtype))
            self._changes.clear()


def recording_bytes(decoder: Decoder, max_tokens: int = MAX_RECORDED_TOKENS) -> int:
    """A bound on the GPU memory that recorded passes hold besides what a pass takes anyway.

    All recordings share the tensors of the largest. Of these a layer has few at a time; twice as
    much leaves room for the gaps between them.
    """
    spec, own = decoder.spec, Partition.of(decoder.spec, decoder.shard)
    qkv = (len(own.heads) + 2 * len(own.kv_heads)) * spec.head_dim
    widths = 6 * spec.hidden_size + 2 * qkv + 3 * len(own.intermediate)
    tensors = 2 * widths * decoder.dtype.itemsize * max_tokens
    if decoder.quantization is not None:
        # Passes of many tokens write 8-bit weights out, one after the other; this is the largest.
        tensors += 2 * len(own.intermediate) * spec.hidden_size * decoder.dtype.itemsize
    num_kernels = kernels_of(spec.num_layers) * len(row_sizes(max_tokens))
    return tensors + num_kernels * _BYTES_PER_KERNEL + _LIBRARY_BYTES


def _host_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """To be copied to `device`. From ordinary memory that would wait for all that is under way."""
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host
