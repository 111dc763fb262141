"""Products of more than 64 rows, by our kernels and by the library, alone and mixed."""

from __future__ import annotations

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS, TOLERANCE, ragged_batch, relative_error
from torch import Tensor

from outrider.kernels.gpu import tuning
from outrider.kernels.gpu.linear import GpuLinear
from outrider.kernels.gpu.stream import ResidualStream, close_stream, open_stream
from outrider.kernels.gpu.tuning import (
    LibraryConfig,
    LinearConfig,
    ProductConfig,
    forced,
    linear_config,
    product_config,
)

pytestmark = GPU_MARKS

EPS = 1e-5
OWN = [
    LinearConfig(32, 32, 4, 2, rows=128),
    LinearConfig(16, 32, 4, 2, splits=2, rows=64, rest=32),
]
LIBRARY = LibraryConfig()
TRANSPOSED = LibraryConfig(transposed=True)
WAYS = [LIBRARY, LibraryConfig(rows=128, biased=True), TRANSPOSED, *reversed(OWN)]
DTYPES = (torch.float32, torch.float16)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "config"), [(65, 64, OWN[0]), (96, 72, OWN[1]), (200, 64, OWN[1])]
)
def test_product(rows: int, depth: int, config: LinearConfig, dtype: torch.dtype) -> None:
    x, weight = _random(rows, depth, dtype=dtype), _random(72, depth, dtype=dtype)
    bias = _random(72, dtype=dtype)
    linear = GpuLinear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    with forced(config):
        out, wide, again = linear(x), linear.wide(x), linear.wide(x)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert wide.dtype == torch.float32
    assert relative_error(wide, expected) < 2e-6
    assert torch.equal(wide, again)


PAIRS = [
    *(
        pytest.param(
            *(first, second, torch.float32, False),
            marks=() if first is second else pytest.mark.slow,
        )
        for first in WAYS[:-1]
        for second in WAYS[:-1]
    ),
    *((OWN[1], second, torch.float16, False) for second in (LIBRARY, TRANSPOSED, OWN[1])),
    *((OWN[0], second, torch.float32, True) for second in (LIBRARY, TRANSPOSED, OWN[1])),
]


@pytest.mark.parametrize(("first", "second", "dtype", "has_bias"), PAIRS)
def test_products_of_either_kind_follow_each_other(
    first: ProductConfig, second: ProductConfig, has_bias: bool, dtype: torch.dtype
) -> None:
    """A stream from one kind of product, gated by the other kind."""
    rows, hidden, half = 96, 64, 40
    x = _random(rows, 48, dtype=dtype)
    residual = 4 * _random(rows, hidden, dtype=dtype)
    norm = 1 + 0.1 * _random(hidden, dtype=dtype)
    out = _random(hidden, 48, dtype=dtype) / 7
    gate_up = _random(2 * half, hidden, dtype=dtype) / 8
    bias = _random(2 * half, dtype=dtype) if has_bias else None
    before = ResidualStream(residual, residual, None)  # only its total is read
    with forced(first):
        stream = GpuLinear(out, None).add(x, before, norm, EPS)
    with forced(second):
        gated = GpuLinear(gate_up, bias).norm_gated(stream, EPS)
    total = x.double() @ out.double().T + residual.double()
    assert relative_error(stream.total, total) < TOLERANCE[dtype]
    normed = _normed(total, norm)
    assert relative_error(close_stream(stream, EPS), normed) < TOLERANCE[dtype]
    index = torch.tensor([rows - 1, 3], device=DEVICE)
    assert torch.equal(close_stream(stream, EPS, index), close_stream(stream, EPS)[index])
    both = normed @ gate_up.double().T + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    assert relative_error(gated, gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize("has_bias", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("config", WAYS)
def test_queries_keys_and_values(config: ProductConfig, has_bias: bool) -> None:
    """As few rows do it, which other tests compare with float64."""
    heads, kv_heads, head_dim, hidden, num_blocks = 4, 2, 64, 48, 24
    batch = ragged_batch(
        [(40, 60), (1, 9), (33, 33)],
        block_size=8,
        tile_tokens=4,
        num_blocks=num_blocks,
        generator=torch.Generator().manual_seed(3),
    )
    batch.slots[5] = -1
    rows = batch.positions.shape[0]
    table, norm = (
        5 * _random(200, hidden, dtype=torch.float32),
        _random(hidden, dtype=torch.float32),
    )
    stream = open_stream(torch.randint(200, (rows,)).to(DEVICE), table, norm)
    width = (heads + 2 * kv_heads) * head_dim
    weight = _random(width, hidden, dtype=torch.float32)
    bias = _random(width, dtype=torch.float32) if has_bias else None
    angles = torch.rand(64, head_dim // 2).to(DEVICE) * 6
    found = []
    for is_fixed in (False, True):
        caches = torch.full((2, num_blocks, kv_heads, 8, head_dim), -7.0, device=DEVICE)
        with forced(LIBRARY if is_fixed else config):
            query = GpuLinear(weight, bias, is_fixed).norm_rotate_store(
                stream, EPS, angles.cos(), angles.sin(), batch, caches[0], caches[1], heads
            )
        found.append((query, caches))
    (query, caches), (expected_query, expected_caches) = found
    assert relative_error(query, expected_query) < 2e-5
    assert relative_error(caches, expected_caches) < 2e-5
    assert torch.equal(caches == -7.0, expected_caches == -7.0)


def test_the_table_decides_which_products_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"features": 64, "depth": 64, "warps": 8, "stages": 4, "rows": 128, "rest": 64}
    small = {"features": 16, "depth": 32, "warps": 4, "stages": 2}
    table = {
        "linear/64x32/16": small,
        "linear/64x32/64": {"library": 1, "biased": 1},
        "linear/64x32/192": own,
        "linear/64x32/256": {"library": 1, "rows": 512},
        "linear/64x32/128/8bit": small,
    }
    monkeypatch.setattr(tuning, "_table", lambda: table)
    caches = (tuning._known_product, tuning._known_config)
    for cached in caches:
        cached.cache_clear()
    try:
        assert product_config("linear", 64, 32, 7) == LinearConfig(**small)
        assert product_config("linear", 64, 32, 17) == LibraryConfig(biased=True)
        assert product_config("linear", 64, 32, 65) == LinearConfig(**own)
        assert product_config("linear", 64, 32, 192) == LinearConfig(**own)
        assert product_config("linear", 64, 32, 193) == LibraryConfig(rows=512)
        assert product_config("linear", 64, 32, 4096) == LibraryConfig()
        assert product_config("gate_up", 64, 32, 192) == LibraryConfig()
        assert isinstance(product_config("gate_up", 64, 32, 64), LinearConfig)
        # Fixed products and 8-bit weights know our kernels for few rows alone.
        assert linear_config("linear", 64, 32, 16) == LinearConfig(**small)
        assert linear_config("linear", 64, 32, 64).rows == 0
        assert linear_config("linear", 64, 32, 192, is_8bit=True).rows == 0
    finally:
        for cached in caches:
            cached.cache_clear()
