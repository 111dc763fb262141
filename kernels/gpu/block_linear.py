"""Launches of the kernels for products of many rows; see `outrider.kernels.gpu.block_kernels`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels.gpu.block_kernels import (
    gate_up_block_kernel,
    linear_block_kernel,
    qkv_block_kernel,
)
from outrider.kernels.gpu.launch import launch_options, pdl_enabled
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.gpu.stream import ResidualStream
from outrider.kernels.gpu.tuning import LinearConfig
from outrider.kernels.types import RaggedBatch

_COPY_ALIGNMENT = 16  # bytes, of what the copy engine fetches


def can_copy(weight: Tensor) -> bool:
    """Whether the copy engine can fetch such a weight and its inputs."""
    row_bytes = weight.shape[1] * weight.itemsize
    return row_bytes % _COPY_ALIGNMENT == 0 and weight.data_ptr() % _COPY_ALIGNMENT == 0


def _grid(num_rows: int, tiles: int, config: LinearConfig) -> tuple[int, int, int]:
    return triton.cdiv(num_rows, config.rows + config.rest), tiles, config.splits


def _operands(x: Tensor, weight: Tensor, config: LinearConfig, features: int) -> tuple[Any, ...]:
    depth = config.depth
    rows = TensorDescriptor.from_tensor(x, [config.rows, depth])
    rest = TensorDescriptor.from_tensor(x, [config.rest, depth]) if config.rest else rows
    return rows, rest, TensorDescriptor.from_tensor(weight, [features, depth]), weight


def _scratch(
    device: torch.device, grid: tuple[int, int, int], config: LinearConfig, features: int
) -> tuple[Tensor | None, Tensor | None]:
    blocks, tiles, splits = grid
    return split_scratch(device, tiles * blocks, splits, features * (config.rows + config.rest))


def _options(config: LinearConfig, depth: int, features: int, device: torch.device) -> Any:
    pdl = pdl_enabled(device)
    return {
        "K": depth,
        "R": config.rows,
        "REST": config.rest,
        "BN": features,
        "BK": config.depth,
        "SPLIT_K": config.splits,
        "LINES": config.lines,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "PDL": pdl,
        **launch_options(pdl),
    }


def linear_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: LinearConfig,
    out: Tensor,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    scaled: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """The product into `out`; with a residual, the stream after it into `scaled` and `squares`."""
    num_rows, (num_features, depth) = x.shape[0], weight.shape
    features = config.features
    grid = _grid(num_rows, triton.cdiv(num_features, features), config)
    linear_block_kernel[grid](
        *_operands(x, weight, config, features),
        bias,
        residual,
        norm,
        out,
        scaled,
        squares,
        *_scratch(x.device, grid, config, features),
        num_rows,
        num_features,
        HAS_BIAS=bias is not None,
        IS_STREAM=residual is not None,
        **_options(config, depth, features, x.device),
    )
    return out


def gate_up_block(
    stream: ResidualStream, eps: float, weight: Tensor, bias: Tensor | None, config: LinearConfig
) -> Tensor:
    """silu(gate) * up of the normalised stream."""
    x = stream.scaled
    num_rows, half, depth = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    features = config.features
    out = x.new_empty(num_rows, half)
    grid = _grid(num_rows, triton.cdiv(half, features), config)
    gate_up_block_kernel[grid](
        *_operands(x, weight, config, features),
        bias,
        stream.squares,
        out,
        *_scratch(x.device, grid, config, 2 * features),
        num_rows,
        half,
        eps,
        HAS_BIAS=bias is not None,
        **stream.parts,
        **_options(config, depth, features, x.device),
    )
    return out


def qkv_block(
    stream: ResidualStream,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    config: LinearConfig,
    pairs: int,
    cos: Tensor | None,
    sin: Tensor | None,
    batch: RaggedBatch,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
) -> Tensor:
    """Queries [T, H, D] of the normalised stream, `pairs` of their features a program; keys and
    values are rotated and stored."""
    x = stream.scaled
    num_rows, depth = x.shape[0], weight.shape[1]
    _, kv_heads, block_size, head_dim = key_cache.shape
    q = x.new_empty(num_rows, num_heads, head_dim)
    tiles = (num_heads + 2 * kv_heads) * (head_dim // 2 // pairs)
    grid = _grid(num_rows, tiles, config)
    qkv_block_kernel[grid](
        *_operands(x, weight, config, pairs),
        bias,
        stream.squares,
        cos,
        sin,
        batch.positions,
        batch.slots,
        q,
        key_cache,
        value_cache,
        *_scratch(x.device, grid, config, 2 * pairs),
        num_rows,
        eps,
        H=num_heads,
        KV=kv_heads,
        D=head_dim,
        BLOCK=block_size,
        HAS_BIAS=bias is not None,
        ROTATES=cos is not None,
        **stream.parts,
        **_options(config, depth, pairs, x.device),
    )
    return q
