"""Products with a large weight, fused with the operations around them in a decoder layer.

A decode or verification pass of few requests multiplies 1 to 64 rows: it is bound by the weight's
bytes. Each program takes some output features over the whole depth and fuses what surrounds the
product: the RMS norm of the input, the residual sum, SiLU-mul, the rotation of queries and keys and
the write of the KV cache. A layer of a pass is then five kernels. With more rows a product is done
so where that is faster, or else by the library with a separate epilogue kernel: both use the same
stream, so they mix freely.

A norm costs nothing here; see `outrider.kernels.gpu.stream`.

The weight is the left operand of the matrix units, so that a handful of rows wastes nothing. One of
8 bits is converted on its way there, and its scales multiply the finished sums.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.kernels.gpu.activations import fake_quantize, fake_quantize_stream
from outrider.kernels.gpu.block_linear import can_copy, gate_up_block, linear_block, qkv_block
from outrider.kernels.gpu.launch import launch_options, pdl_enabled
from outrider.kernels.gpu.library import library_product, wide_product
from outrider.kernels.gpu.linear_kernels import gate_up_kernel, linear_kernel, qkv_kernel
from outrider.kernels.gpu.norm import add_to_stream
from outrider.kernels.gpu.packed import pack, unpack
from outrider.kernels.gpu.pointwise import silu_mul
from outrider.kernels.gpu.rotary import rotate_and_store
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.gpu.stream import (
    MAX_SMALL_ROWS,
    MIN_ROWS,
    ResidualStream,
    close_stream,
    rows_of_block,
)
from outrider.kernels.gpu.transposed import transposed_add, transposed_silu_mul
from outrider.kernels.gpu.tuning import (
    LibraryConfig,
    LinearConfig,
    LinearKind,
    ProductConfig,
    linear_config,
    product_config,
)
from outrider.kernels.quantized import ActivationScheme, QuantizedWeight, has_fp8
from outrider.kernels.types import RaggedBatch

_KINDS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
MAX_QUANTIZED_ROWS = 256
"""With more rows it is faster to dequantize an 8-bit weight for the library's product."""
_QUANTIZED_BLOCK = 128  # rows that share one conversion of 8-bit weights


def _power_of_2_in(number: int) -> int:
    return number & -number


