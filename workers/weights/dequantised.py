"""Dequantises weights in GGUF formats to float32."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelError
from outrider.requirements import not_installed

if TYPE_CHECKING:
    from torch import Tensor

# Kept as stored in converted folders; `outrider.kernels.stored` has their sizes.
STORED_KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
_HALVES = {"F16": "float16", "BF16": "bfloat16"}
_ROWS_AT_A_TIME = 1024


def gguf_package(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModelError(f"{path.name} cannot be read: {not_installed(error) or error}") from None
    return gguf


def dequantised(kind: str, blocks: Tensor, folder: Path) -> Tensor:
    """float32 [out, in] of uint8 [out, bytes of a row], bit for bit as the package gguf
    dequantises."""
    import torch

    if kind in _HALVES:
        return blocks.contiguous().view(getattr(torch, _HALVES[kind])).float()
    gguf = gguf_package(folder)
    form, raw = gguf.GGMLQuantizationType[kind], blocks.contiguous().numpy()
    parts = [raw[i : i + _ROWS_AT_A_TIME] for i in range(0, len(raw), _ROWS_AT_A_TIME)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as side_by_side:
        done = side_by_side.map(lambda part: gguf.quants.dequantize(part, form), parts)
        return torch.cat([torch.from_numpy(each) for each in done])
