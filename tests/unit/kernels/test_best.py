"""The best token of a head of stored weights: what a search of all its scores finds, whichever are
computed."""

from __future__ import annotations

from ctypes import addressof, c_int64

import pytest
import torch
from c_kernels import make_ops
from stored_weights import stored_weight
from torch import Tensor

from outrider.kernels.cpu.native import CQuantLayer, check
from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.cpu.stored import CpuTable
from outrider.kernels.stored import KINDS, StoredWeight
from outrider.scheduler.types import NO_TOKEN

pytest.importorskip("gguf")

WIDTH = 512
BOUNDED = [kind for kind in ("Q4_0", "Q5_0", "Q8_0", "Q6_K", "INT8") if kind in KINDS]


@pytest.fixture
def ops() -> CpuOps:
    made = make_ops("c")
    assert isinstance(made, CpuOps)
    return made


def table_of(ops: CpuOps, weight: StoredWeight) -> CpuTable:
    return ops.stored.table(ops.stored.packed(weight))


def best_of(ops: CpuOps, table: CpuTable, x: Tensor, vocab_size: int | None = None) -> list[int]:
    out_features, in_features = table.packed.shape
    layer = CQuantLayer.from_address(table.address)
    head = CQuantLayer(
        layer.packed, None, layer.kind, vocab_size or out_features, in_features, out_features
    )
    norms, best = table.norms(), (c_int64 * len(x))()
    scores = torch.empty(len(x), out_features)
    address = None if norms is None else norms.data_ptr()
    x = x.contiguous()
    check(
        ops.library.quant_best(
            addressof(head), address, x.data_ptr(), len(x), scores.data_ptr(), best
        )
    )
    return best[:]


def scores_of(ops: CpuOps, table: CpuTable, x: Tensor) -> Tensor:
    return ops.stored.linear([table.packed], None)(x)


def inputs(num_rows: int, seed: int) -> Tensor:
    """Some much larger than others, so that first bytes say little of those beside them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(WIDTH, generator=generator).exp()
    return torch.randn(num_rows, WIDTH, generator=generator) * sizes


def with_copies(weight: StoredWeight, row: int, at: Tensor) -> StoredWeight:
    """The same but for some rows, which are like one of them."""
    blocks, scales = weight.blocks.clone(), weight.scales
    blocks[at] = blocks[row].clone()
    if scales is not None:
        scales = scales.clone()
        scales[at] = scales[row].clone()
    return StoredWeight(weight.kind, blocks, weight.shape, scales)


@pytest.mark.parametrize("vocab_size", [9000, 4097, 4096, 20, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_first_of_the_highest_scores(ops: CpuOps, kind: str, vocab_size: int) -> None:
    table = table_of(ops, stored_weight(kind, (9000, WIDTH))[0])
    for num_rows in range(1, 9):
        x = inputs(num_rows, seed=num_rows)
        expected = scores_of(ops, table, x)[:, :vocab_size].argmax(-1).tolist()
        assert best_of(ops, table, x, vocab_size) == expected


@pytest.mark.parametrize("kind", BOUNDED)
def test_bounds_tell_apart_what_differs_in_a_last_place_only(ops: CpuOps, kind: str) -> None:
    """Many rows like the best one, each with another weight a little different."""
    weight, _ = stored_weight(kind, (6000, WIDTH))
    table, x = table_of(ops, weight), inputs(8, seed=5)
    for row in range(8):
        best = int(scores_of(ops, table, x[row : row + 1]).argmax())
        twins = torch.arange(7, 6000, 397)
        copied = with_copies(weight, best, twins)
        for twin in twins.tolist():
            copied.blocks[twin, 20 + twin % 8] ^= 1  # of some weight, the scales are elsewhere
        changed = table_of(ops, copied)
        scores = scores_of(ops, changed, x[row : row + 1])
        assert scores[0, twins].unique().numel() > 4, "they are not all the same"
        assert best_of(ops, changed, x[row : row + 1]) == [int(scores.argmax())]


@pytest.mark.parametrize("kind", BOUNDED)
def test_of_equals_the_lowest_however_many_there_are(ops: CpuOps, kind: str) -> None:
    weight, _ = stored_weight(kind, (5000, WIDTH))
    x = inputs(3, seed=2)
    best = int(scores_of(ops, table_of(ops, weight), x[:1]).argmax())
    for equals in ([4999, 4200, 33, 32], list(range(17, 5000, 3)), list(range(5000))):
        table = table_of(ops, with_copies(weight, best, torch.tensor(equals)))
        assert best_of(ops, table, x) == scores_of(ops, table, x).argmax(-1).tolist()
        assert best_of(ops, table, x[:1]) == [min(best, *equals)]


@pytest.mark.parametrize("kind", BOUNDED)
def test_inputs_of_any_size_and_none_that_is_not_finite(ops: CpuOps, kind: str) -> None:
    table, x = table_of(ops, stored_weight(kind, (5000, WIDTH))[0]), inputs(8, seed=3)
    for row, size in enumerate((1e-44, 1e-36, 1e-20, 1e20, 1e28)):
        x[row] *= size
    x[5] = 0
    x[6, 100], x[7, 200] = torch.nan, torch.inf
    found = best_of(ops, table, x)
    assert found[:6] == scores_of(ops, table, x[:6]).argmax(-1).tolist()
    assert found[6:] == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_a_nan_weight_is_never_the_best_token_but_ends_the_row(ops: CpuOps, kind: str) -> None:
    weight, _ = stored_weight(kind, (5000, WIDTH))
    scale = {"Q8_0": 0, "Q6_K": 208}[kind]  # where a block has it
    for bits in (0x7E00, 0x7C00, 0xFC00):  # NaN, and infinite
        blocks = weight.blocks.clone()
        blocks[4000, scale : scale + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
        table, x = table_of(ops, StoredWeight(kind, blocks, weight.shape)), inputs(4, seed=4)
        scores = scores_of(ops, table, x)
        expected = [
            NO_TOKEN if row.isnan().any() or row.max().isinf() else int(row.argmax())
            for row in scores
        ]
        assert best_of(ops, table, x) == expected
        assert best_of(ops, table, x, 4000) == scores[:, :4000].argmax(-1).tolist()
