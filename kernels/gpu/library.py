"""Products by the library (cuBLAS)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.gpu.tuning import LibraryConfig


def library_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: LibraryConfig
) -> Tensor:
    """`x @ weight.T + bias`; ignores `transposed`."""
    num_rows = x.shape[0]
    if config.biased and bias is None:
        bias = _no_bias(weight.shape[0], x.dtype, x.device)
    if config.rows > num_rows:
        x = functional.pad(x, (0, 0, 0, config.rows - num_rows))
    return functional.linear(x, weight, bias)[:num_rows]


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in float32; not rounded in between where the library can do that."""
    can_widen = hasattr(torch.ops.aten.mm, "dtype") and x.is_cuda  # torch 2.8 and later
    if can_widen and bias is None and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x, weight, bias).float()


@cache
def _no_bias(num_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_features, dtype=dtype, device=device)
