"""Whole-number weights with a scale for each group of inputs, as the blocks of GGUF formats, which
the C kernels multiply with as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.quantized import QuantizedWeight
from outrider.kernels.stored import KINDS, StoredWeight

BLOCK_LEN = 32
# What is added to a weight before it is stored.
_BIAS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}


def blocks_of(weight: QuantizedWeight, kind: str) -> StoredWeight:
    """The same weight, whose numbers fit `kind`, groups are whole blocks and scales float16."""
    num_rows, width = weight.shape
    scales = weight.scales.view(num_rows, -1)
    scales = scales.repeat_interleave((weight.group_len or width) // BLOCK_LEN, dim=1)
    scales = scales[:, : width // BLOCK_LEN].contiguous()
    numbers = weight.values.view(num_rows, -1, BLOCK_LEN) + _BIAS[kind]
    head = scales.half().view(torch.uint8).view(num_rows, -1, 2)
    if kind == "Q8_0":
        parts = [head, numbers.view(torch.uint8)]
    else:
        numbers = numbers.view(torch.uint8)
        parts = [head, _low_bits(numbers)]
        if kind == "Q5_0":
            parts.insert(1, _fifth_bits(numbers))
    blocks = torch.cat(parts, dim=-1).flatten(1)
    assert blocks.shape[1] == width // BLOCK_LEN * KINDS[kind].block_bytes
    return StoredWeight(kind, blocks, (num_rows, width))


def _low_bits(numbers: Tensor) -> Tensor:
    """A byte has a number of the first half of a block and one of the second."""
    half = BLOCK_LEN // 2
    return (numbers[..., :half] & 15) | ((numbers[..., half:] & 15) << 4)


def _fifth_bits(numbers: Tensor) -> Tensor:
    bits = (numbers >> 4).view(*numbers.shape[:-1], BLOCK_LEN // 8, 8)
    places = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8)
    return (bits * places).sum(-1, dtype=torch.uint8)
