"""8-bit weights: how far they are from what they were made of."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.kernels import quantized
from outrider.kernels.quantized import quantize

# Of a row's largest element (fp8 and int8) or of the element itself (fp8): half a step.
FP8_RELATIVE, FP8_ABSOLUTE = 2**-4, 2**-10 / 448
INT8_ABSOLUTE = 0.5 / 127
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_element_is_within_half_a_step(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)  # several of them, the last one short
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-4, 2, 45).unsqueeze(1)
    weight = (torch.randn(45, 96, generator=generator) * sizes).to(dtype)
    made = quantize(weight, kind)
    assert made.values.element_size() == 1 and made.scales.dtype == torch.float32
    largest = weight.float().abs().amax(1, keepdim=True)
    error = (made.values.float() * made.scales[:, None] - weight.float()).abs()
    step = largest * INT8_ABSOLUTE
    if kind == "fp8":
        step = torch.maximum(weight.float().abs() * FP8_RELATIVE, largest * FP8_ABSOLUTE)
    assert bool((error <= step * 1.001).all())
    limit = 448 if kind == "fp8" else 127
    assert bool((made.values.float().abs().amax(1) == limit).all())
    rounded_once = (made.values.float() * made.scales[:, None]).to(dtype)
    assert torch.equal(made.dequantized(), rounded_once)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rows_of_zeros_and_of_next_to_nothing_stay_finite(kind: str) -> None:
    weight = torch.ones(4, 8)
    weight[1] = 0.0
    weight[2] = 1e-44
    made = quantize(weight, kind)
    assert made.scales[1:3].tolist() == [1.0, 1.0]
    assert torch.equal(made.dequantized()[1:3], torch.zeros(2, 8))
    torch.testing.assert_close(made.dequantized()[[0, 3]], weight[[0, 3]])


def test_an_unknown_kind_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="^quantization is 'int4'; it must be 'fp8' or 'int8'"):
        quantize(torch.ones(2, 2), "int4")
