"""Linear layers: right, and for a row the same bits whatever stands beside it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from c_kernels import make_ops

from outrider.kernels.ops import Ops
from outrider.kernels.reference import ReferenceOps

BACKENDS = ["c", "torch", "torch-deterministic"]
SHAPES = [(16, 16), (70, 33), (5, 1), (1, 7), (100, 577), (960, 576)]


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_row_count_gives_the_product(
    ops: Ops, out_features: int, in_features: int, with_bias: bool
) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if with_bias else None
    linear = ops.linear(weight.clone(), bias)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 64, 97, 200):
        x = torch.randn(num_rows, in_features)
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["c", "torch-deterministic"])
@pytest.mark.parametrize(("out_features", "in_features"), [(70, 33), (576, 1536)])
def test_a_row_has_the_same_bits_alone_or_among_many(
    kind: str, out_features: int, in_features: int
) -> None:
    linear = make_ops(kind).linear(torch.randn(out_features, in_features), None)
    x = torch.randn(700, in_features)
    together = linear(x)
    for start, num_rows in ((0, 1), (1, 2), (3, 3), (9, 4), (100, 5), (303, 6), (77, 8), (5, 97)):
        rows = slice(start, start + num_rows)
        assert torch.equal(linear(x[rows]), together[rows])
    assert torch.equal(linear(x[[699, 5, 5, 0]]), together[[699, 5, 5, 0]])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_c_results_do_not_depend_on_the_number_of_threads(num_threads: int) -> None:
    weight, x, before = torch.randn(1000, 300), torch.randn(9, 300), torch.get_num_threads()
    expected = make_ops("c").linear(weight, None)(x)
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(make_ops("c").linear(weight, None)(x), expected)
    finally:
        torch.set_num_threads(before)
        make_ops("c")


def test_c_kernels_may_be_called_from_several_threads_at_once() -> None:
    linear, x = make_ops("c").linear(torch.randn(3000, 300), None), torch.randn(20, 300)
    expected = linear(x)

    def all_equal(_: int) -> bool:
        return all(torch.equal(linear(x), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(all_equal, range(8)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_c_kernels_work_in_a_forked_child() -> None:
    linear, x = make_ops("c").linear(torch.randn(3000, 300), None), torch.randn(20, 300)
    expected = linear(x).numpy().tobytes()  # torch's own threads would hang in the child
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if linear(x).numpy().tobytes() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_rows_that_are_not_contiguous_are_accepted(ops: Ops) -> None:
    weight, x = torch.randn(48, 32), torch.randn(32, 5).t()
    torch.testing.assert_close(ops.linear(weight, None)(x), x @ weight.t(), atol=1e-4, rtol=1e-4)


def test_a_packed_layer_needs_neither_the_weight_nor_the_bias_any_more() -> None:
    weight, bias = torch.randn(20, 10), torch.randn(20)
    linear, x = make_ops("c").linear(weight, bias), torch.randn(3, 10)
    expected = linear(x)
    weight.fill_(0)
    bias.fill_(0)
    assert torch.equal(linear(x), expected)


def test_a_wrong_width_is_refused_by_the_c_kernels() -> None:
    linear = make_ops("c").linear(torch.randn(20, 10), None)
    with pytest.raises(ValueError, match="10 inputs got 11"):
        linear(torch.randn(2, 11))


def test_another_dtype_is_refused_by_the_c_kernels() -> None:
    linear = make_ops("c").linear(torch.randn(20, 10), None)
    with pytest.raises(TypeError, match="float32"):
        linear(torch.randn(2, 10, dtype=torch.float64))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_reference_works_in_bfloat16(deterministic: bool) -> None:
    weight, x = torch.randn(24, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    out = ReferenceOps(deterministic).linear(weight, None)(x)
    assert out.dtype == torch.bfloat16
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.02)
