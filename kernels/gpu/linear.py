"""Products of a few rows with a large weight, at the speed the weight can be read.

A decode or verification pass multiplies 1 to 64 rows: the weight's bytes are all that counts. Each
program takes some output features over the whole depth, so the work around a product happens where
its operands are anyway: the RMS norm of the input, the residual sum, SiLU-mul, the rotation of
queries and keys and the write of the KV cache. A layer of a pass is then five kernels.

A norm costs nothing here; see `outrider.kernels.gpu.stream`.

The weight is the left operand of the matrix units, so that a handful of rows wastes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from outrider.kernels.gpu.launch import launch_options, pdl_enabled
from outrider.kernels.gpu.linear_kernels import gate_up_kernel, linear_kernel, qkv_kernel
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.gpu.stream import MAX_SMALL_ROWS, Stream, rows_of_block
from outrider.kernels.gpu.tuning import LinearConfig, LinearKind, linear_config
from outrider.kernels.types import RaggedBatch


def _power_of_2_in(number: int) -> int:
    return number & -number


def can_rotate(head_dim: int) -> bool:
    """Whether a head's pairs can be shared out among programs; the matrix units need 16 each."""
    return _power_of_2_in(head_dim // 2) >= 16


def _options(config: LinearConfig, pdl: bool) -> dict[str, Any]:
    return {
        "BK": config.depth,
        "SPLIT_K": config.splits,
        "LINES": config.lines,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "PDL": pdl,
        **launch_options(pdl),
    }


class GpuLinear:
    """`x @ weight.T + bias`, and the same with what stands around it in a decoder layer.

    With `is_fixed` a row is multiplied in the same order whatever the number of rows.
    """

    __slots__ = ("bias", "is_fixed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, is_fixed: bool = False) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.is_fixed = is_fixed

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_large(x):
            return functional.linear(x, self.weight, self.bias)
        return self._small(x, x.new_empty(x.shape[0], self.weight.shape[0]))

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32, not rounded to the dtype of its operands: logits."""
        if self._is_large(x):
            return functional.linear(x, self.weight, self.bias).float()
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=torch.float32)
        return self._small(x, out)

    def _is_large(self, x: Tensor) -> bool:
        return x.shape[0] > MAX_SMALL_ROWS and not self.is_fixed

    def add(self, x: Tensor, residual: Stream, next_norm: Tensor) -> Stream:
        """The residual stream behind this product, ready for the norm that follows."""
        num_features = self.weight.shape[0]
        config, rows, blocks = self._cut("linear", num_features, x.shape[0])
        parts = triton.cdiv(num_features, config.features)
        squares = x.new_empty(blocks, parts, rows, dtype=torch.float32)
        total, scaled = residual.total.new_empty(2, x.shape[0], num_features)
        self._small(x, total, residual.total, next_norm, scaled, squares)
        return Stream(total, scaled, squares)

    def _cut(
        self, kind: LinearKind, num_features: int, num_rows: int
    ) -> tuple[LinearConfig, int, int]:
        """How the product is cut up, rows of a block, and how many of these there are."""
        rows = rows_of_block(num_rows, self.is_fixed)
        config = linear_config(kind, num_features, self.weight.shape[1], rows)
        return config, rows, triton.cdiv(num_rows, rows)

    def _small(
        self,
        x: Tensor,
        out: Tensor,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        scaled: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        num_rows, (num_features, depth) = x.shape[0], self.weight.shape
        if num_rows == 0:
            return out
        config, rows, blocks = self._cut("linear", num_features, num_rows)
        tiles = triton.cdiv(num_features, config.features)
        scratch = split_scratch(x.device, tiles * blocks, config.splits, config.features * rows)
        linear_kernel[(tiles, config.splits, blocks)](
            x,
            self.weight,
            self.bias,
            residual,
            norm,
            out,
            scaled,
            squares,
            *scratch,
            num_rows,
            num_features,
            K=depth,
            R=rows,
            BN=config.features,
            HAS_BIAS=self.bias is not None,
            IS_STREAM=residual is not None,
            **_options(config, pdl_enabled(x.device)),
        )
        return out

    def norm_gated(self, stream: Stream, eps: float) -> Tensor:
        """silu(gate) * up of the normalised stream; this weight's first half is the gate's."""
        num_rows, (num_features, depth) = stream.scaled.shape[0], self.weight.shape
        half = num_features // 2
        config, rows, blocks = self._cut("gate_up", half, num_rows)
        out = stream.scaled.new_empty(num_rows, half)
        tiles = triton.cdiv(half, config.features)
        floats = 2 * config.features * rows
        scratch = split_scratch(out.device, tiles * blocks, config.splits, floats)
        gate_up_kernel[(tiles, config.splits, blocks)](
            stream.scaled,
            self.weight,
            self.bias,
            stream.squares,
            out,
            *scratch,
            num_rows,
            half,
            eps,
            K=depth,
            R=rows,
            BN=config.features,
            HAS_BIAS=self.bias is not None,
            **stream.parts,
            **_options(config, pdl_enabled(out.device)),
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
        num_rows, depth = stream.scaled.shape[0], self.weight.shape[1]
        _, kv_heads, block_size, head_dim = key_cache.shape
        config, rows, blocks = self._cut("qkv", self.weight.shape[0] // 2, num_rows)
        pairs = min(config.features, _power_of_2_in(head_dim // 2))
        q = stream.scaled.new_empty(num_rows, num_heads, head_dim)
        tiles = (num_heads + 2 * kv_heads) * (head_dim // 2 // pairs)
        scratch = split_scratch(q.device, tiles * blocks, config.splits, 2 * pairs * rows)
        qkv_kernel[(tiles, config.splits, blocks)](
            stream.scaled,
            self.weight,
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
            K=depth,
            R=rows,
            BN=pairs,
            HAS_BIAS=self.bias is not None,
            ROTATES=cos is not None,
            **stream.parts,
            **_options(config, pdl_enabled(q.device)),
        )
        return q
