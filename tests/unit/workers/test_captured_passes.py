"""Which sizes are recorded, and how much memory that is said to take before it is done."""

from __future__ import annotations

import pytest
import torch

from outrider.workers.cuda_graphs.captured_passes import (
    MAX_CAPTURED_TOKENS,
    MAX_MIXED_TOKENS,
    CapturedPasses,
    bytes_of_other_graphs,
    kernels_of,
    row_sizes,
)

CPU = torch.device("cpu")
MANY = 2**30


def _passes(num_sizes: int, kernels: int) -> CapturedPasses:
    return CapturedPasses(lambda _: None, range(1, num_sizes + 1), CPU, kernels)


def test_recordings_yet_to_be_made_are_told_from_the_largest_of_each_kind() -> None:
    """By their kernels, and with a quarter more: others may have more of them."""
    kinds = [_passes(5, kernels_of(32)), _passes(3, kernels_of(4)), _passes(0, 10**6)]
    num_kernels = kernels_of(32) + kernels_of(4)
    num_others = 4 * kernels_of(32) + 2 * kernels_of(4)
    assert bytes_of_other_graphs(kinds, MANY) == MANY * num_others * 5 // (4 * num_kernels)
    assert bytes_of_other_graphs([_passes(1, 100)], MANY) == 0


def test_recordings_take_something_even_where_the_driver_had_memory_left_for_the_largest() -> None:
    assert bytes_of_other_graphs([_passes(9, 100)], 0) >= 8 * 100 * 2**10
    assert bytes_of_other_graphs([], 0) == 0


@pytest.mark.parametrize("most", [1, 3, 16, 500, 512, 520, 700, 2048, 3000])
def test_sizes_end_with_the_most_and_little_of_a_large_pass_is_padding(most: int) -> None:
    sizes = row_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    # The same sizes hold small passes and large ones apart, which are cut up differently.
    assert MAX_CAPTURED_TOKENS in sizes or most < MAX_CAPTURED_TOKENS
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        if smaller >= 64 and larger <= MAX_MIXED_TOKENS:
            assert larger - smaller <= smaller // 2
