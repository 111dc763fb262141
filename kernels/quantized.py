"""8-bit weights, rounded at load or stored so in a checkpoint, and what checkpoints do to the
activations that meet them.

The GPU kernels multiply directly with weights of one scale per output feature, which halves the
bytes and the time to read them, and so do the C kernels with int8 (`outrider.kernels.stored`).
Elsewhere weights are dequantized at load: the same rounding, and no saving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ConfigError

# Type, and the largest value it holds.
FP8_MAX = 448.0  # of e4m3
_KINDS = {"fp8": (torch.float8_e4m3fn, FP8_MAX), "int8": (torch.int8, 127.0)}
_FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert it
_CHUNK_ELEMENTS = 1 << 24  # quantized at once, in float32 in between


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How the inputs of a product are rounded to fp8 (e4m3), as the checkpoint asks for.

    With `scale` they are divided by it (static). Without, the largest of a token's `group_len`
    inputs, or of all of them if 0, becomes the largest number of fp8 (dynamic).
    """

    group_len: int = 0
    scale: float | None = None


def fake_quantize(x: Tensor, scheme: ActivationScheme) -> Tensor:
    """x [T, in] rounded to fp8 and back, in its own dtype; what every backend computes."""
    width = x.shape[-1]
    length = min(scheme.group_len or width, width)
    padded = F.pad(x.float(), (0, -width % length))
    groups = padded.view(*padded.shape[:-1], -1, length)
    if scheme.scale is not None:
        scales = torch.tensor(scheme.scale, dtype=torch.float32, device=x.device)
    else:
        scales = groups.abs().amax(-1, keepdim=True) / FP8_MAX
        scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    rounded = (groups / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scales
    return rounded.view(padded.shape)[..., :width].to(x.dtype)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """`values * scales` is the weight, rounded; `dtype` is the one it had."""

    values: Tensor  # float8_e4m3fn or int8 [out, in], contiguous
    scales: Tensor  # float32 [out]; or [out, groups], of `group_len` inputs each
    dtype: torch.dtype
    group_len: int = 0  # 0: one scale for a row

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        if not self.group_len:
            return self.values.to(self.dtype).mul_(self.scales[:, None])
        width = self.values.shape[1]
        wide = torch.empty(self.values.shape, dtype=self.dtype, device=self.values.device)
        for group, start in enumerate(range(0, width, self.group_len)):
            own = slice(start, min(start + self.group_len, width))
            wide[:, own] = self.values[:, own].float() * self.scales[:, group, None]
        return wide


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """`weight` [out, in] to the nearest 8-bit values, the largest of each row to their largest."""
    if kind not in _KINDS:
        raise ConfigError(f"quantization is {kind!r}; it must be 'fp8' or 'int8', or unset.")
    if kind == "fp8":
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


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on that device can read fp8."""
    is_gpu = device.type == "cuda"
    return not is_gpu or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def _check_has_fp8(device: torch.device) -> None:
    if not has_fp8(device):
        capability = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"quantization is 'fp8', which {torch.cuda.get_device_name(device)} (compute "
            f"capability {capability[0]}.{capability[1]}) does not have; use 'int8'."
        )
