"""Stored weights: their values, their products, and for a row the same bits whatever stands beside
it, on any thread and with any instructions."""

from __future__ import annotations

import pytest
import torch
from c_kernels import make_ops
from stored_weights import stored_weight
from torch import Tensor

from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.cpu.stored import CpuStored
from outrider.kernels.ops import RaggedBatch
from outrider.kernels.stored import KINDS, StoredWeight

pytest.importorskip("gguf")

SHAPES = [(16, 256), (70, 512), (5, 256), (1, 768), (200, 1536)]
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 64)


@pytest.fixture
def ops() -> CpuOps:
    made = make_ops("c")
    assert isinstance(made, CpuOps)
    return made


@pytest.fixture
def stored(ops: CpuOps) -> CpuStored:
    return ops.stored


def activations(num_rows: int, width: int, seed: int = 1) -> Tensor:
    """Some inputs are much larger than others, as those of language models are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(width, generator=generator).exp()
    return torch.randn(num_rows, width, generator=generator) * sizes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table_are_bit_for_bit_what_undoing_the_form_gives(
    stored: CpuStored, kind: str, shape: tuple[int, int]
) -> None:
    weight, whole = stored_weight(kind, shape)
    ids = torch.arange(shape[0]).flip(0)
    assert torch.equal(stored.table(stored.packed(weight))(ids), whole[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_bit_for_bit_its_value_in_a_product(stored: CpuStored, kind: str) -> None:
    """One input is 1 and the others are 0: what comes out is the weight."""
    weight, whole = stored_weight(kind, (48, 256))
    product = stored.linear([stored.packed(weight)], None)(torch.eye(256))
    assert torch.equal(product, whole.t())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_at_least_as_good_as_those_of_float32(
    ops: CpuOps, kind: str, shape: tuple[int, int], with_bias: bool
) -> None:
    weight, whole = stored_weight(kind, shape)
    bias = torch.randn(shape[0]) if with_bias else None
    linear = ops.stored.linear([ops.stored.packed(weight)], bias)
    plain = ops.linear(whole, bias)
    for num_rows in ROWS:
        x = activations(num_rows, shape[1])
        exact = x.double() @ whole.double().t()
        if bias is not None:
            exact += bias.double()
        ours, theirs = ((got.double() - exact).norm() for got in (linear(x), plain(x)))
        assert ours <= 1.5 * theirs + 1e-6 * exact.norm()


@pytest.mark.parametrize("shape", [(70, 33), (200, 1536), (5, 1)])
@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_halves_give_bit_for_bit_what_they_give_in_float32(
    ops: CpuOps, kind: str, shape: tuple[int, int]
) -> None:
    weight, whole = stored_weight(kind, shape)
    bias = torch.randn(shape[0])
    linear, plain = ops.stored.linear([ops.stored.packed(weight)], bias), ops.linear(whole, bias)
    for num_rows in ROWS:
        x = activations(num_rows, shape[1])
        assert torch.equal(linear(x), plain(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_or_among_many(stored: CpuStored, kind: str) -> None:
    weight, _ = stored_weight(kind, (70, 768))
    linear = stored.linear([stored.packed(weight)], torch.randn(70))
    x = activations(150, 768)
    together = linear(x)
    for start in (0, 1, 77):
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 64):
            rows = slice(start, start + num_rows)
            assert torch.equal(linear(x[rows]), together[rows])
    assert torch.equal(linear(x[[149, 5, 5, 0]]), together[[149, 5, 5, 0]])


@pytest.mark.parametrize("out_features", [5, 48, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_have_the_bits_of_each_alone(
    stored: CpuStored, kind: str, out_features: int
) -> None:
    """More than are multiplied at a time, by panels and rows that fill no tile, and one row that is
    too large to be a whole number beside others that are not."""
    weight, _ = stored_weight(kind, (out_features, 1280))
    linear = stored.linear([stored.packed(weight)], torch.randn(out_features))
    x = activations(403, 1280)
    x[11, 700] = 1e35
    together = linear(x)
    alone = torch.cat([linear(x[row : row + 1]) for row in range(len(x))])
    torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)
    for num_rows in (9, 15, 17, 31, 129):
        expected = alone[:num_rows]
        torch.testing.assert_close(linear(x[:num_rows]), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_number_of_threads(kind: str) -> None:
    weight, _ = stored_weight(kind, (1000, 256))
    x, before = activations(20, 256), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            made = make_ops("c")
            assert isinstance(made, CpuOps)
            results.append(made.stored.linear([made.stored.packed(weight)], None)(x))
    finally:
        torch.set_num_threads(before)
        make_ops("c")
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_that_runs_here_gives_the_same_bits(stored: CpuStored, kind: str) -> None:
    weight, _ = stored_weight(kind, (40, 512))
    linear, x = stored.linear([stored.packed(weight)], None), activations(23, 512)
    for row, size in enumerate((0.0, 1e-44, 1e-36, 1e-30, 1e-20, 1e20, 1e29, float("nan"))):
        x[row] *= size
    x[8, 40:90], x[9, 300] = 0.0, float("inf")
    fastest = stored.path
    results: dict[int, Tensor] = {}
    names: dict[str, int] = {}
    try:
        for index in range(4):
            if stored.use_path(index):
                names[stored.path] = index
                results[index] = linear(x)
    finally:
        stored.use_path(names[fastest])
    assert fastest in names and "plain" in names and len(names) == len(results)
    finite = results[names["plain"]].isfinite().all(1)
    assert (~finite).nonzero().flatten().tolist() == [7, 9]
    for result in results.values():
        torch.testing.assert_close(result, results[names["plain"]], rtol=0, atol=0, equal_nan=True)


def test_weights_of_several_kinds_stand_below_each_other(stored: CpuStored) -> None:
    made = [stored_weight(kind, (out, 256)) for kind, out in (("Q4_K", 24), ("Q6_K", 7))]
    parts = [stored.packed(weight) for weight, _ in made]
    bias, x = torch.randn(31), activations(5, 256)
    both = stored.linear(parts, bias)(x)
    assert torch.equal(both[:, :24], stored.linear(parts[:1], bias[:24])(x))
    assert torch.equal(both[:, 24:], stored.linear(parts[1:], bias[24:])(x))


def test_inputs_of_every_size_keep_their_precision(stored: CpuStored) -> None:
    weight, whole = stored_weight("Q4_1", (32, 256))
    linear = stored.linear([stored.packed(weight)], None)
    for size in (1e-20, 1e-6, 1.0, 1e6, 1e20):
        x = torch.randn(3, 256) * size
        torch.testing.assert_close(linear(x), x @ whole.t(), rtol=1e-4, atol=1e-6 * size)
    assert torch.equal(linear(torch.zeros(2, 256)), torch.zeros(2, 32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_not_finite_in_its_own_row_alone(
    stored: CpuStored, bad: float
) -> None:
    weight, _ = stored_weight("Q8_0", (32, 256))
    linear, x = stored.linear([stored.packed(weight)], None), torch.randn(3, 256)
    expected = linear(x)
    x[1, 40] = bad
    got = linear(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


def test_a_captured_pass_takes_stored_weights(ops: CpuOps) -> None:
    weight, _ = stored_weight("Q4_1", (256, 256))
    linear = ops.stored.linear([ops.stored.packed(weight)], None)
    norm = torch.ones(256)

    def run(x: Tensor, _: object) -> Tensor:
        return ops.rms_norm(linear(x), norm, 1e-5)

    replayed = ops.captured(run)
    batch = _empty_batch()
    for seed in range(3):
        x = activations(3, 256, seed)
        assert torch.equal(replayed(x, batch), run(x, batch))


def _empty_batch() -> RaggedBatch:
    int32, int64 = torch.int32, torch.int64
    return RaggedBatch(
        positions=torch.zeros(3, dtype=int64),
        slots=torch.zeros(3, dtype=int64),
        cu_query_lens=torch.tensor([0, 3], dtype=int32),
        context_lens=torch.tensor([3], dtype=int32),
        block_tables=torch.zeros((1, 1), dtype=int32),
        max_query_len=3,
        max_context_len=3,
    )


def test_few_bits_are_of_use_only_where_the_cpu_has_instructions_for_them(
    stored: CpuStored,
) -> None:
    indices = [index for index in range(4) if stored.use_path(index)]
    try:
        assert stored.path == "plain"
        assert not stored.gains_by("Q4_1") and stored.gains_by("BF16")
        if len(indices) > 1:
            stored.use_path(indices[0])
            assert stored.gains_by("Q4_1")
    finally:
        stored.use_path(indices[0])


def test_rows_that_are_no_whole_blocks_are_refused(stored: CpuStored) -> None:
    with pytest.raises(ValueError, match="Q4_K has blocks of 256, not rows of 288"):
        stored.packed_len("Q4_K", (16, 288))


def test_too_few_bytes_are_refused(stored: CpuStored) -> None:
    weight = StoredWeight("Q8_0", torch.zeros(16, 33, dtype=torch.uint8), (16, 32))
    with pytest.raises(ValueError, match="takes"):
        stored.packed(weight)


def test_a_row_outside_the_table_is_refused(stored: CpuStored) -> None:
    weight, _ = stored_weight("Q8_0", (16, 32))
    table = stored.table(stored.packed(weight))
    for index in (-1, 16):
        with pytest.raises(IndexError, match="outside the table"):
            table(torch.tensor([0, index]))


def test_a_wrong_width_or_type_of_input_is_refused(stored: CpuStored) -> None:
    weight, _ = stored_weight("Q8_0", (16, 32))
    linear = stored.linear([stored.packed(weight)], None)
    with pytest.raises(ValueError, match="32 inputs got 64"):
        linear(torch.randn(2, 64))
    with pytest.raises(TypeError, match="float32"):
        linear(torch.randn(2, 32, dtype=torch.float64))
