"""Whole-number weights as blocks of GGUF formats."""

from __future__ import annotations

import gguf
import pytest
import torch

from outrider.kernels.grouped import blocks_of
from outrider.kernels.quantized import QuantizedWeight


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"), [("Q4_0", -8, 7), ("Q5_0", -15, 15), ("Q8_0", -128, 127)]
)
@pytest.mark.parametrize("group_len", [0, 32, 128])
def test_blocks_hold_the_very_weights(kind: str, lowest: int, highest: int, group_len: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(lowest, highest + 1, (6, 384), generator=generator, dtype=torch.int8)
    shape = (6,) if not group_len else (6, 384 // group_len)
    scales = torch.rand(shape, generator=generator).half().float()
    weight = QuantizedWeight(values, scales, torch.float32, group_len)
    stored = blocks_of(weight, kind)
    form = gguf.GGMLQuantizationType[kind]
    found = torch.from_numpy(gguf.quants.dequantize(stored.blocks.numpy(), form))
    assert stored.shape == (6, 384)
    assert torch.equal(found, weight.dequantized())
