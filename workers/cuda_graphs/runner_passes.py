"""Captured passes of rank processes: small passes that the host lays out, as CUDA graphs.

What differs from pass to pass is copied to fixed addresses in one transfer: ids, positions and
slots of the tokens, and the tiles of attention. Block tables stay on the device, by row; only
changes are sent. The rest of a graph's size is padding: tokens without a slot, empty tiles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.types import RaggedBatch
from outrider.workers.cuda_graphs.captured_passes import (
    MAX_CAPTURED_TOKENS,
    CapturedPasses,
    capture_all,
    kernels_of,
    row_sizes,
)
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Partition

logger = logging.getLogger(__name__)

Compute = Callable[[Tensor, RaggedBatch], Tensor]
"""Token ids [T] and their layout to hidden states [T, hidden]."""

_TOKEN_FIELDS = 3  # slots, ids, positions
_TILE_FIELDS = 4  # see `TileColumn`
_NO_SLOT = -1

# Bounds for `cuda_graph_bytes`: memory that the driver keeps per captured kernel.
_BYTES_PER_KERNEL = 32 * 2**10
_LIBRARY_BYTES = 64 * 2**20  # cuBLAS workspace on the capture stream


class _Inputs:
    """The inputs of a pass at fixed addresses: token fields, then tiles, all int32."""

    def __init__(self, num_tokens: int, num_tiles: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._nothing = np.zeros(_TOKEN_FIELDS * num_tokens + _TILE_FIELDS * num_tiles, np.int32)
        self._nothing[:num_tokens] = _NO_SLOT
        # Capture runs passes before there is anything to compute: they must store nothing.
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
        """Enqueue the copy of a pass's inputs."""
        values = self._nothing.copy()
        split = _TOKEN_FIELDS * self._num_tokens
        tokens = values[:split].reshape(_TOKEN_FIELDS, self._num_tokens)
        tokens[:, : len(ids)] = (slots, ids, positions)
        values[split:].reshape(-1, _TILE_FIELDS)[: len(tiles)] = tiles
        self._whole.copy_(_host_tensor(values, self._whole.device), non_blocking=True)


class RunnerPasses:
    """Passes of up to `max_tokens` tokens of a runner's rows.

    A graph fixes how many tokens of a row a tile takes: as suits rows with `query_len` tokens.
    Longer chunks work too, in more tiles. It also fixes over how many programs attention splits a
    context, as suits the longest, `max_model_len`.
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
        self._changes: dict[
            int, int
        ] = {}  # blocks not sent to the device yet, by place in the tables
        self._inputs = _Inputs(max_tokens, self._num_tiles(max_tokens), device)
        self._hidden = torch.zeros(
            max_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=device
        )
        # Of width 0 unless the decoder is tapped.
        self.features = torch.zeros(
            max_tokens, decoder.num_features, dtype=decoder.dtype, device=device
        )
        self._decoder = decoder
        self._passes = CapturedPasses(self._run, row_sizes(max_tokens), device)

    @property
    def sizes(self) -> Sequence[int]:
        return self._passes.sizes

    @property
    def max_tokens(self) -> int:
        return self._passes.largest

    def capture(self) -> None:
        """Ranks of a group do this together: their collectives are part of every graph."""
        device = self._hidden.device
        if device.type != "cuda":
            return
        start_s, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        capture_all([self._passes], lambda: None)
        logger.info(
            "captured %d passes of up to %d tokens in %.1f s, %.0f MB",
            len(self._passes.sizes),
            self.max_tokens,
            time.monotonic() - start_s,
            (free - torch.cuda.mem_get_info(device)[0]) / 2**20,
        )

    def release(self) -> None:
        self._passes.release()

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
        empty = inputs.positions[:0]  # kernels that work on tiles need no sequence lengths
        batch = RaggedBatch(
            positions=inputs.positions[:size],
            slots=inputs.slots[:size],
            cu_query_lens=empty,
            context_lens=empty,
            block_tables=self._tables,
            max_query_len=self._query_len,
            max_context_len=self._max_model_len,
            tiles=inputs.tiles[: self._num_tiles(size)],
        )
        self._hidden[:size].copy_(self._compute(inputs.ids[:size], batch))
        if self._decoder.num_features:
            self.features[:size].copy_(self._decoder.features)

    def _num_tiles(self, size: int) -> int:
        """The most tiles that `size` tokens are cut into, over any number of rows."""
        num_rows = min(size, self._tables.shape[0])
        return min(num_rows + size // self.tile_tokens, size)

    def _flush_tables(self) -> None:
        if self._changes:
            changes = np.array([*self._changes.items()], dtype=np.int64).T.copy()
            device = self._tables.device
            places, blocks = _host_tensor(changes, device).to(device, non_blocking=True)
            self._tables.view(-1).index_put_((places,), blocks.to(self._tables.dtype))
            self._changes.clear()


def cuda_graph_bytes(decoder: Decoder, max_tokens: int = MAX_CAPTURED_TOKENS) -> int:
    """A bound on the GPU memory of captured passes beyond that of an uncaptured pass.

    All graphs share the tensors of the largest. A layer holds few of these at a time; the factor of
    two leaves room for fragmentation.
    """
    spec, own = decoder.spec, Partition.of(decoder.spec, decoder.shard)
    qkv = (len(own.heads) + 2 * len(own.kv_heads)) * spec.head_dim
    widths = 6 * spec.hidden_size + 2 * qkv + 3 * len(own.intermediate)
    tensors = 2 * widths * decoder.dtype.itemsize * max_tokens
    if decoder.quantization is not None:
        # Passes of many tokens dequantise 8-bit weights one at a time; this is the largest.
        tensors += 2 * len(own.intermediate) * spec.hidden_size * decoder.dtype.itemsize
    num_kernels = kernels_of(spec.num_layers) * len(row_sizes(max_tokens))
    return tensors + num_kernels * _BYTES_PER_KERNEL + _LIBRARY_BYTES


def _host_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Pinned for a CUDA `device`: from pageable memory the copy would synchronise with it."""
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host
