"""Norms and activations of the C kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from c_kernels import make_ops

from outrider.kernels.ops import Ops
from outrider.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()
SHAPES = [(0, 64), (1, 1), (1, 576), (3, 7), (6, 576), (5, 33), (200, 576)]


@pytest.fixture
def ops() -> Ops:
    return make_ops("c")


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm_equals_the_reference(ops: Ops, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width) * 5, torch.randn(width)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm_equals_the_reference(ops: Ops, rows: int, width: int) -> None:
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(normed, expected_normed)
    assert torch.equal(total, expected_total)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_equals_the_reference(ops: Ops, rows: int, width: int, with_bias: bool) -> None:
    x, weight = torch.randn(rows, width) + 3, torch.randn(width)
    bias = torch.randn(width) if with_bias else None
    expected = REFERENCE.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(
        ops.layer_norm(x, weight, bias, 1e-5), expected, atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (4, 3), (2, 16), (7, 1536), (60, 90)])
def test_silu_mul_equals_the_reference(ops: Ops, rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 10
    torch.testing.assert_close(ops.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_silu_mul_saturates_without_nan(ops: Ops) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.5, 0.0, 88.5, 200.0, 1e30, -90.0]])
    gate_up = torch.cat([gate, torch.ones(1, 8)], dim=1)
    torch.testing.assert_close(ops.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_embed_gathers_rows(ops: Ops) -> None:
    table, ids = torch.randn(10, 6), torch.tensor([3, 3, 9, 0])
    assert torch.equal(ops.embed(ids, table), table[ids])


def test_a_row_has_the_same_bits_alone_or_among_many(ops: Ops) -> None:
    x, residual, weight = torch.randn(300, 577), torch.randn(300, 577), torch.randn(577)
    one = slice(123, 124)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5)[one], ops.rms_norm(x[one], weight, 1e-5))
    assert torch.equal(
        ops.add_rms_norm(x, residual, weight, 1e-5)[0][one],
        ops.add_rms_norm(x[one], residual[one], weight, 1e-5)[0],
    )
    assert torch.equal(
        ops.layer_norm(x, weight, weight, 1e-5)[one], ops.layer_norm(x[one], weight, weight, 1e-5)
    )
    gate_up = torch.randn(300, 2 * 577)
    assert torch.equal(ops.silu_mul(gate_up)[one], ops.silu_mul(gate_up[one]))
