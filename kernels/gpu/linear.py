"""Products of a few rows with a large weight, at the speed the weight can be read.

A decode or verification pass multiplies 1 to 64 rows: the weight's bytes are all that counts. Each
program takes some output features over the whole depth, so the work around a product happens where
its operands are anyway: the RMS norm of the input, the residual sum, SiLU-mul, the rotation of
queries and keys and the write of the KV cache. A layer of a pass is then five kernels.

A norm costs nothing here; see `outrider.kernels.gpu.stream`.

The weight is the left operand of the matrix units, so that a handful of rows wastes nothing. One of
8 bits is converted on its way there, and its scales multiply the finished sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from outrider.kernels.gpu.launch import launch_options, pdl_enabled
from outrider.kernels.gpu.linear_kernels import gate_up_kernel, linear_kernel, qkv_kernel
from outrider.kernels.gpu.packed import pack, unpack
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.gpu.stream import FEWEST_ROWS, MAX_SMALL_ROWS, Stream, rows_of_block
from outrider.kernels.gpu.tuning import LinearConfig, LinearKind, linear_config
from outrider.kernels.quantized import QuantizedWeight
from outrider.kernels.types import RaggedBatch

_KINDS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
MAX_QUANTIZED_ROWS = 256
"""Beyond so many rows it pays to write an 8-bit weight out for the library's product."""
_QUANTIZED_BLOCK = 128  # rows; converting 8-bit weights takes its time, which these share


def _power_of_2_in(number: int) -> int:
    return number & -number


def can_rotate(head_dim: int) -> bool:
    """Whether a head's pairs can be shared out among programs; the matrix units need 16 each."""
    return _power_of_2_in(head_dim // 2) >= 16


def _wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product in float32; not rounded in between where the library can do that."""
    can_widen = hasattr(torch.ops.aten.mm, "dtype") and x.is_cuda  # torch 2.8 and later
    if can_widen and bias is None and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x, weight, bias).float()


class GpuLinear:
    """`x @ weight.T + bias`, and the same with what stands around it in a decoder layer.

    With `is_fixed` a row is multiplied in the same order whatever the number of rows.
    """

    __slots__ = ("_input_type", "_value_type", "bias", "depth", "is_fixed", "scales", "weight")

    def __init__(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, is_fixed: bool = False
    ) -> None:
        self.depth = weight.shape[1]
        self._input_type = weight.dtype
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

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_large(x):
            return functional.linear(x, self._whole_weight(x.dtype), self.bias)
        return self._small(x, x.new_empty(x.shape[0], self.weight.shape[0]))

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32, not rounded to the dtype of its operands: logits."""
        if self._is_large(x):
            return _wide_product(x, self._whole_weight(x.dtype), self.bias)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=torch.float32)
        return self._small(x, out)

    def _is_large(self, x: Tensor) -> bool:
        most = MAX_SMALL_ROWS if self.scales is None else MAX_QUANTIZED_ROWS
        return x.shape[0] > most and not self.is_fixed

    def _whole_weight(self, dtype: torch.dtype) -> Tensor:
        if self.scales is None:
            return self.weight
        return unpack(self.weight, self.scales, _KINDS[self._value_type], dtype)

    def add(self, x: Tensor, residual: Stream, next_norm: Tensor) -> Stream:
        """The residual stream behind this product, ready for the norm that follows."""
        num_features = self.weight.shape[0]
        config, _, _ = self._cut("linear", num_features, x.shape[0])
        parts = triton.cdiv(num_features, config.features)
        squares = x.new_empty(x.shape[0], parts, dtype=torch.float32)
        total, scaled = residual.total.new_empty(2, x.shape[0], num_features)
        self._small(x, total, residual.total, next_norm, scaled, squares)
        return Stream(total, scaled, squares)

    def _cut(
        self, kind: LinearKind, num_features: int, num_rows: int
    ) -> tuple[LinearConfig, int, int]:
        """How the product is cut up, rows of a block, and how many of these there are."""
        is_8bit = self.scales is not None
        is_small = self.is_fixed or not is_8bit
        rows = rows_of_block(num_rows, MAX_SMALL_ROWS if is_small else _QUANTIZED_BLOCK)
        # How rows share a matrix unit changes none of their bits; where the depth is cut does.
        tuned_rows = FEWEST_ROWS if self.is_fixed else rows
        config = linear_config(kind, num_features, self.depth, tuned_rows, is_8bit)
        weights = config.features * (1 if kind == "linear" else 2)
        stage_bytes = config.depth * (
            weights * self._value_type.itemsize + rows * self._input_type.itemsize
        )
        return config.within(stage_bytes), rows, triton.cdiv(num_rows, rows)

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

    def _small(
        self,
        x: Tensor,
        out: Tensor,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        scaled: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_features = x.shape[0], self.weight.shape[0]
        if num_rows == 0:
            return out
        config, rows, blocks = self._cut("linear", num_features, num_rows)
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
            **self._options(config, x.device),
        )
        return out

    def norm_gated(self, stream: Stream, eps: float) -> Tensor:
        """silu(gate) * up of the normalised stream; this weight's first half is the gate's."""
        num_rows, half = stream.scaled.shape[0], self.weight.shape[0] // 2
        config, rows, blocks = self._cut("gate_up", half, num_rows)
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

    def norm_rotate_store(
        self,
        stream: Stream,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        batch: RaggedBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Queries [T, H, D] of the normalised stream; keys and values are rotated and stored."""
        num_rows = stream.scaled.shape[0]
        _, kv_heads, block_size, head_dim = key_cache.shape
        config, rows, blocks = self._cut("qkv", self.weight.shape[0] // 2, num_rows)
        pairs = min(config.features, _power_of_2_in(head_dim // 2))
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
