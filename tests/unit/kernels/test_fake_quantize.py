"""Activations rounded to fp8 and back: the same by every backend."""

from __future__ import annotations

import pytest
import torch
from gpu_tools import DEVICE, DTYPES, GPU_MARKS
from torch import Tensor

from outrider.kernels.cpu.build import load_library
from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.gpu import activations
from outrider.kernels.gpu.stream import ResidualStream, close_stream
from outrider.kernels.quantized import ActivationScheme, fake_quantize

SCHEMES = [
    ActivationScheme(),
    ActivationScheme(group_len=64),
    ActivationScheme(group_len=24),  # the last group has fewer
    ActivationScheme(scale=0.0371),
]


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes; zeros, ties, subnormal numbers of fp8, numbers beyond it."""
    torch.manual_seed(0)
    x = torch.randn(6, 200) * torch.tensor([1.0, 1e-4, 60.0, 0.0, 3.0, 1e-20])[:, None]
    x[4, :48] = torch.arange(48) / 16  # halfway between two numbers of fp8, some of them
    x[0, 0] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_are_those_of_torchs_conversion_times_their_scale(scheme: ActivationScheme) -> None:
    x = inputs()
    length = scheme.group_len or x.shape[1]
    found = fake_quantize(x, scheme)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], length):
            own = x[row, start : start + length]
            scale = scheme.scale or (own.abs().max() / 448).item() or 1.0
            expected = (own / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            torch.testing.assert_close(found[row, start : start + length], expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_c_kernel_has_the_bits_of_the_reference(scheme: ActivationScheme) -> None:
    rounded = CpuOps(load_library()).with_activations(lambda x: x, scheme)
    assert torch.equal(rounded(inputs()), fake_quantize(inputs(), scheme))
    for row in inputs():  # alone, too
        assert torch.equal(rounded(row[None]), fake_quantize(row[None], scheme))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    x = inputs()
    x[2, 7] = value
    rounded = CpuOps(load_library()).with_activations(lambda x: x, ActivationScheme())
    for found in (rounded(x), fake_quantize(x, ActivationScheme())):
        assert found[2, 7].isnan() and torch.isfinite(found[[0, 1, 3, 4, 5]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
class TestGpu:
    pytestmark = GPU_MARKS

    def test_the_gpu_kernel_has_the_bits_of_the_reference(
        self, scheme: ActivationScheme, dtype: torch.dtype
    ) -> None:
        x = inputs(dtype).to(DEVICE)
        assert torch.equal(activations.fake_quantize(x, scheme), fake_quantize(x, scheme))

    def test_a_stream_is_normalised_first(
        self, scheme: ActivationScheme, dtype: torch.dtype
    ) -> None:
        x = inputs(dtype).to(DEVICE)
        squares = x.float().square().sum(-1, keepdim=True)
        stream = ResidualStream(x, x, squares)
        found = activations.fake_quantize_stream(stream, 1e-5, scheme)
        assert found.squares is None and found.total is x
        expected = fake_quantize(close_stream(stream, 1e-5), scheme)
        assert torch.equal(found.scaled, expected)
