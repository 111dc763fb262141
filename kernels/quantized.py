"""8-bit weights with one scale per output feature; activations are not quantized.

The GPU kernels multiply with them directly, which halves the bytes and the time to read them, and
so do the C kernels with int8 (`outrider.kernels.stored`). Elsewhere they are dequantized at load:
the same rounding, and no saving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError

# Type, and the largest value it holds.
_KINDS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
_FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert it
_CHUNK_ELEMENTS = 1 << 24  # quantized at once, in float32 in between


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """`values * scales` is the weight, rounded; `dtype` is the one it had."""

    values: Tensor  # float8_e4m3fn or int8 [out, in], contiguous
    scales: Tensor  # float32 [out]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        return self.values.to(self.dtype).mul_(self.scales[:, None])


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """`weight` [out, in] to the nearest 8-bit values, the largest of each row to their largest."""
    if kind not in _KINDS:
        raise ConfigError(f"quantization is {kind!r}; it must be 'fp8' or 'int8', or unset.")
    if kind == "fp8" and weight.device.type == "cuda":
        _check_has_fp8(weight.device)
    dtype, largest = _KINDS[kind]
    scales = torch.linalg.vector_norm(weight, torch.inf, dim=1, dtype=torch.float32) / largest
    # A row of zeros; or of numbers so small that their scale would lose its precision.
    scales[scales < torch.finfo(torch.float32).tiny] = 1.0
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        own = slice(start, start + rows)
        scaled = weight[own] / scales[own, None]
        values[own] = scaled.round_() if kind == "int8" else scaled
    return QuantizedWeight(values, scales, weight.dtype)


def whole(weight: Tensor | QuantizedWeight) -> Tensor:
    """The dequantized weight, for kernels without 8-bit support."""
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


def _check_has_fp8(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"quantization is 'fp8', which {torch.cuda.get_device_name(device)} (compute "
            f"capability {capability[0]}.{capability[1]}) does not have; use 'int8'."
        )
