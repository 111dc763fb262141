"""The operations as C kernels, for float32 on CPUs.

Every result is bitwise independent of the other rows of the pass, so this backend is always
deterministic. Arguments are checked where a mistake would corrupt memory; shapes are the caller's
responsibility.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu import native
from outrider.kernels.cpu.capture import CapturedPass, PassCapture, batch_struct
from outrider.kernels.cpu.native import CAttention, CBatch, CLayer, CRotation, bind, check
from outrider.kernels.cpu.stored import CpuStored, CpuTable
from outrider.kernels.cpu.whole_passes import CpuWholePasses
from outrider.kernels.quantized import ActivationScheme, QuantizedWeight, whole
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.stored import StoredTable
from outrider.kernels.types import Linear, Pass, RaggedBatch, WholePasses

_FLOAT32 = torch.float32
_PANEL = 16
_MAX_HEAD_DIM = 256
# Multiply-adds from which on the interpreter lock is released. Below, releasing and acquiring it
# can take longer than the work itself.
_RELEASE_LOCK_WORK = 1 << 25
_RELEASE_LOCK_ELEMENTS = 1 << 18  # of activations that are rounded
_MAX_MODEL_ROWS = 16


class CpuOps:
    """See `outrider.kernels.types.Ops`.

    All instances share the process's helper threads, as many as torch had when the last instance
    was created.
    """

    name = "c"
    deterministic = True
    supports_strided_blocks = True

    def __init__(self, library_path: Path) -> None:
        # The same functions, called with the interpreter lock held and released.
        self._holding = bind(ctypes.PyDLL(str(library_path)))
        self._releasing = bind(ctypes.CDLL(str(library_path)))
        self._holding.set_num_threads(torch.get_num_threads())
        self._fallback = ReferenceOps(deterministic=True)
        self._batch: RaggedBatch | None = None
        self._c_struct = CBatch()
        self._models: dict[tuple[int, ...], Tensor] = {}
        self.capture: PassCapture | None = None  # in progress
        self.stored = CpuStored(self._holding, self._releasing, self._empty, self.record)

    @property
    def fused(self) -> None:
        return None

    @property
    def packing(self) -> CpuOps:
        return self

    @property
    def layout(self) -> str:
        return f"panels of {_PANEL}"

    def tile_tokens(self, num_heads: int, num_kv_heads: int, query_len: int) -> int:
        return 0

    def captured(self, run: Pass) -> Pass:
        return CapturedPass(run, self)

    def whole_passes(self, run: Pass, table: StoredTable, block_size: int) -> WholePasses | None:
        if not (isinstance(run, CapturedPass) and isinstance(table, CpuTable)):
            return None
        return CpuWholePasses(run, table, block_size, self._releasing)

    @property
    def library(self) -> SimpleNamespace:
        """The C functions, for operations that live in other modules."""
        return self._releasing

    def record(self, operation: int, arguments: tuple[int, ...], kept: object) -> None:
        """Add an operation that has run to the capture; `kept` keeps its memory alive."""
        if self.capture is not None:
            self.capture.add(operation, arguments, 0.0, kept)

    def invalidate_capture(self) -> None:
        """An operation has run that cannot be captured."""
        if self.capture is not None:
            self.capture.is_complete = False

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        """8-bit weights are dequantized."""
        out_features, in_features = weight.shape
        shape = (out_features, in_features)
        packed = torch.empty(self.packed_len(shape), dtype=torch.float32)
        self.pack(weight, packed)
        return self.packed_linear(packed, shape, bias)

    def packed_len(self, shape: tuple[int, int]) -> int:
        return _padded(shape[0]) * shape[1]

    def pack(self, weight: Tensor | QuantizedWeight, out: Tensor) -> None:
        out_features, in_features = weight.shape
        if out.numel() != self.packed_len((out_features, in_features)):
            raise ValueError(f"{out.numel()} values cannot hold a packed {tuple(weight.shape)}.")
        dense = _dense(whole(weight).detach())
        self._releasing.linear_pack(dense.data_ptr(), out_features, in_features, out.data_ptr())

    def packed_linear(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Linear:
        out_features, in_features = shape
        if bias is not None:
            bias = F.pad(_dense(bias.detach()), (0, _padded(out_features) - out_features))
        layer = CLayer(packed.data_ptr(), _address(bias), out_features, in_features)
        return self._packed_linear(layer, (packed, bias))

    def _packed_linear(self, layer: CLayer, memory: tuple[Tensor | None, ...]) -> Linear:
        """`memory` is what `layer` points to; the function keeps both alive."""
        out_features, in_features = layer.out_features, layer.in_features
        address = addressof(layer)
        holding, releasing, empty = self._holding.linear, self._releasing.linear, self._empty
        heavy_rows = _RELEASE_LOCK_WORK // (out_features * in_features)

        def apply(x: Tensor, _owned: object = (layer, memory)) -> Tensor:
            num_rows, width = x.shape
            if width != in_features:
                raise ValueError(f"A linear layer of {in_features} inputs got {width}.")
            x = _dense(x)
            out = empty((num_rows, out_features))
            function = releasing if num_rows > heavy_rows else holding
            arguments = (address, x.data_ptr(), num_rows, out.data_ptr())
            function(*arguments)
            if self.capture is not None:
                self.capture.add(native.LINEAR, arguments, 0.0, (layer, memory, x, out))
            return out

        return apply

    def with_activations(self, linear: Linear, scheme: ActivationScheme) -> Linear:
        return lambda x: linear(self._fake_quantized(x, scheme))

    def _fake_quantized(self, x: Tensor, scheme: ActivationScheme) -> Tensor:
        x = _dense(x)
        num_rows, width = x.shape
        out = self._empty((num_rows, width))
        inputs = (x.data_ptr(), num_rows, width, scheme.group_len or width)
        scale = scheme.scale or 0.0
        is_heavy = num_rows * width > _RELEASE_LOCK_ELEMENTS
        library = self._releasing if is_heavy else self._holding
        library.fake_quantize(*inputs, scale, out.data_ptr())
        if self.capture is not None:
            self.capture.add(native.FAKE_QUANTIZE, (*inputs, out.data_ptr()), scale, (x, out))
        return out

    def stacked(self, linears: Sequence[Linear]) -> Linear:
        def apply(x: Tensor) -> Tensor:
            self.invalidate_capture()
            return torch.cat([linear(x) for linear in linears], dim=-1)

        return apply

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _dense(x)
        out = self._empty(tuple(x.shape))
        width = x.shape[-1]
        num_rows = x.numel() // width
        inputs = (x.data_ptr(), weight.data_ptr(), num_rows, width)
        self._holding.rms_norm(*inputs, eps, out.data_ptr())
        if self.capture is not None:
            self.capture.add(native.RMS_NORM, (*inputs, out.data_ptr()), eps, (x, weight, out))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, residual = _dense(x), _dense(residual)
        num_rows, width = x.shape
        out, total = self._empty((num_rows, width)), self._empty((num_rows, width))
        inputs = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, width)
        outputs = (out.data_ptr(), total.data_ptr())
        self._holding.add_rms_norm(*inputs, eps, *outputs)
        if self.capture is not None:
            kept = (x, residual, weight, out, total)
            self.capture.add(native.ADD_RMS_NORM, (*inputs, *outputs), eps, kept)
        return out, total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        self.invalidate_capture()
        x = _dense(x)
        out = torch.empty_like(x)
        num_rows, width = x.shape
        self._holding.layer_norm(
            x.data_ptr(),
            weight.data_ptr(),
            _address(bias),
            num_rows,
            width,
            eps,
            out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _dense(gate_up)
        num_rows, double_width = gate_up.shape
        width = double_width // 2
        out = self._empty((num_rows, width))
        arguments = (gate_up.data_ptr(), num_rows, width, out.data_ptr())
        self._holding.silu_mul(*arguments)
        if self.capture is not None:
            self.capture.add(native.SILU_MUL, arguments, 0.0, (gate_up, out))
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        batch: RaggedBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> Tensor:
        qkv = _dense(qkv)
        num_blocks, _, block_size, _ = key_cache.shape
        q = self._empty((qkv.shape[0], num_heads, head_dim))
        rotation = CRotation(
            _address(cos),
            _address(sin),
            _address(q_norm),
            _address(k_norm),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            0 if cos is None else cos.shape[0],
            num_blocks * block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            key_cache.stride(0),
            norm_eps,
        )
        arguments = (addressof(rotation), self._c_batch(batch), qkv.data_ptr(), q.data_ptr())
        check(self._holding.rotate_and_store(*arguments))
        if self.capture is not None:
            kept = (rotation, qkv, q, cos, sin, q_norm, k_norm, key_cache, value_cache)
            self.capture.add(native.ROTATE_AND_STORE, arguments, 0.0, kept)
        return q

    def attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        if head_dim % _PANEL or head_dim > _MAX_HEAD_DIM:
            self.invalidate_capture()
            return self._fallback.attention(q, key_cache, value_cache, batch, scale, window)
        q = _dense(q)
        num_blocks, num_kv_heads, block_size, _ = key_cache.shape
        out = self._empty((num_tokens, num_heads * head_dim))
        arguments = CAttention(
            q.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            num_blocks,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            key_cache.stride(0),
            window,
            scale,
        )
        heavy = q.numel() * batch.max_context_len > _RELEASE_LOCK_WORK
        library = self._releasing if heavy else self._holding
        addresses = (addressof(arguments), self._c_batch(batch))
        check(library.attention(*addresses))
        if self.capture is not None:
            kept = (arguments, q, key_cache, value_cache, out)
            self.capture.add(native.ATTENTION, addresses, 0.0, kept)
        return out

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        return head(hidden).float()

    def gumbel_argmax(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
    ) -> Tensor:
        return self.gumbel_max(scores, seeds, streams, positions, 0)[1]

    def gumbel_max(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor, first_id: int
    ) -> tuple[Tensor, Tensor]:
        scores = _dense(scores)
        seeds, streams, positions = (_dense_int64(t) for t in (seeds, streams, positions))
        num_rows, vocab = scores.shape
        best = torch.empty(num_rows, dtype=torch.float32)
        columns = torch.empty(num_rows, dtype=torch.int64)
        check(
            self._releasing.gumbel_max(
                scores.data_ptr(),
                num_rows,
                vocab,
                first_id,
                seeds.data_ptr(),
                streams.data_ptr(),
                positions.data_ptr(),
                best.data_ptr(),
                columns.data_ptr(),
            )
        )
        return best, columns

    def probability_of(self, scores: Tensor, tokens: Tensor) -> Tensor:
        scores, tokens = _dense(scores), _dense_int64(tokens)
        num_rows, vocab = scores.shape
        out = torch.empty(num_rows, dtype=torch.float32)
        check(
            self._holding.probability_of(
                scores.data_ptr(), num_rows, vocab, tokens.data_ptr(), out.data_ptr()
            )
        )
        return out

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """`torch.empty`, at half its cost for the few rows of decoding, where it matters."""
        if self.capture is not None:
            return self.capture.empty(shape)
        if shape[0] > _MAX_MODEL_ROWS:
            return torch.empty(shape, dtype=torch.float32)
        model = self._models.get(shape)
        if model is None:
            model = self._models[shape] = torch.empty(shape, dtype=torch.float32)
        return torch.empty_like(model)

    def _c_batch(self, batch: RaggedBatch) -> int:
        """The address of the batch's C struct, built once a pass: every layer gets the same
        object."""
        if self.capture is not None:
            return addressof(self.capture.batch)
        if batch is not self._batch:
            self._c_struct = batch_struct(batch)
            self._batch = batch
        return addressof(self._c_struct)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _padded(out_features: int) -> int:
    return -(-out_features // _PANEL) * _PANEL


def _dense(x: Tensor) -> Tensor:
    if x.dtype is not _FLOAT32:
        raise TypeError(f"The C kernels take float32, not {x.dtype}.")
    return x if x.is_contiguous() else x.contiguous()


def _dense_int64(x: Tensor) -> Tensor:
    return x.to(torch.int64).contiguous()
