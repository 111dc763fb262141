"""A decoder-only transformer over a ragged batch and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.kernels.types import Linear, Ops, Pass, RaggedBatch, WholePasses
from outrider.workers.models.assembly import Assembly
from outrider.workers.models.fused import FusedPass
from outrider.workers.models.kv import KVCache
from outrider.workers.models.layers import GatedMlp, RmsNorm
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.source import (
    QuantizedSource,
    StoredSource,
    WeightCache,
    WeightSource,
)
from outrider.workers.models.spec import ModelSpec
from outrider.workers.models.taps import Taps

_NO_TAPS = Taps()


class Decoder:
    """One rank's part of a model; a model on one device is the rank of a single-rank group.

    Holds weights only: tokens, positions and the cache come with every call.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        ops: Ops,
        shard: Shard | None = None,
        quantization: str | None = None,
        weight_cache: WeightCache | None = None,
        stored: StoredSource | None = None,
        quantized: QuantizedSource | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        shard = shard or Shard()
        assembly = Assembly(
            spec,
            weights,
            ops,
            shard,
            quantization,
            weight_cache,
            stored,
            quantized,
            narrow=narrow,
        )
        self.spec = spec
        self.shard = shard
        self.quantization = quantization if quantized is None else quantized.kind
        self.vocab_range = Partition.of(spec, shard).vocab
        self._ops = ops
        self._reduce = shard.reduce
        self._embedding = assembly.embedding()
        self.device, self.dtype = weights.device, weights.dtype
        if isinstance(self._embedding, Tensor):  # has the index of its GPU
            self.device = self._embedding.device
        self._positions = assembly.learned_positions()
        self._project_in, self._project_out = assembly.projections()
        self._first_norm = assembly.first_norm()
        self._layers = assembly.layers()
        self._head = assembly.head(self._embedding)
        self._heads: dict[int, Linear] = {}  # by number of ids, the first ones only
        parts = [part for layer in self._layers for part in (layer.after_attention, layer.mlp)]
        self._is_all_kernels = (
            (shard.size == 1 or shard.is_repeatable)
            and spec.residual_multiplier == 1.0
            and all(isinstance(part, RmsNorm | GatedMlp) for part in parts)
        )
        is_plain = (
            self._positions is None
            and self._project_in is None
            and spec.embedding_multiplier == spec.residual_multiplier == 1.0
        )
        self._is_plain = is_plain and spec.logits_divisor == 1.0
        self._fused = (
            FusedPass.of(ops, shard, self._embedding, self._first_norm, self._layers)
            if is_plain and isinstance(self._embedding, Tensor)
            else None
        )
        self._taps = Taps()
        self._kv: KVCache | None = None  # the cache `_run` works on
        self._run: Pass | None = None  # untapped

    @property
    def whole_embedding(self) -> Tensor | None:
        """[vocab_size, embed_size], read-only; None if other ranks hold parts of it, or if it is
        kept in its stored format."""
        is_whole = len(self.vocab_range) == self.spec.vocab_size
        return self._embedding if is_whole and isinstance(self._embedding, Tensor) else None

    def tile_tokens(self, query_len: int) -> int:
        """Queries per tile of `RaggedBatch.tiles` for sequences with `query_len` queries; 0: needs
        no tiles."""
        attention = self._layers[0].attention
        return self._ops.tile_tokens(attention.num_heads, attention.num_kv_heads, query_len)

    def tap(self, layers: Sequence[int]) -> None:
        """From now on tapped passes keep the residual stream entering these layers as `features`;
        index `num_layers` is the output of the last."""
        self._taps = Taps(layers)

    @property
    def num_features(self) -> int:
        return len(self._taps.layers) * self.spec.hidden_size

    @property
    def features(self) -> Tensor:
        """Auxiliary hidden states of the last tapped pass, [T, layers tapped * hidden_size]."""
        return self._taps.features

    def write_features(self, out: Tensor) -> None:
        """Write `features` into `out` and release them."""
        self._taps.write(out)

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, kv: KVCache, *, is_tapped: bool = True
    ) -> Tensor:
        """Token ids int64 [T] to hidden states [T, hidden_size] after the final norm.

        Writes the keys and values of all T tokens into the cache.
        """
        taps = self._taps if is_tapped else _NO_TAPS
        if self._fused is not None:
            return self._fused(token_ids, self._lookup, batch, kv, None, taps)
        embedded = self._embed(token_ids, batch)
        if taps.layers:  # a replayed pass overwrites the residual stream
            return self._run_layers(embedded, batch, kv, taps)
        return self._pass_over(kv)(embedded, batch)

    def whole_passes(self, kv: KVCache) -> WholePasses | None:
        """Whole untapped passes over this cache as single calls; None if kernels lack them."""
        table = self._embedding
        is_simple = self._is_plain and self._is_all_kernels and self.shard.size == 1
        if isinstance(table, Tensor) or not (is_simple and self.spec.tied):
            return None
        return self._ops.whole_passes(self._pass_over(kv), table, kv.block_size)

    def forward_some(
        self, token_ids: Tensor, batch: RaggedBatch, kv: KVCache, index: Tensor
    ) -> Tensor:
        """`forward`, but only the hidden states of the tokens at `index` [n] are returned."""
        if self._fused is not None:
            return self._fused(token_ids, self._lookup, batch, kv, index, self._taps)
        return self.forward(token_ids, batch, kv).index_select(0, index)

    def _pass_over(self, kv: KVCache) -> Pass:
        """The pass over this cache, replayable if it consists of kernels alone."""
        if self._run is not None and kv is self._kv:
            return self._run

        def run(residual: Tensor, batch: RaggedBatch) -> Tensor:
            return self._run_layers(residual, batch, kv, _NO_TAPS)

        self._kv = kv
        self._run = self._ops.captured(run) if self._is_all_kernels else run
        return self._run

    def _run_layers(self, residual: Tensor, batch: RaggedBatch, kv: KVCache, taps: Taps) -> Tensor:
        reduce, multiplier = self._reduce, self.spec.residual_multiplier
        x = self._first_norm(residual)
        for number, layer in enumerate(self._layers):
            taps.observe(number, residual)
            keys, values = kv.keys[number], kv.values[number]
            out = reduce(layer.attention(x, batch, keys, values))
            if multiplier != 1.0:
                out = out * multiplier
            x, residual = layer.after_attention.add(out, residual)
            out = reduce(layer.mlp(x))
            if multiplier != 1.0:
                out = out * multiplier
            x, residual = layer.after_mlp.add(out, residual)
        taps.observe(len(self._layers), residual)
        return x

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """Hidden states [n, hidden_size] to float32 [n, local vocabulary], see `vocab_range`; with
        `num_ids`, possibly of the first `num_ids` ids only."""
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        logits = self._ops.logits(self._head_of(num_ids), hidden)
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor

    def _head_of(self, num_ids: int | None) -> Linear:
        table, size = self._embedding, self.spec.vocab_size
        is_whole = self.spec.tied and len(self.vocab_range) == size
        if num_ids is None or num_ids >= size or not is_whole or isinstance(table, Tensor):
            return self._head
        if num_ids not in self._heads:
            self._heads[num_ids] = table.head(num_ids)
        return self._heads[num_ids]

    def _embed(self, token_ids: Tensor, batch: RaggedBatch) -> Tensor:
        x = self._lookup(token_ids)
        if self._project_in is not None:
            x = self._project_in(x)
        if self.spec.embedding_multiplier != 1.0:
            x = x * self.spec.embedding_multiplier
        if self._positions is not None:
            x = x + self._ops.embed(batch.positions, self._positions)
        return x

    def _lookup(self, token_ids: Tensor) -> Tensor:
        held = self.vocab_range
        if len(held) == self.spec.vocab_size:
            return self._rows(token_ids)
        is_elsewhere = (token_ids < held.start) | (token_ids >= held.stop)
        rows = (token_ids - held.start).masked_fill(is_elsewhere, 0)
        return self._reduce(self._rows(rows).masked_fill(is_elsewhere[:, None], 0))

    def _rows(self, ids: Tensor) -> Tensor:
        table = self._embedding
        return self._ops.embed(ids, table) if isinstance(table, Tensor) else table(ids)
