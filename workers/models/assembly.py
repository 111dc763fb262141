"""Reads a rank's weights and builds the parts of its decoder.

Fused weights are filled slice by slice and passed to the kernels one at a time, so that at most
one of them exists twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.grouped import blocks_of
from outrider.kernels.quantized import QuantizedWeight, quantize
from outrider.kernels.stored import StoredTable, StoredWeight
from outrider.kernels.types import Linear, Ops
from outrider.progress_stages import stage
from outrider.workers.models.layers import (
    ACTIVATIONS,
    Attention,
    GatedMlp,
    Layer,
    LayerNorm,
    NoNorm,
    Norm,
    PlainMlp,
    RmsNorm,
    Rotation,
)
from outrider.workers.models.names import Names, names_of
from outrider.workers.models.quantized import QuantizedLinears
from outrider.workers.models.rope import rope_tables
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.source import (
    QuantizedSource,
    StoredSource,
    WeightCache,
    WeightRequest,
    WeightSource,
)
from outrider.workers.models.spec import ModelSpec
from outrider.workers.models.stored import StoredParts


@dataclass(frozen=True, slots=True)
class _Split:
    """One projection of a fused weight: its rows in the checkpoint and the rows taken."""

    name: str
    num_rows: int
    rows: range


class Assembly:
    """Builds each part of a decoder once; keeps nothing it has built.

    With `quantization` the linears of layers get 8-bit weights, scaled per rank. Weights in the
    `weight_cache` are not read again. `stored` are weights to keep in their stored format. Both
    need kernels that can pack. With `narrow`, stored weights of 16 bits or more are rounded to 8,
    except an embedding that is not tied to the head. Linears that are `quantized` in the checkpoint
    are taken from there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        ops: Ops,
        shard: Shard,
        quantization: str | None = None,
        weight_cache: WeightCache | None = None,
        stored: StoredSource | None = None,
        quantized: QuantizedSource | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        self._weight_cache = weight_cache
        self._narrow = narrow
        packing = ops.packing
        self._stored = (
            None
            if stored is None or packing is None
            else StoredParts(packing.stored, stored, weight_cache)
        )
        self._spec = spec
        self._source = source
        self._ops = ops
        self._quantized = (
            None if quantized is None else QuantizedLinears(source, quantized, ops, self._linear)
        )
        self._quantization = quantization
        self._names: Names = names_of(spec.family)
        self._part = Partition.of(spec, shard)
        self._is_first = shard.rank == 0

    def embedding(self) -> Tensor | StoredTable:
        spec, rows = self._spec, self._part.vocab
        name, shape = f"{self._names.embed}.weight", (spec.vocab_size, spec.embed_size)
        own = (len(rows), spec.embed_size)

        def read() -> Tensor:
            return self._source.read(name, shape, rows=rows)

        if self._stored is not None:
            request = WeightRequest(name, shape, rows)
            if spec.tied and self._narrow and self._stored.gains_by_int8([request], own):
                return self._stored.int8_table(name, own, lambda: quantize(read(), "int8"))
            table = self._stored.table(request)
            if table is not None:
                return table
        if self._weight_cache is None:
            return read()

        def fill(out: Tensor) -> None:
            out.view(own).copy_(read())

        return self._weight_cache.tensor(name, math.prod(own), fill).view(own)

    def learned_positions(self) -> Tensor | None:
        spec = self._spec
        if spec.rope is not None:
            return None
        first = spec.position_offset
        return self._source.read(
            f"{self._names.positions}.weight",
            (spec.num_learned_positions, spec.hidden_size),
            rows=range(first, first + spec.max_position),
        )

    def projections(self) -> tuple[Linear | None, Linear | None]:
        """Projections into and out of the hidden size, if embeddings have another (OPT 350m)."""
        wide, narrow = self._spec.hidden_size, self._spec.embed_size
        if wide == narrow:
            return None, None
        into = self._source.read(f"{self._names.project_in}.weight", (wide, narrow))
        out = self._source.read(f"{self._names.project_out}.weight", (narrow, wide))
        return self._ops.linear(into, None), self._ops.linear(out, None)

    def head(self, embedding: Tensor | StoredTable) -> Linear:
        own = (len(self._part.vocab), self._spec.embed_size)
        if self._spec.tied:
            if isinstance(embedding, Tensor):
                return self._linear("head", own, lambda: embedding, None)
            return embedding.head(own[0])
        name, shape = f"{self._names.head}.weight", (self._spec.vocab_size, self._spec.embed_size)

        def read() -> Tensor:
            return self._source.read(name, shape, rows=self._part.vocab)

        request = WeightRequest(name, shape, self._part.vocab)
        if self._quantized is not None:
            quantized = self._quantized.linear(name, [request], None)
            if quantized is not None:
                return quantized
        if self._stored is not None:
            if self._narrow and self._stored.gains_by_int8([request], own):
                return self._stored.int8_linear(name, own, lambda: quantize(read(), "int8"), None)
            head = self._stored.linear([request], None)
            if head is not None:
                return head
        return self._linear("head", own, read, None)

    def first_norm(self) -> Norm:
        return NoNorm() if self._spec.norm_after else self._layer_norm(0, 0)

    def layers(self) -> list[Layer]:
        cos, sin = self._tables()
        num_layers, made = self._spec.num_layers, []
        with stage("reading weights") as update:
            for index in range(num_layers):
                update(f"reading weights (layer {index + 1} of {num_layers})")
                made.append(self._layer(index, cos, sin))
        return made

    def _tables(self) -> tuple[Tensor | None, Tensor | None]:
        spec = self._spec
        if spec.rope is None:
            return None, None
        return rope_tables(spec.rope, spec.head_dim, spec.max_position, self._source.device)

    def _layer(self, index: int, cos: Tensor | None, sin: Tensor | None) -> Layer:
        spec, prefix = self._spec, self._names.layer(index)
        attention = Attention(
            ops=self._ops,
            qkv=self._qkv(prefix),
            out=self._row_parallel(
                f"{prefix}.{self._names.out}",
                spec.num_heads * spec.head_dim,
                _scaled(self._part.heads, spec.head_dim),
                spec.out_bias,
            ),
            rotation=self._rotation(prefix, cos, sin),
            num_heads=len(self._part.heads),
            num_kv_heads=len(self._part.kv_heads),
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=spec.windows[index],
        )
        after_attention, after_mlp = self._norms_after(index)
        return Layer(attention, after_attention, self._mlp(prefix), after_mlp)

    def _norms_after(self, index: int) -> tuple[Norm, Norm]:
        """A block is followed by its own norm (post-norm) or by the norm of the next block."""
        if self._spec.norm_after:
            return self._layer_norm(index, 0), self._layer_norm(index, 1)
        if index + 1 < self._spec.num_layers:
            return self._layer_norm(index, 1), self._layer_norm(index + 1, 0)
        if not self._spec.final_norm:
            return self._layer_norm(index, 1), NoNorm()
        return self._layer_norm(index, 1), self._norm(self._names.final_norm)

    def _qkv(self, prefix: str) -> Linear:
        spec, names, part = self._spec, self._names, self._part
        kv_rows = _scaled(part.kv_heads, spec.head_dim)
        kv_total = spec.num_kv_heads * spec.head_dim
        query_rows = _scaled(part.heads, spec.head_dim)
        splits = [
            _Split(f"{prefix}.{names.query}", spec.num_heads * spec.head_dim, query_rows),
            _Split(f"{prefix}.{names.key}", kv_total, kv_rows),
            _Split(f"{prefix}.{names.value}", kv_total, kv_rows),
        ]
        return self._column_parallel(splits, spec.qkv_bias)

    def _mlp(self, prefix: str) -> GatedMlp | PlainMlp:
        spec, names, part = self._spec, self._names, self._part
        down = self._row_parallel(
            f"{prefix}.{names.down}", spec.intermediate_size, part.intermediate, spec.mlp_bias
        )
        parts = (names.gate, names.up) if spec.gated else (names.up,)
        splits = [
            _Split(f"{prefix}.{name}", spec.intermediate_size, part.intermediate) for name in parts
        ]
        up = self._column_parallel(splits, spec.mlp_bias)
        if spec.gated:
            return GatedMlp(self._ops, up, down)
        return PlainMlp(up, ACTIVATIONS[spec.activation], down)

    def _column_parallel(self, splits: list[_Split], has_bias: bool) -> Linear:
        width = self._spec.hidden_size
        shape = (sum(len(split.rows) for split in splits), width)

        def read() -> Tensor:
            return self._fused([f"{s.name}.weight" for s in splits], splits, (width,))

        bias = self._fused([f"{s.name}.bias" for s in splits], splits, ()) if has_bias else None
        requests = [WeightRequest(f"{s.name}.weight", (s.num_rows, width), s.rows) for s in splits]
        return self._layer_linear(splits[0].name, requests, shape, read, bias)

    def _layer_linear(
        self,
        name: str,
        requests: list[WeightRequest],
        shape: tuple[int, int],
        read: Callable[[], Tensor],
        bias: Tensor | None,
    ) -> Linear:
        """`requests` are the weights that `read` returns, fused to `shape`."""
        if self._quantized is not None:
            quantized = self._quantized.linear(name, requests, bias)
            if quantized is not None:
                return quantized
        kind = self._quantization
        if kind is None and self._narrow and self._stored is not None:
            kind = "int8" if self._stored.gains_by_int8(requests, shape) else None
        if kind is not None:
            if self._stored is not None and self._stored.supports_int8(kind, shape):
                return self._stored.int8_linear(name, shape, lambda: quantize(read(), kind), bias)
            return self._linear(name, shape, lambda: quantize(read(), kind), bias)
        if self._stored is not None:
            linear = self._stored.linear(requests, bias)
            if linear is not None:
                return linear
        return self._linear(name, shape, read, bias)

    def _linear(
        self,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], Tensor | QuantizedWeight],
        bias: Tensor | None,
        stored_kind: str | None = None,
    ) -> Linear:
        """`stored_kind` is that of blocks which hold the same as a quantized weight."""
        if stored_kind is not None and self._stored is not None:

            def read_blocks() -> StoredWeight:
                weight = read()
                assert isinstance(weight, QuantizedWeight)
                return blocks_of(weight, stored_kind)

            linear = self._stored.linear_of(stored_kind, name, shape, read_blocks, bias)
            if linear is not None:
                return linear
        packing = self._ops.packing
        if self._weight_cache is None or packing is None:
            return self._ops.linear(read(), bias)
        packed = self._weight_cache.tensor(
            name, packing.packed_len(shape), lambda out: packing.pack(read(), out)
        )
        return packing.packed_linear(packed, shape, bias)

    def _fused(self, names: list[str], splits: list[_Split], inner: tuple[int, ...]) -> Tensor:
        read = self._source.read
        first = read(names[0], (splits[0].num_rows, *inner), rows=splits[0].rows)
        if len(splits) == 1:
            return first
        total = sum(len(split.rows) for split in splits)
        fused = torch.empty((total, *inner), dtype=first.dtype, device=first.device)
        start = len(splits[0].rows)
        fused[:start] = first
        for name, split in zip(names[1:], splits[1:], strict=True):
            stop = start + len(split.rows)
            fused[start:stop] = read(name, (split.num_rows, *inner), rows=split.rows)
            start = stop
        return fused

    def _row_parallel(self, name: str, num_columns: int, columns: range, has_bias: bool) -> Linear:
        """The first rank adds the bias, so the all-reduce has it once."""
        hidden = self._spec.hidden_size
        request = WeightRequest(f"{name}.weight", (hidden, num_columns), columns=columns)

        def read() -> Tensor:
            return self._source.read(request.name, request.shape, columns=columns)

        adds_bias = has_bias and self._is_first
        bias = self._source.read(f"{name}.bias", (hidden,)) if adds_bias else None
        return self._layer_linear(name, [request], (hidden, len(columns)), read, bias)

    def _rotation(self, prefix: str, cos: Tensor | None, sin: Tensor | None) -> Rotation:
        spec, names = self._spec, self._names
        if not spec.qk_norm:
            return Rotation(cos, sin)
        shape = (spec.head_dim,)
        return Rotation(
            cos,
            sin,
            self._source.read(f"{prefix}.{names.query_norm}.weight", shape),
            self._source.read(f"{prefix}.{names.key_norm}.weight", shape),
            spec.norm_eps,
        )

    def _layer_norm(self, layer: int, which: int) -> Norm:
        return self._norm(f"{self._names.layer(layer)}.{self._names.norms[which]}")

    def _norm(self, name: str) -> Norm:
        spec, shape = self._spec, (self._spec.hidden_size,)
        if spec.norm == "rms":
            weight = self._source.read(f"{name}.weight", shape)
            return RmsNorm(self._ops, weight, spec.norm_eps)
        if spec.norm_affine:
            weight = self._source.read(f"{name}.weight", shape)
            bias = self._source.read(f"{name}.bias", shape)
        else:
            weight = torch.ones(shape, dtype=self._source.dtype, device=self._source.device)
            bias = torch.zeros_like(weight)
        return LayerNorm(self._ops, weight, bias, spec.norm_eps, spec.norm_after)


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)
