"""Products of 8-bit weights and what is fused with them, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_tools import DEVICE, DTYPES, GPU_MARKS, TOLERANCE, ragged_batch, relative_error
from torch import Tensor

from outrider.kernels.gpu import linear, tuning
from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.packed import pack, unpack
from outrider.kernels.gpu.stream import ResidualStream, close_stream, open_stream
from outrider.kernels.gpu.tuning import LinearConfig, forced, linear_config, table_key
from outrider.kernels.quantized import QuantizedWeight, quantize

pytestmark = GPU_MARKS

KINDS = ["fp8", "int8"]
EPS = 1e-5


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.seed() % 2**31)


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def _weight(
    generator: torch.Generator, features: int, depth: int, dtype: torch.dtype, kind: str
) -> tuple[QuantizedWeight, Tensor]:
    """Rows of very different sizes, so that a scale in the wrong place shows; and in float64."""
    sizes = torch.logspace(-2, 0, features)[torch.randperm(features, generator=generator)]
    made = torch.randn(features, depth, generator=generator) * sizes[:, None] / depth**0.5
    made[features // 2] = 0.0
    weight = quantize(made.to(DEVICE, dtype), kind)
    return weight, weight.values.double() * weight.scales.double()[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth"), [(1, 128), (17, 136), (70, 96)])
def test_product(
    generator: torch.Generator, rows: int, depth: int, dtype: torch.dtype, kind: str
) -> None:
    x = _random(generator, rows, depth, dtype=dtype)
    weight, exact = _weight(generator, 40, depth, dtype, kind)
    for bias, splits in ((None, 1), (_random(generator, 40, dtype=dtype), 2)):
        product = GpuLinear(weight, bias)
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        with forced(LinearConfig(32, 32, 4, 2, splits)):
            assert relative_error(product(x), expected) < TOLERANCE[dtype]
            logits = product.wide(x)
        assert logits.dtype == torch.float32
        assert relative_error(logits, expected) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_8_bit_value_is_multiplied_exactly(kind: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    values = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    values = values[values.float().isfinite()]
    count = values.shape[0] // 2 * 2
    values = values[:count].repeat(2, 1)
    scales = torch.tensor([1.0, 0.5], device=DEVICE)
    product = GpuLinear(QuantizedWeight(values, scales, dtype), None)
    for rows in torch.eye(count, dtype=dtype, device=DEVICE).split(64):
        at = rows.argmax(1)
        assert torch.equal(product.wide(rows), (values.float() * scales[:, None]).T[at])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_hold_the_halves_of_a_row_side_by_side(
    generator: torch.Generator, kind: str
) -> None:
    weight = _weight(generator, 6, 10, torch.float32, kind)[0]
    values = weight.values
    packed = pack(values)
    assert (packed.dtype, packed.shape) == (torch.int16, (6, 5))
    bytes_of = values.view(torch.uint8).int()
    assert torch.equal(packed.int() & 0xFFFF, bytes_of[:, :5] + 256 * bytes_of[:, 5:])
    with pytest.raises(ValueError, match="even number of inputs, not 9"):
        pack(values[:, :9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_weights_are_the_dequantised_ones(
    generator: torch.Generator, kind: str, dtype: torch.dtype
) -> None:
    weight = _weight(generator, 5, 2600, dtype, kind)[0]
    found = unpack(pack(weight.values), weight.scales, kind, dtype)
    assert torch.equal(found, weight.dequantized())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_the_librarys(
    generator: torch.Generator, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, exact = _weight(generator, 24, 32, dtype, kind)
    product = GpuLinear(weight, None)
    x = _random(generator, linear.MAX_QUANTIZED_ROWS + 1, 32, dtype=dtype)
    for out in (product(x), product.wide(x)):
        assert relative_error(out, x.double() @ exact.T) < TOLERANCE[dtype]
    assert product(x[:0]).shape == (0, 24)
    calls: list[int] = []

    def counted(
        self: GpuLinear, x: torch.Tensor, out: torch.Tensor, config: LinearConfig
    ) -> torch.Tensor:
        calls.append(x.shape[0])
        return out

    monkeypatch.setattr(GpuLinear, "_own", counted)
    for held in (GpuLinear(weight, None), GpuLinear(weight, None, is_fixed=True)):
        for rows in (256, 257):
            held(x[:rows])
    assert calls == [256, 256, 257]  # where rows are to be independent, the kernel takes them all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 66])
def test_stream_behind_a_product(
    generator: torch.Generator, rows: int, dtype: torch.dtype, kind: str
) -> None:
    weight, exact = _weight(generator, 72, 96, dtype, kind)
    x = _random(generator, rows, 96, dtype=dtype)
    residual = _random(generator, rows, 72, dtype=dtype)
    norm = 1 + 0.1 * _random(generator, 72, dtype=dtype)
    before = ResidualStream(residual, residual, residual)  # only its total is read
    with forced(LinearConfig(32, 32, 4, 2, splits=2)):
        stream = GpuLinear(weight, None).add(x, before, norm, 1e-5)
    expected = x.double() @ exact.T + residual.double()
    assert relative_error(stream.total, expected) < TOLERANCE[dtype]
    normed = close_stream(stream, EPS)
    assert relative_error(normed, _normed(expected, norm)) < TOLERANCE[dtype]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def _stream(
    generator: torch.Generator, rows: int, depth: int, dtype: torch.dtype
) -> tuple[ResidualStream, Tensor]:
    """A stream of embedded tokens, and what its norm gives."""
    table = 5 * _random(generator, rows, depth, dtype=dtype)
    norm = 1 + 0.1 * _random(generator, depth, dtype=dtype)
    stream = open_stream(torch.arange(rows, device=DEVICE), table, norm)
    return stream, _normed(table, norm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
def test_gated_product_of_the_normalised_stream(
    generator: torch.Generator, rows: int, dtype: torch.dtype, kind: str
) -> None:
    half, depth = 40, 136
    stream, normed = _stream(generator, rows, depth, dtype)
    weight, exact = _weight(generator, 2 * half, depth, dtype, kind)
    bias = _random(generator, 2 * half, dtype=dtype)
    for held, splits in ((None, 1), (bias, 2)):
        both = normed @ exact.T + (0 if held is None else held.double())
        gate, up = both.chunk(2, dim=-1)
        with forced(LinearConfig(32, 32, 4, 2, splits)):
            out = GpuLinear(weight, held).norm_gated(stream, EPS)
        assert relative_error(out, gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_keys_and_values(
    generator: torch.Generator, has_bias: bool, dtype: torch.dtype, kind: str
) -> None:
    heads, kv_heads, head_dim, depth = 3, 1, 64, 96
    lengths = [(1, 9), (5, 5), (2, 30)]
    batch = ragged_batch(lengths, block_size=8, tile_tokens=4, num_blocks=12, generator=generator)
    rows = batch.positions.shape[0]
    stream, normed = _stream(generator, rows, depth, dtype)
    weight, exact = _weight(generator, (heads + 2 * kv_heads) * head_dim, depth, dtype, kind)
    bias = _random(generator, exact.shape[0], dtype=dtype) if has_bias else None
    angles = torch.rand(40, head_dim // 2, generator=generator).to(DEVICE) * 6
    caches = torch.zeros(2, 12, kv_heads, 8, head_dim, device=DEVICE, dtype=dtype)
    with forced(LinearConfig(16, 32, 4, 2, splits=3 if has_bias else 1)):
        query = GpuLinear(weight, bias).norm_rotate_store(
            stream, EPS, angles.cos(), angles.sin(), batch, caches[0], caches[1], heads
        )
    expected = normed @ exact.T + (0 if bias is None else bias.double())
    expected = expected.view(rows, heads + 2 * kv_heads, head_dim)
    low, high = expected[:, : heads + kv_heads].chunk(2, dim=-1)
    at = angles.double()[batch.positions].unsqueeze(1)
    turned = (low * at.cos() - high * at.sin(), high * at.cos() + low * at.sin())
    expected = torch.cat((torch.cat(turned, -1), expected[:, heads + kv_heads :]), 1)
    assert relative_error(query, expected[:, :heads]) < TOLERANCE[dtype]
    held = caches[:, batch.slots // 8, :, batch.slots % 8]
    assert relative_error(held, expected[:, heads:].unflatten(1, (2, kv_heads))) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_fixed_product_is_the_same_in_any_company(
    generator: torch.Generator, kind: str
) -> None:
    dtype = DTYPES[-1]
    weight, _ = _weight(generator, 72, 160, dtype, kind)
    product = GpuLinear(weight, None, is_fixed=True)
    x = _random(generator, 150, 160, dtype=dtype)
    with forced(LinearConfig(32, 32, 4, 2, splits=2)):
        everything = product.wide(x)
        for rows in ([77], [149, 3], list(range(60, 140))):
            assert torch.equal(product.wide(x[rows]), everything[rows])


def test_8_bit_weights_are_cut_up_as_tuned_for_them_or_else_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = {"features": 16, "depth": 512, "warps": 4, "stages": 3}
    others = mine | {"depth": 64}
    table = {
        table_key("linear", 1000, 512, 16, is_8bit=True): mine,
        table_key("linear", 1000, 512, 16): others,
        table_key("linear", 2000, 512, 16): others,
    }
    monkeypatch.setattr(tuning, "_table", lambda: table)
    tuning._known_config.cache_clear()
    try:
        assert linear_config("linear", 1000, 512, 16, is_8bit=True) == LinearConfig(**mine)
        assert linear_config("linear", 1000, 512, 16) == LinearConfig(**others)
        assert linear_config("linear", 2000, 512, 16, is_8bit=True) == LinearConfig(**others)
        assert linear_config("linear", 3000, 512, 16, is_8bit=True).depth == 256
        assert linear_config("linear", 3000, 512, 16).depth == 128
    finally:
        tuning._known_config.cache_clear()
