"""The probability of one token per row: C and torch against float64."""

import pytest
import torch
from c_kernels import make_ops


@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 64), (2, 8193), (5, 49152)])
def test_probability_of_equals_a_float64_softmax(backend: str, shape: tuple[int, int]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5
    if shape[1] > 5:
        scores[:, 2] = float("-inf")
    tokens = torch.randint(shape[1], (shape[0],), generator=torch.Generator().manual_seed(2))
    found = make_ops(backend).probability_of(scores, tokens)
    expected = scores.double().softmax(-1).gather(-1, tokens[:, None])[:, 0].float()
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=1e-9)


def test_a_row_alone_has_the_same_probability_bit_for_bit() -> None:
    ops = make_ops("c")
    scores, tokens = torch.randn(9, 20_000), torch.arange(9)
    together = ops.probability_of(scores, tokens)
    alone = torch.cat([ops.probability_of(scores[i : i + 1], tokens[i : i + 1]) for i in range(9)])
    assert torch.equal(together, alone)
