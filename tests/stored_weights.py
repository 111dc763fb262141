"""Random weights of every stored kind, with the float32 values that GGUF's package gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.quantized import quantize
from outrider.kernels.stored import KINDS, StoredWeight

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
# Of the scales that a K block begins or ends with: GGUF's package cannot make such blocks.
_K_SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}


def stored_weight(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[StoredWeight, Tensor]:
    """A weight, and its values in float32."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32) * np.float32(0.05)
    if kind == "INT8":
        made = quantize(torch.from_numpy(values), "int8")
        return StoredWeight.of_bytes(made), made.dequantized()
    if kind in _HALVES:
        half = torch.from_numpy(values).to(_HALVES[kind])
        return StoredWeight(kind, half.view(torch.uint8), shape), half.float()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from gguf.quants import quantize as quantize_gguf

    form = GGMLQuantizationType[kind]
    blocks = _k_blocks(kind, shape, rng) if kind in _K_SCALES else quantize_gguf(values, form)
    whole = dequantize(blocks, form).astype(np.float32).reshape(shape)
    return StoredWeight(kind, torch.from_numpy(blocks.copy()), shape), torch.from_numpy(whole)


def _k_blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> Any:
    form = KINDS[kind]
    num_blocks = shape[0] * shape[1] // form.block_len
    blocks = rng.integers(0, 256, (num_blocks, form.block_bytes)).astype(np.uint8)
    for start in _K_SCALES[kind]:
        scales = (rng.standard_normal((num_blocks, 1)) * 5e-5).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)