def can_rotate(head_dim: int) -> bool:
    """Whether a head's pairs can be split over programs; the matrix units need 16 each."""
    return _power_of_2_in(head_dim // 2) >= 16


def _is_multiplied(weight: QuantizedWeight) -> bool:
    """Whether the kernels multiply with such a weight as it is."""
    values = weight.values
    is_fp8 = values.dtype is torch.float8_e4m3fn and has_fp8(values.device)
    is_whole = not weight.group_len and values.shape[1] % 2 == 0
    return is_whole and (is_fp8 or values.dtype is torch.int8)


class GpuLinear:
    """`x @ weight.T + bias`, and the same fused with its neighbours in a decoder layer.

    With `is_fixed` a row is summed in the same order for any number of rows. Weights with several
    scales in a row are dequantized here.
    """

    __slots__ = (
        *("_input_type", "_value_type", "activations", "bias", "depth", "is_fixed"),
        *("scales", "weight"),
    )

    def __init__(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, is_fixed: bool = False
    ) -> None:
        self.activations: ActivationScheme | None = None
        self.depth = weight.shape[1]
        self._input_type = weight.dtype
        if isinstance(weight, QuantizedWeight) and not _is_multiplied(weight):
            weight = weight.dequantized()
        if isinstance(weight, QuantizedWeight):
            self.scales: Tensor | None = weight.scales
            self._value_type = weight.values.dtype
            self.weight = pack(weight.values)
        else:
            self.scales = None
            self._value_type = weight.dtype
            self.weight = weight.contiguous()
        self.bias = bias
        self.is_fixed = is_fixed

    def with_activations(self, scheme: ActivationScheme) -> GpuLinear:
        """This layer, of inputs that are rounded first."""
        made = copy(self)
        made.activations = scheme
        return made

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.activations is None else fake_quantize(x, self.activations)

    def _rounded_stream(self, stream: ResidualStream, eps: float) -> ResidualStream:
        if self.activations is None:
            return stream
        return fake_quantize_stream(stream, eps, self.activations)

    def __call__(self, x: Tensor) -> Tensor:
        x = self._rounded(x)
        config = self._config_for("linear", self.weight.shape[0], x.shape[0])
        if isinstance(config, LibraryConfig):
            return self._library(x, config)
        return self._own(x, x.new_empty(x.shape[0], self.weight.shape[0]), config)

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32, not rounded to the dtype of its operands: logits."""
        x = self._rounded(x)
        config = self._config_for("linear", self.weight.shape[0], x.shape[0])
        if isinstance(config, LibraryConfig):
            return wide_product(x, self._whole_weight(x.dtype), self.bias)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=torch.float32)
        return self._own(x, out, config)

    def _config_for(self, kind: LinearKind, num_features: int, num_rows: int) -> ProductConfig:
        is_8bit = self.scales is not None
        if self.is_fixed or (is_8bit and num_rows <= MAX_QUANTIZED_ROWS):
            return self._cut(kind, num_features, num_rows)
        if is_8bit:
            return LibraryConfig()
        config = product_config(kind, num_features, self.depth, num_rows)
        if isinstance(config, LibraryConfig):
            return config
        if not config.rows:
            return self._fitting(kind, config, num_rows)
        return config if can_copy(self.weight) else LibraryConfig()

    def _whole_weight(self, dtype: torch.dtype) -> Tensor:
        if self.scales is None:
            return self.weight
        return unpack(self.weight, self.scales, _KINDS[self._value_type], dtype)

    def _library(self, x: Tensor, config: LibraryConfig) -> Tensor:
        return library_product(x, self._whole_weight(x.dtype), self.bias, config)

    def _of_stream(
        self, stream: ResidualStream, eps: float, config: LibraryConfig
    ) -> tuple[Tensor, ResidualStream | None]:
        """The library's product of the stream; and the stream, if its norm is still to be applied.
        It is applied first where a bias follows, or where unnormalized values could overflow."""
        if stream.squares is not None and (
            self.bias is not None or stream.scaled.dtype == torch.float16
        ):
            stream = ResidualStream(stream.total, close_stream(stream, eps), None)
        out = self._library(stream.scaled, config)
        return out, None if stream.squares is None else stream

    def _transposed(self, x: Tensor) -> Tensor:
        return torch.mm(self._whole_weight(x.dtype), x.t())

    def add(
        self, x: Tensor, residual: ResidualStream, next_norm: Tensor, eps: float
    ) -> ResidualStream:
        """The residual stream after this product, ready for the next norm."""
        x = self._rounded(x)
        num_rows, num_features = x.shape[0], self.weight.shape[0]
        config = self._config_for("linear", num_features, num_rows)
        if isinstance(config, LibraryConfig) and config.transposed and self.bias is None:
            return transposed_add(self._transposed(x), residual.total, next_norm)
        if isinstance(config, LibraryConfig):
            return add_to_stream(self._library(x, config), residual, next_norm, eps)
        parts = triton.cdiv(num_features, config.features)
        squares = x.new_empty(num_rows, parts, dtype=torch.float32)
        total, scaled = residual.total.new_empty(2, num_rows, num_features)
        self._own(x, total, config, residual.total, next_norm, scaled, squares)
        return ResidualStream(total, scaled, squares)

    def _rows(self, num_rows: int) -> int:
        is_small = self.is_fixed or self.scales is None
        return rows_of_block(num_rows, MAX_SMALL_ROWS if is_small else _QUANTIZED_BLOCK)

    def _cut(self, kind: LinearKind, num_features: int, num_rows: int) -> LinearConfig:
        """The configuration of our kernels for few rows."""
        # How rows share a matrix unit changes none of their bits; where the depth is cut does.
        rows = MIN_ROWS if self.is_fixed else self._rows(num_rows)
        is_8bit = self.scales is not None
        config = linear_config(kind, num_features, self.depth, rows, is_8bit)
        return self._fitting(kind, config, num_rows)

    def _fitting(self, kind: LinearKind, config: LinearConfig, num_rows: int) -> LinearConfig:
        weights = config.features * (1 if kind == "linear" else 2)
        stage_bytes = config.depth * (
            weights * self._value_type.itemsize + self._rows(num_rows) * self._input_type.itemsize
        )
        return config.within(stage_bytes)

    def _options(self, config: LinearConfig, device: torch.device) -> dict[str, Any]:
        pdl = pdl_enabled(device)
        return {
            "BK": config.depth if self.scales is None else config.depth // 2,
            "SPLIT_K": config.splits,
            "LINES": config.lines,
            "KIND": _KINDS.get(self._value_type),
            "num_warps": config.warps,
            "num_stages": config.stages,
            "PDL": pdl,
            **launch_options(pdl),
        }

    def _own(
        self,
        x: Tensor,
        out: Tensor,
        config: LinearConfig,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        scaled: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_features = x.shape[0], self.weight.shape[0]
        if num_rows == 0:
            return out
        around = (residual, norm, scaled, squares)
        if config.rows:
            return linear_block(x, self.weight, self.bias, config, out, *around)
        rows = self._rows(num_rows)
        blocks = triton.cdiv(num_rows, rows)
        tiles = triton.cdiv(num_features, config.features)
        scratch = split_scratch(x.device, tiles * blocks, config.splits, config.features * rows)
        linear_kernel[(tiles, config.splits, blocks)](
            x,
            self.weight,
            self.scales,
            self.bias,
            residual,
            norm,
            out,
            scaled,
            squares,
            *scratch,
            num_rows,
            num_features,
            K=self.depth,
            R=rows,
            BN=config.features,
            HAS_BIAS=self.bias is not None,
            IS_STREAM=residual is not None,
            IS_FIXED=self.is_fixed,
            **self._options(config, x.device),
        )
        return out

    def norm_gated(self, stream: ResidualStream, eps: float) -> Tensor:
        """silu(gate) * up of the normalised stream; this weight's first half is the gate's."""
        stream = self._rounded_stream(stream, eps)
        num_rows, half = stream.scaled.shape[0], self.weight.shape[0] // 2
        config = self._config_for("gate_up", half, num_rows)
        if isinstance(config, LibraryConfig):
            return self._library_gated(stream, eps, config)
        if config.rows:
            return gate_up_block(stream, eps, self.weight, self.bias, config)
        rows = self._rows(num_rows)
        blocks = triton.cdiv(num_rows, rows)
        out = stream.scaled.new_empty(num_rows, half)
        tiles = triton.cdiv(half, config.features)
        floats = 2 * config.features * rows
        scratch = split_scratch(out.device, tiles * blocks, config.splits, floats)
        gate_up_kernel[(tiles, config.splits, blocks)](
            stream.scaled,
            self.weight,
            self.scales,
            self.bias,
            stream.squares,
            out,
            *scratch,
            num_rows,
            half,
            eps,
            K=self.depth,
            R=rows,
            BN=config.features,
            HAS_BIAS=self.bias is not None,
            **stream.parts,
            **self._options(config, out.device),
        )
        return out

    def _library_gated(self, stream: ResidualStream, eps: float, config: LibraryConfig) -> Tensor:
        if config.transposed and self.bias is None and stream.scaled.dtype != torch.float16:
            source = None if stream.squares is None else stream
            return transposed_silu_mul(self._transposed(stream.scaled), source, eps)
        return silu_mul(*self._of_stream(stream, eps, config), eps)

    def norm_rotate_store(
        self,
        stream: ResidualStream,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        batch: RaggedBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Queries [T, H, D] of the normalised stream; keys and values are rotated and stored."""
        stream = self._rounded_stream(stream, eps)
        num_rows = stream.scaled.shape[0]
        _, kv_heads, block_size, head_dim = key_cache.shape
        config = self._config_for("qkv", self.weight.shape[0] // 2, num_rows)
        places = (cos, sin, batch, key_cache, value_cache, num_heads)
        if isinstance(config, LibraryConfig):
            qkv, source = self._of_stream(stream, eps, config)
            return rotate_and_store(qkv, *places, kv_heads, head_dim, source=source, source_eps=eps)
        pairs = min(config.features, _power_of_2_in(head_dim // 2))
        if config.rows:
            return qkv_block(stream, eps, self.weight, self.bias, config, pairs, *places)
        rows = self._rows(num_rows)
        blocks = triton.cdiv(num_rows, rows)
        q = stream.scaled.new_empty(num_rows, num_heads, head_dim)
        tiles = (num_heads + 2 * kv_heads) * (head_dim // 2 // pairs)
        scratch = split_scratch(q.device, tiles * blocks, config.splits, 2 * pairs * rows)
        qkv_kernel[(tiles, config.splits, blocks)](
            stream.scaled,
            self.weight,
            self.scales,
            self.bias,
            stream.squares,
            cos,
            sin,
            batch.positions,
            batch.slots,
            q,
            key_cache,
            value_cache,
            *scratch,
            num_rows,
            eps,
            H=num_heads,
            KV=kv_heads,
            D=head_dim,
            BLOCK=block_size,
            K=self.depth,
            R=rows,
            BN=pairs,
            HAS_BIAS=self.bias is not None,
            ROTATES=cos is not None,
            **stream.parts,
            **self._options(config, q.device),
        )
        return q
