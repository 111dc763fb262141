"""Small-row products and what is fused with them, against float64."""

from __future__ import annotations

import gpu_tools
import pytest
import torch
from gpu_tools import DEVICE, DTYPES, GPU_MARKS, TOLERANCE, ragged_batch, relative_error
from torch import Tensor

from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.linear_kernels import linear_kernel
from outrider.kernels.gpu.ops import GpuFusedOps
from outrider.kernels.gpu.stream import ResidualStream, close_stream, open_stream
from outrider.kernels.gpu.tuning import LinearConfig, forced

pytestmark = GPU_MARKS

SHAPES = [(1, 64, 128), (3, 96, 192), (16, 40, 128), (17, 64, 136), (64, 32, 64)]


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.seed() % 2**31)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features", "depth"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product(
    generator: torch.Generator,
    rows: int,
    features: int,
    depth: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    x = _random(generator, rows, depth, dtype=dtype)
    weight = _random(generator, features, depth, dtype=dtype)
    bias = _random(generator, features, dtype=dtype) if has_bias else None
    linear = GpuLinear(weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(linear(x), expected) < TOLERANCE[dtype]
    logits = linear.wide(x)
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < 2e-6


@pytest.mark.parametrize("splits", [2, 3, 4])
def test_split_depth_gives_the_sum_and_leaves_counters_at_zero(
    generator: torch.Generator, splits: int
) -> None:
    config = LinearConfig(features=32, depth=32, warps=4, stages=2, splits=splits)
    x = _random(generator, 5, 320, dtype=torch.float32)
    weight = _random(generator, 70, 320, dtype=torch.float32)
    linear = GpuLinear(weight, None)
    expected = x.double() @ weight.double().T
    with forced(config):
        first, again = linear(x), linear(x)
    assert relative_error(first, expected) < 2e-6
    assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features", "depth"), SHAPES)
def test_stream_behind_a_product(
    generator: torch.Generator, rows: int, features: int, depth: int, dtype: torch.dtype
) -> None:
    x = _random(generator, rows, depth, dtype=dtype)
    weight = _random(generator, features, depth, dtype=dtype) / depth**0.5
    residual = _random(generator, rows, features, dtype=dtype)
    norm = 1 + 0.1 * _random(generator, features, dtype=dtype)
    before = ResidualStream(residual, residual, residual)  # only its total is read
    stream = GpuLinear(weight, None).add(x, before, norm, 1e-5)
    expected = x.double() @ weight.double().T + residual.double()
    assert relative_error(stream.total, expected) < TOLERANCE[dtype]
    assert stream.squares is not None
    assert relative_error(stream.squares.sum(1), expected.square().sum(-1)) < TOLERANCE[dtype]
    normed = close_stream(stream, 1e-5)
    assert relative_error(normed, _normed(expected, norm, 1e-5)) < TOLERANCE[dtype]
    index = torch.tensor([rows - 1, 0], dtype=torch.int32, device=DEVICE)
    assert torch.equal(close_stream(stream, 1e-5, index), normed[index.long()])


def _stream(
    generator: torch.Generator, rows: int, depth: int, dtype: torch.dtype
) -> tuple[ResidualStream, Tensor]:
    """A stream made of an embedding table, and what its norm gives."""
    table = 5 * _random(generator, 2 * rows, depth, dtype=dtype)
    norm = 1 + 0.1 * _random(generator, depth, dtype=dtype)
    ids = torch.randint(2 * rows, (rows,), generator=generator).to(DEVICE)
    stream = open_stream(ids, table, norm)
    assert torch.equal(stream.total, table[ids])
    return stream, _normed(table[ids], norm, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features", "depth"), SHAPES)
def test_stream_behind_a_product_that_was_computed_before(
    generator: torch.Generator, rows: int, features: int, depth: int, dtype: torch.dtype
) -> None:
    """The same as behind a fused product, also from tokens that were embedded before."""
    fused, product = GpuFusedOps(), _random(generator, rows, features, dtype=dtype)
    x = 4 * _random(generator, rows, features, dtype=dtype)
    norm = 1 + 0.1 * _random(generator, features, dtype=dtype)
    embedded = fused.open_embedded(x, norm, 1e-5)
    assert torch.equal(embedded.total, x)
    assert relative_error(close_stream(embedded, 1e-5), _normed(x, norm, 1e-5)) < TOLERANCE[dtype]
    before = x.clone(), product.clone()
    stream = fused.add(product, embedded, norm, 1e-5)
    assert torch.equal(x, before[0]) and torch.equal(product, before[1])
    assert torch.equal(stream.total, x + product)
    normed = _normed(x.double() + product.double(), norm, 1e-5)
    assert relative_error(close_stream(stream, 1e-5), normed) < TOLERANCE[dtype]
    linear = GpuLinear(_random(generator, 2 * depth, features, dtype=dtype) / features**0.5, None)
    gate, up = (normed @ linear.weight.double().T).chunk(2, dim=-1)
    gated = linear.norm_gated(stream, 1e-5)
    assert relative_error(gated, gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_and_none(generator: torch.Generator, dtype: torch.dtype) -> None:
    weight = _random(generator, 24, 32, dtype=dtype)
    linear = GpuLinear(weight, None)
    x = _random(generator, 200, 32, dtype=dtype)
    expected = x.double() @ weight.double().T
    assert relative_error(linear(x), expected) < TOLERANCE[dtype]
    logits = linear.wide(x)
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < (2e-6 if gpu_tools.HAS_CUDA else TOLERANCE[dtype])
    assert linear(x[:0]).shape == (0, 24)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "half", "depth"), [(1, 64, 128), (6, 72, 96), (33, 32, 136)])
def test_gated_product_of_the_normalised_stream(
    generator: torch.Generator, rows: int, half: int, depth: int, dtype: torch.dtype
) -> None:
    stream, normed = _stream(generator, rows, depth, dtype)
    weight = _random(generator, 2 * half, depth, dtype=dtype) / depth**0.5
    bias = _random(generator, 2 * half, dtype=dtype)
    for held, splits in ((None, 1), (bias, 2)):
        both = normed @ weight.double().T
        both = both if held is None else both + held.double()
        gate, up = both.chunk(2, dim=-1)
        with forced(LinearConfig(32, 32, 4, 2, splits)):
            out = GpuLinear(weight, held).norm_gated(stream, 1e-5)
        assert relative_error(out, gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 96), (2, 2, 128)])
