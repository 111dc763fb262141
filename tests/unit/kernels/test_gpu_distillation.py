"""The slope of a distillation against tensor operations."""

from __future__ import annotations

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS
from torch import Tensor

from outrider.kernels.gpu.distillation import kl_gradient_in_place, log_sums

pytestmark = GPU_MARKS


def _logits(rows: int, vocab: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 6).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "known"), [(7, 7), (4096, 4096), (5000, 4500), (9001, 300)])
def test_slopes_and_divergences_are_those_of_tensor_operations(
    dtype: torch.dtype, vocab: int, known: int
) -> None:
    taught, guessed = _logits(5, vocab, 1, dtype), _logits(5, known, 2, dtype)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:known].to(DEVICE)
    logs = torch.log_softmax(taught.float(), -1)[:, ids]
    own = torch.log_softmax(guessed.float(), -1)
    mass = logs.exp().sum(-1)
    expected = own.exp() * mass[:, None] - logs.exp()
    divergences = (logs.exp() * (logs - own)).sum(-1)

    sums = log_sums(taught)
    torch.testing.assert_close(sums, torch.logsumexp(taught.float(), -1), atol=1e-4, rtol=1e-5)
    found = kl_gradient_in_place(taught[:, ids].contiguous(), sums, mass, guessed)

    torch.testing.assert_close(found, divergences, atol=1e-3, rtol=1e-4)
    exactness = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(guessed.float(), expected, atol=exactness * 0.1, rtol=exactness)


def test_rows_that_are_parts_of_wider_ones_and_none_at_all() -> None:
    wide = _logits(4, 96, 4, torch.float32)
    torch.testing.assert_close(log_sums(wide[:, 16:80]), torch.logsumexp(wide[:, 16:80], -1))
    kept, ones = wide.clone(), torch.ones(4, device=DEVICE)
    part = wide[:, 16:80]
    kl_gradient_in_place(part, log_sums(part), ones, part)  # of the teacher from itself: none
    torch.testing.assert_close(part, torch.zeros_like(part), atol=1e-6, rtol=0)
    assert torch.equal(wide[:, :16], kept[:, :16]) and torch.equal(wide[:, 80:], kept[:, 80:])
    assert log_sums(wide[:0]).shape == (0,)
