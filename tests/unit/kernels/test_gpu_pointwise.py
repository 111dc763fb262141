"""Norms, rotation with the cache, activation and embedding of the GPU kernels, against torch.

Inputs are made on the CPU and copied: a copy is complete when it returns, and weights may be read
before the kernels in front have ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_tools import DEVICE, DTYPES, GPU_MARKS, HAS_CUDA, ragged_batch
from torch import Tensor

from outrider.kernels.gpu import norm, pointwise
from outrider.kernels.gpu.rotary import rotate_and_store
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.types import RaggedBatch

pytestmark = GPU_MARKS

REFERENCE = ReferenceOps()
SHAPES = [(1, 1), (3, 7), (5, 33), (2, 576), (4, 1024), (1, 5000)]
HALF_DTYPES = [dtype for dtype in DTYPES if dtype != torch.float32]
# Two values of 16 bits are rounded once or twice; float32 sums take another order on a GPU.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def fill_uninitialized_memory(fill: bool) -> None:
    module: Any = torch.utils.deterministic  # a property that its class hides
    module.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element no kernel writes shows up."""
    torch.use_deterministic_algorithms(True)
    fill_uninitialized_memory(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbits(31)
    print(f"seed {seed}")  # shown where a test fails
    return torch.Generator().manual_seed(seed)


def rand(generator: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_rounded(out: Tensor, exact: Tensor, magnitude: float = 0.1) -> None:
    """`out` is the float64 `exact` up to the roundings of its dtype; `magnitude` is that of
    rounded numbers which may cancel in it."""
    rtol = ROUNDING[out.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=rtol * magnitude)


def assert_same_rounding(out: Tensor, reference: Tensor) -> None:
    """The same bits but where a sum's last bit decides; rounding elsewhere changes a quarter."""
    assert out.dtype == reference.dtype
    assert (out == reference).float().mean() > 0.99


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [*SHAPES, (2, norm.MAX_WIDTH)])
def test_rms_norm(generator: torch.Generator, dtype: torch.dtype, rows: int, width: int) -> None:
    x = rand(generator, rows, width, dtype=dtype, scale=5)
    weight = rand(generator, width, dtype=dtype)
    assert_rounded(norm.rms_norm(x, weight, 1e-5), exact_rms_norm(x, weight, 1e-5))


def test_rms_norm_of_small_numbers_depends_on_eps(generator: torch.Generator) -> None:
    x = rand(generator, 4, 100, dtype=torch.float32, scale=1e-3)
    weight = rand(generator, 100, dtype=torch.float32)
    for eps in (1e-6, 1e-3):
        assert_rounded(norm.rms_norm(x, weight, eps), exact_rms_norm(x, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm(
    generator: torch.Generator, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, residual = (rand(generator, rows, width, dtype=dtype, scale=s) for s in (1, 20))
    weight = rand(generator, width, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, exact_rms_norm(total, weight, 1e-6))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rms_norms_round_where_the_reference_does(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    x, residual = (rand(generator, 6, 1536, dtype=dtype) for _ in range(2))
    weight = rand(generator, 1536, dtype=dtype)
    assert_same_rounding(norm.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    normed, _ = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_same_rounding(normed, REFERENCE.add_rms_norm(x, residual, weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [*SHAPES, (1, norm.MAX_WIDTH)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(
    generator: torch.Generator, dtype: torch.dtype, rows: int, width: int, with_bias: bool
) -> None:
    x = (rand(generator, rows, width, dtype=dtype).float() + 3).to(dtype)
    weight = rand(generator, width, dtype=dtype)
    bias = rand(generator, width, dtype=dtype) if with_bias else None
    exact = torch.nn.functional.layer_norm(
        x.double(), (width,), weight.double(), None if bias is None else bias.double(), 1e-5
    )
    assert_rounded(norm.layer_norm(x, weight, bias, 1e-5), exact, magnitude=1.0)


def test_norms_take_strided_rows_and_more_axes(generator: torch.Generator) -> None:
    wide = rand(generator, 6, 3, 80, dtype=torch.float32)
    x, weight = wide[::2, :, 5:55], rand(generator, 50, dtype=torch.float32)
    assert_rounded(norm.rms_norm(x, weight, 1e-5), exact_rms_norm(x, weight, 1e-5))
    normed, total = norm.add_rms_norm(x, wide[1::2, :, :50], weight, 1e-5)
    assert torch.equal(total, x + wide[1::2, :, :50])
    assert_rounded(normed, exact_rms_norm(total, weight, 1e-5))
    layer = torch.nn.functional.layer_norm(x.double(), (50,), weight.double())
    assert_rounded(norm.layer_norm(x, weight, None, 1e-5), layer, magnitude=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 3), (2, 96), (3, 1536), (1, 2048)])
def test_silu_mul(generator: torch.Generator, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = rand(generator, rows, 2 * width, dtype=dtype, scale=4)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(pointwise.silu_mul(gate_up), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_silu_mul_rounds_where_the_reference_does(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    gate_up = rand(generator, 4, 3000, dtype=dtype)
    assert_same_rounding(pointwise.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_mul_saturates_without_nan() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.5, 0.0, 88.5, 200.0, 1e30, -90.0]])
    gate_up = torch.cat([gate, torch.ones(1, 8)], dim=1).to(DEVICE)
    torch.testing.assert_close(
        pointwise.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), rtol=1e-5, atol=1e-30
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("width", [1, 7, 96, 1025])
def test_embed_gathers_rows(
    generator: torch.Generator, dtype: torch.dtype, id_dtype: torch.dtype, width: int
) -> None:
    table = rand(generator, 30, width, dtype=dtype)
    ids = torch.tensor([29, 0, 3, 3, 17], dtype=id_dtype, device=DEVICE)
    assert torch.equal(pointwise.embed(ids, table), table[ids.long()])


def test_embed_reads_nothing_outside_the_table(generator: torch.Generator) -> None:
    around = rand(generator, 12, 8, dtype=torch.float32)
    table = around[2:10]
    out = pointwise.embed(torch.tensor([-1, 7, 8], device=DEVICE), table)
    assert torch.equal(out[1], table[7]) and not out[0].any() and not out[2].any()


def test_no_rows_give_no_rows() -> None:
    weight = torch.ones(8, device=DEVICE)
    x = torch.empty(0, 8, device=DEVICE)
    normed, total = norm.add_rms_norm(x, x, weight, 1e-5)
    assert normed.shape == total.shape == (0, 8)
    assert norm.rms_norm(x, weight, 1e-5).shape == (0, 8)
    assert norm.layer_norm(x, weight, weight, 1e-5).shape == (0, 8)
    assert pointwise.silu_mul(x).shape == (0, 4)
    ids = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert pointwise.embed(ids, weight.view(2, 4)).shape == (0, 4)


MAX_POSITION = 64
GUARD_BLOCKS = 2  # before and behind a cache
HEADS = [(4, 2, 64, 4), (3, 1, 80, 1), (6, 6, 96, 3), (9, 3, 128, 16), (2, 2, 16, 2)]


def rope_tables(head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 1e4 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
    angles = torch.outer(torch.arange(MAX_POSITION).float(), frequencies)
    return angles.cos().to(DEVICE), angles.sin().to(DEVICE)


class Rotation:
    """A ragged batch with its qkv and poisoned caches, and what must come of them."""

    def __init__(
        self, generator: torch.Generator, heads: tuple[int, int, int, int], dtype: torch.dtype
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim, block_size = heads
        self.batch: RaggedBatch = ragged_batch(
            [(1, 1), (3, 40), (0, 5), (2, 64)],
            block_size=block_size,
            tile_tokens=4,
            num_blocks=130,
            generator=generator,
        )
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = rand(generator, len(self.batch.positions), width, dtype=dtype)
        self.cos, self.sin = rope_tables(self.head_dim)
        shape = (130 + 2 * GUARD_BLOCKS, self.num_kv_heads, block_size, self.head_dim)
        self.guarded = [torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in "kv"]
        self.caches = [cache[GUARD_BLOCKS:-GUARD_BLOCKS] for cache in self.guarded]

    def run(
        self,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        rotated: bool = True,
        eps: float = 0.0,
    ) -> Tensor:
        cos, sin = (self.cos, self.sin) if rotated else (None, None)
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        keys, values = self.caches
        return rotate_and_store(
            self.qkv, cos, sin, self.batch, keys, values, *sizes, q_norm, k_norm, eps
        )

    def exact(
        self,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        rotated: bool = True,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """float64 q, k, v [T, heads, D]; rotation by complex numbers."""
        q, k, v = (
            self.qkv.double()
            .view(len(self.qkv), -1, self.head_dim)
            .split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        )
        parts = []
        for x, weight in ((q, q_norm), (k, k_norm)):
            if weight is not None:
                x = exact_rms_norm(x, weight, eps)
            if rotated:
                turn = torch.complex(self.cos.double(), self.sin.double())[
                    self.batch.positions.long()
                ]
                turned = torch.complex(*x.chunk(2, dim=-1)) * turn.unsqueeze(1)
                x = torch.cat([turned.real, turned.imag], dim=-1)
            parts.append(x)
        return parts[0], parts[1], v

    def check(self, q: Tensor, exact_q: Tensor, keys: Tensor, values: Tensor) -> None:
        """Tokens with a slot lie there, and every other slot is still poisoned."""
        assert q.shape == exact_q.shape and q.is_contiguous()
        assert_rounded(q, exact_q, float(exact_q.abs().max()))
        block_size = self.caches[0].shape[2]
        stored = self.batch.slots >= 0
        slots = self.batch.slots[stored].long()
        for cache, expected in zip(self.caches, (keys, values), strict=True):
            found = cache[slots // block_size, :, slots % block_size]
            assert_rounded(found, expected[stored], float(expected.abs().max()))
            untouched = torch.ones(cache.shape[0] * block_size, dtype=torch.bool, device=DEVICE)
            untouched[slots] = False
            assert cache.transpose(1, 2).flatten(0, 1)[untouched].isnan().all()
        for cache in self.guarded:
            assert cache[:GUARD_BLOCKS].isnan().all() and cache[-GUARD_BLOCKS:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rotate_and_store(
    generator: torch.Generator, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    case = Rotation(generator, heads, dtype)
    before = case.qkv.clone()
    case.check(case.run(), *case.exact())
    assert torch.equal(case.qkv, before)


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
def test_head_norms_and_rotation_are_both_optional(
    generator: torch.Generator, rotated: bool, normed: str
) -> None:
    case = Rotation(generator, (5, 1, 80, 4), torch.float32)
    q_norm, k_norm = (
        rand(generator, 80, dtype=torch.float32) if name in normed else None for name in "qk"
    )
    q = case.run(q_norm, k_norm, rotated=rotated, eps=1e-6)
    case.check(q, *case.exact(q_norm, k_norm, rotated=rotated, eps=1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_stored_bit_for_bit(generator: torch.Generator, dtype: torch.dtype) -> None:
    case = Rotation(generator, HEADS[0], dtype)
    case.run()
    values = case.qkv.view(len(case.qkv), -1, case.head_dim)[:, -case.num_kv_heads :]
    slots, block_size = case.batch.slots, case.caches[1].shape[2]
    assert torch.equal(case.caches[1][slots // block_size, :, slots % block_size], values)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rotation_rounds_where_the_reference_does(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    case = Rotation(generator, (9, 3, 128, 16), dtype)
    q_norm, k_norm = (rand(generator, 128, dtype=dtype) for _ in "qk")
    q = case.run(q_norm, k_norm, eps=1e-6)
    keys, values = (torch.zeros_like(cache) for cache in case.caches)
    expected = REFERENCE.rotate_and_store(
        case.qkv, case.cos, case.sin, case.batch, keys, values, 9, 3, 128, q_norm, k_norm, 1e-6
    )
    assert_same_rounding(q, expected)
    blocks, offsets = case.batch.slots // 16, case.batch.slots % 16
    assert_same_rounding(case.caches[0][blocks, :, offsets], keys[blocks, :, offsets])


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_a_negative_slot_stores_nothing_but_gives_its_query(
    generator: torch.Generator, index_dtype: torch.dtype
) -> None:
    case = Rotation(generator, (6, 2, 64, 4), torch.float32)
    slots = case.batch.slots.clone()
    slots[[0, 3]] = -1
    case.batch = replace(
        case.batch, slots=slots.to(index_dtype), positions=case.batch.positions.to(index_dtype)
    )
    case.check(case.run(), *case.exact())


def test_rotation_takes_strided_rows(generator: torch.Generator) -> None:
    case = Rotation(generator, (4, 2, 64, 4), torch.float32)
    expected = case.run()
    padded = torch.full((len(case.qkv), case.qkv.shape[1] + 3), float("nan"), device=DEVICE)
    padded[:, :-3] = case.qkv
    case.qkv = padded[:, :-3]
    assert torch.equal(case.run(), expected)


def test_no_tokens_store_nothing(generator: torch.Generator) -> None:
    case = Rotation(generator, (4, 2, 64, 4), torch.float32)
    case.qkv = case.qkv[:0]
    case.batch = replace(case.batch, positions=case.batch.positions[:0], slots=case.batch.slots[:0])
    assert case.run().shape == (0, 4, 64)
    assert all(cache.isnan().all() for cache in case.caches)


def test_other_dtypes_are_refused(generator: torch.Generator) -> None:
    x, weight = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(TypeError, match="not torch.float64"):
        norm.rms_norm(x.double(), weight.double(), 1e-5)
    with pytest.raises(TypeError, match="float32 together with torch.float16"):
        norm.layer_norm(x, weight, weight.half(), 1e-5)
    with pytest.raises(TypeError, match="not torch.float64"):
        pointwise.silu_mul(x.double())
    with pytest.raises(TypeError, match="not torch.float32"):
        pointwise.embed(weight, x)
    case = Rotation(generator, HEADS[0], torch.float32)
    case.caches = [cache.half() for cache in case.caches]
    with pytest.raises(TypeError, match="float32 together with torch.float16"):
        case.run()


def test_sizes_that_do_not_fit_are_refused(generator: torch.Generator) -> None:
    wide = torch.ones(1, norm.MAX_WIDTH + 1, device=DEVICE)
    with pytest.raises(ValueError, match="16385"):
        norm.rms_norm(wide, wide[0], 1e-5)
    with pytest.raises(ValueError, match="over 9 elements"):
        norm.rms_norm(wide[:, :9], wide[0, :8], 1e-5)
    with pytest.raises(ValueError, match="Cannot add"):
        norm.add_rms_norm(wide[:, :9], wide[:, :8], wide[0, :9], 1e-5)
    with pytest.raises(ValueError, match="9 is odd"):
        pointwise.silu_mul(wide[:, :9])
    case = Rotation(generator, (4, 2, 64, 4), torch.float32)
    with pytest.raises(ValueError, match="q_norm"):
        case.run(wide[0, :63], None)
    case.caches.reverse()
    case.caches[1] = case.caches[1][:, :1]
    with pytest.raises(ValueError, match="Caches"):
        case.run()


@pytest.mark.skipif(not HAS_CUDA, reason="needs 10 GB that the interpreter would copy")
def test_addresses_beyond_two_to_the_31(generator: torch.Generator) -> None:
    fill_uninitialized_memory(False)
    width = 4096
    table = torch.empty(2**31 // width + 8, width, dtype=torch.float16, device=DEVICE)
    table[-1] = rand(generator, width, dtype=torch.float16)
    last = torch.tensor([len(table) - 1], device=DEVICE)
    assert torch.equal(pointwise.embed(last, table)[0], table[-1])

    caches = table.view(-1, 1, 16, 64), torch.empty_like(table).view(-1, 1, 16, 64)
    caches[1][0] = caches[0][0] = 0
    qkv = rand(generator, 1, 192, dtype=torch.float16)
    num_slots = caches[0].shape[0] * 16
    slots = torch.tensor([num_slots - 1], device=DEVICE)
    batch = RaggedBatch(last * 0, slots, last, last, last, 1, 1)
    rotate_and_store(qkv, None, None, batch, *caches, 1, 1, 64)
    assert torch.equal(caches[0][-1, 0, -1], qkv[0, 64:128])
    assert torch.equal(caches[1][-1, 0, -1], qkv[0, 128:])
    assert not caches[0][0].any() and not caches[1][0].any()


@pytest.mark.skipif(not HAS_CUDA, reason="records a CUDA graph")
def test_recorded_kernels_wait_for_each_other(generator: torch.Generator) -> None:
    fill_uninitialized_memory(False)  # its kernels would come between
    weight = rand(generator, 4096, dtype=torch.float16)
    table = rand(generator, 50, 4096, dtype=torch.float16)
    ids = torch.zeros(64, dtype=torch.int64, device=DEVICE)

    def run(after_each: Callable[[], None]) -> Tensor:
        x = total = pointwise.embed(ids, table)
        for _ in range(50):
            after_each()
            x, total = norm.add_rms_norm(x, total, weight, 1e-6)
        return total

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run(lambda: None)
    for _ in range(3):
        ids.copy_(torch.randint(50, ids.shape, generator=generator))
        graph.replay()
        assert torch.equal(recorded, run(torch.cuda.synchronize))