@pytest.mark.parametrize("rotates", [True, False])
def test_queries_keys_and_values(
    generator: torch.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotates: bool,
    dtype: torch.dtype,
) -> None:
    depth, num_blocks = 96, 12
    batch = ragged_batch(
        [(1, 9), (5, 5), (2, 30)],
        block_size=8,
        tile_tokens=4,
        num_blocks=num_blocks,
        generator=generator,
    )
    batch.slots[3] = -1  # padding of a recorded pass
    rows = batch.positions.shape[0]
    stream, normed = _stream(generator, rows, depth, dtype)
    weight = _random(generator, (heads + 2 * kv_heads) * head_dim, depth, dtype=dtype) / depth**0.5
    bias = _random(generator, weight.shape[0], dtype=dtype)
    angles = torch.rand(40, head_dim // 2, generator=generator).to(DEVICE) * 6
    cos, sin = (angles.cos(), angles.sin()) if rotates else (None, None)
    caches = torch.full((2, num_blocks, kv_heads, 8, head_dim), torch.nan, device=DEVICE).to(dtype)
    with forced(LinearConfig(16, 32, 4, 2, splits=3 if rotates else 1)):
        query = GpuLinear(weight, bias).norm_rotate_store(
            stream, 1e-5, cos, sin, batch, caches[0], caches[1], heads
        )

    expected = normed @ weight.double().T + bias.double()
    expected = expected.view(rows, heads + 2 * kv_heads, head_dim)
    if rotates:
        low, high = expected[:, : heads + kv_heads].chunk(2, dim=-1)
        at = angles.double()[batch.positions].unsqueeze(1)
        turned = (low * at.cos() - high * at.sin(), high * at.cos() + low * at.sin())
        expected = torch.cat((torch.cat(turned, -1), expected[:, heads + kv_heads :]), 1)
    assert relative_error(query, expected[:, :heads]) < TOLERANCE[dtype]
    stored = [at for at in range(rows) if at != 3]
    slots = batch.slots[stored]
    held = caches[:, slots // 8, :, slots % 8]
    wanted = expected[stored, heads:].unflatten(1, (2, kv_heads))
    assert relative_error(held, wanted) < TOLERANCE[dtype]
    assert int(caches.isnan().any(-1).sum()) == 2 * kv_heads * (num_blocks * 8 - len(stored))


LARGE = (768, 640, LinearConfig(64, 128, 4, 4, splits=2))  # of which the matrix units take most


@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]
)
@pytest.mark.parametrize(
    ("depth", "features", "config"),
    [(160, 72, LinearConfig(32, 32, 4, 2, splits=2)), *([LARGE] * gpu_tools.HAS_CUDA)],
)
def test_a_row_of_a_fixed_product_is_the_same_in_any_company(
    generator: torch.Generator,
    dtype: torch.dtype,
    depth: int,
    features: int,
    config: LinearConfig,
) -> None:
    """Alone, elsewhere in a block, in the next block: bit for bit, streams included."""
    x = _random(generator, 150, depth, dtype=dtype)
    linear = GpuLinear(_random(generator, features, depth, dtype=dtype), None, is_fixed=True)
    square = GpuLinear(_random(generator, depth, depth, dtype=dtype), None, is_fixed=True)
    norm = 1 + 0.1 * _random(generator, depth, dtype=dtype)
    ids = torch.arange(150, device=DEVICE)

    def run(rows: list[int]) -> tuple[Tensor, ...]:
        own = x[rows]
        stream = open_stream(ids[rows], x, norm)
        behind = square.add(own, stream, norm, 1e-5)
        assert behind.squares is not None
        return (
            linear.wide(own),
            behind.total,
            behind.squares,
            linear.norm_gated(behind, 1e-5),
            close_stream(behind, 1e-5),
        )

    with forced(config):
        whole = run(list(range(150)))
        for rows in ([77], [149, 3], list(range(20, 50)), list(range(60, 140))):
            for part, of_whole in zip(run(rows), whole, strict=True):
                assert torch.equal(part, of_whole[rows])


def test_the_interpreter_runs_where_there_is_no_gpu() -> None:
    assert gpu_tools.HAS_CUDA or type(linear_kernel).__name__ == "InterpretedFunction"
