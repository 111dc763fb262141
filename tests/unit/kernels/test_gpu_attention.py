"""Paged attention on GPUs against float64: ragged passes, splits, windows, poisoned caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from gpu_tools import DEVICE, DTYPES, GPU_MARKS, HAS_CUDA, TOLERANCE, ragged_batch, relative_error
from torch import Tensor

from outrider.config import MAX_SPECULATIVE_TOKENS
from outrider.kernels.gpu.attention import _config, _splits, paged_attention, tile_tokens_for
from outrider.kernels.gpu.scratch import split_scratch
from outrider.kernels.types import RaggedBatch

# Rows that belong to no token are computed too, in the interpreter by numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *GPU_MARKS,
]
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")

# Of each sequence: its queries, and its context with them.
MIXED = ((36, 36), (1, 70), (5, 200), (3, 64), (1, 1), (17, 150))
VERIFY = ((1, 300), (5, 130), (3, 3), (8, 65), (1, 1), (2, 257))
DECODE = ((1, 700), (1, 128), (1, 129), (1, 1), (1, 63))


@dataclass(frozen=True)
class Case:
    lengths: Sequence[tuple[int, int]]
    group: int
    head_dim: int = 64
    num_kv_heads: int = 1
    block_size: int = 16
    window: int = 0
    num_splits: int | None = 1
    tile_rows: int | None = None
    is_fixed: bool = False
    empty_tiles: int = 0
    dtype: torch.dtype = torch.float16

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def scale(self) -> float:
        return 1.5 / math.sqrt(self.head_dim)

    places: int = 0  # of a long tile

    @property
    def tile_tokens(self) -> int | list[int]:
        if self.tile_rows is not None:
            return self.tile_rows // self.group
        if self.places:
            few = tile_tokens_for(self.num_heads, self.num_kv_heads, 1)
            return [few * (self.places if queries > 33 else 1) for queries, _ in self.lengths]
        longest = max(queries for queries, _ in self.lengths)
        return tile_tokens_for(self.num_heads, self.num_kv_heads, longest, self.is_fixed)


@dataclass
class Inputs:
    q: Tensor
    keys: Tensor
    values: Tensor
    batch: RaggedBatch

    def attend(self, case: Case, out: Tensor | None = None) -> Tensor:
        return paged_attention(
            self.q,
            self.keys,
            self.values,
            self.batch,
            case.scale,
            case.window,
            is_fixed=case.is_fixed,
            num_splits=case.num_splits,
            tile_rows=case.tile_rows,
            out=out,
        )


def make_inputs(case: Case) -> Inputs:
    """Fresh numbers; the caches hold NaN wherever no query of the pass may look."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    num_blocks = 1 + 2 * sum(-(-context // case.block_size) for _, context in case.lengths)
    batch = ragged_batch(
        case.lengths,
        block_size=case.block_size,
        tile_tokens=case.tile_tokens,
        num_blocks=num_blocks,
        generator=generator,
        empty_tiles=case.empty_tiles,
    )
    batch = replace(batch, places_of_long_tile=case.places)
    shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=case.dtype) for _ in range(2))
    for table, (queries, context) in zip(batch.block_tables.cpu(), case.lengths, strict=True):
        first = max(0, context - queries - case.window + 1) if case.window else 0
        at = torch.arange(first, context)
        blocks, offsets = table[at // case.block_size].long(), at % case.block_size
        for cache in (keys, values):
            fresh = torch.randn(len(at), *shape[1::2], generator=generator)
            cache[blocks, :, offsets] = fresh.to(case.dtype)
    num_tokens = sum(queries for queries, _ in case.lengths)
    q = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=generator)
    return Inputs(q.to(DEVICE, case.dtype), keys.to(DEVICE), values.to(DEVICE), batch)


def expected(case: Case, inputs: Inputs) -> Tensor:
    """Every query by itself, in float64."""
    rows: list[Tensor] = []
    for table, (queries, context) in zip(inputs.batch.block_tables, case.lengths, strict=True):
        for at in range(context - queries, context):
            first = max(0, at - case.window + 1) if case.window else 0
            seen = torch.arange(first, at + 1, device=DEVICE)
            blocks, offsets = table[seen // case.block_size].long(), seen % case.block_size
            k, v = (cache[blocks, :, offsets].double() for cache in (inputs.keys, inputs.values))
            q = inputs.q[len(rows)].double().view(case.num_kv_heads, case.group, -1)
            scores = torch.einsum("kgd,skd->kgs", q, k) * case.scale
            rows.append(torch.einsum("kgs,skd->kgd", scores.softmax(-1), v).flatten())
    return torch.stack(rows)


def assert_right(out: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    for token, (row, want_row) in enumerate(zip(out, want, strict=True)):
        assert relative_error(row, want_row) < TOLERANCE[dtype], f"token {token}"


def poisoned(want: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(want.shape, float("nan"), dtype=dtype, device=DEVICE)


BOTH = ((1, 60), (70, 90), (3, 3), (35, 35), (9, 40))  # queries left over make short tiles, too

CASES = [
    Case(MIXED, group=4),
    Case(BOTH, group=4, num_kv_heads=2, empty_tiles=2, num_splits=None, places=8),
    Case(BOTH, group=3, window=20, places=8),
    Case(((36, 36), (2, 9), *((34, 34),) * 3), group=1, places=8),  # three in eight places
    Case(MIXED, group=3, head_dim=80, block_size=8),
    Case(MIXED, group=8, window=40),
    Case(MIXED, group=1, head_dim=128, block_size=32, num_splits=3),
    Case(((150, 400), (40, 40)), group=1, tile_rows=64, block_size=64),
    Case(VERIFY, group=4, num_kv_heads=2, block_size=32),
    Case(VERIFY, group=3, head_dim=80, num_splits=3),
    Case(VERIFY, group=8, head_dim=96, window=100, num_splits=8),
    Case(VERIFY, group=1, head_dim=128, block_size=8, window=1),
    Case(VERIFY, group=4, num_splits=None, empty_tiles=3),
    Case(DECODE, group=1, num_kv_heads=3, num_splits=8, empty_tiles=1),
    Case(DECODE, group=3, head_dim=128, block_size=64, window=130, num_splits=3),
    Case(DECODE, group=20, num_splits=None),
]
# The interpreter takes its time: there every case has one data type, on a GPU all of them.
TYPED_CASES = [
    replace(case, dtype=dtype)
    for number, case in enumerate(CASES)
    for dtype in (DTYPES if HAS_CUDA else DTYPES[number % 2 :][:1])
]


@pytest.mark.parametrize("case", TYPED_CASES, ids=str)
def test_a_pass_agrees_with_float64(case: Case) -> None:
    inputs = make_inputs(case)
    want = expected(case, inputs)
    out = poisoned(want, case.dtype)
    assert inputs.attend(case, out) is out
    assert_right(out, want, case.dtype)


def test_a_layout_of_fused_heads_is_read_in_place() -> None:
    case = Case(((4, 30), (1, 9)), group=2, num_kv_heads=2)
    inputs = make_inputs(case)
    fused = torch.full((5, 8, 64), float("nan"), dtype=case.dtype, device=DEVICE)
    fused[:, :4] = inputs.q
    want = expected(case, inputs)
    inputs.q = fused[:, :4]
    assert_right(inputs.attend(case), want, case.dtype)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_of_no_tile_are_left_alone(num_splits: int) -> None:
    case = Case(((3, 300), (1, 40)), group=3, num_splits=num_splits, empty_tiles=2)
    inputs = make_inputs(case)
    want = expected(case, inputs)
    inputs.q = torch.cat((inputs.q, inputs.q))
    out = torch.full((8, want.shape[1]), 7.0, dtype=case.dtype, device=DEVICE)
    inputs.attend(case, out)
    assert_right(out[:4], want, case.dtype)
    assert bool((out[4:] == 7.0).all())


@pytest.mark.parametrize("num_splits", [1, 3])
def test_empty_tiles_may_come_before_others(num_splits: int) -> None:
    case = Case(((3, 300), (6, 40)), group=4, num_kv_heads=2, num_splits=num_splits, empty_tiles=2)
    inputs = make_inputs(case)
    tiles = inputs.batch.tiles
    assert tiles is not None
    inputs.batch = replace(inputs.batch, tiles=tiles.flip(0).contiguous())
    assert_right(inputs.attend(case), expected(case, inputs), case.dtype)


def test_a_pass_without_tokens_is_empty() -> None:
    case = Case(((1, 5),), group=2, num_splits=4)
    inputs = make_inputs(case)
    inputs.q, tiles = inputs.q[:0], inputs.batch.tiles
    assert tiles is not None
    for none in (tiles[:0], torch.zeros_like(tiles)):
        inputs.batch = replace(inputs.batch, tiles=none)
        assert inputs.attend(case).shape == (0, 128)


def cut(case: Case, size: Callable[[], int]) -> Tensor:
    """The pass in tiles of these sizes."""
    tiles: list[tuple[int, int, int, int]] = []
    end = 0
    for row, (queries, context) in enumerate(case.lengths):
        begin, end = end, end + queries
        while begin < end:
            count = min(size(), end - begin)
            tiles.append((begin, count, context - (end - begin), row))
            begin += count
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    "case",
    [
        Case(((9, 133), (1, 65), (3, 3)), group=3),
        Case(((6, 262), (1, 257)), group=4, num_splits=None),
        Case(((9, 300), (1, 65)), group=4, head_dim=80, window=150),
        Case(((3, 520), (1, 256)), group=2, window=300, num_splits=None),
        Case(((6, 270), (3, 64)), group=2, dtype=torch.float32),
        *([Case(((90, 900), (40, 64), (1, 5000)), group=4, dtype=torch.bfloat16)] * HAS_CUDA),
    ],
    ids=str,
)
def test_fixed_a_token_has_the_same_bits_alone_and_in_company(case: Case) -> None:
    case = replace(case, is_fixed=True)
    inputs = make_inputs(case)
    whole = inputs.attend(case)
    assert_right(whole, expected(case, inputs), case.dtype)

    # By one program, by one for each span, and in tiles of one token or of uneven numbers.
    assert torch.equal(inputs.attend(replace(case, num_splits=1)), whole)
    inputs.batch = replace(inputs.batch, tiles=cut(case, lambda: 1))
    assert torch.equal(inputs.attend(case), whole)
    assert torch.equal(inputs.attend(replace(case, num_splits=None)), whole)

    most = case.tile_tokens
    assert isinstance(most, int)

    def uneven() -> int:
        return int(torch.randint(1, most + 1, ()))

    inputs.batch = replace(inputs.batch, tiles=cut(case, uneven).flip(0).contiguous())
    assert torch.equal(inputs.attend(case), whole)

    tiles = inputs.batch.tiles
    assert tiles is not None
    inputs.batch = replace(inputs.batch, tiles=tiles[:1].contiguous(), max_context_len=10**4)
    first, count = tiles[0, :2].tolist()
    for num_splits in (1, None):
        out = inputs.attend(replace(case, num_splits=num_splits))
        assert torch.equal(out[first : first + count], whole[first : first + count])


def test_fixed_spans_are_shared_out_only_while_their_results_are_few() -> None:
    assert _splits(8, 8192, 0, is_fixed=True) == 32
    assert _splits(200, 8192, 0, is_fixed=True) == 1  # enough programs without
    assert _splits(8, 2**20, 0, is_fixed=True) == 1  # too much memory
    assert _splits(8, 2**20, 1000, is_fixed=True) == 6


def test_splits_chosen_for_long_contexts_are_right_at_short_ones() -> None:
    case = Case(((1, 400), (1, 3), (1, 130)), group=4, num_splits=None)
    inputs = make_inputs(case)
    inputs.batch = replace(inputs.batch, max_context_len=2**17)
    assert_right(inputs.attend(case), expected(case, inputs), case.dtype)


def test_scratch_is_ready_again_after_each_pass() -> None:
    case = Case(((2, 600), (1, 200)), group=3, num_splits=5)
    inputs = make_inputs(case)
    partial, arrivals = split_scratch(inputs.q.device, 2, 5, 16 * (case.head_dim + 2))
    assert partial is not None and arrivals is not None
    for _ in range(2):
        partial.fill_(float("nan"))
        inputs = make_inputs(case)
        out = inputs.attend(case)
        assert_right(out, expected(case, inputs), case.dtype)
        assert not partial.isnan().all()  # it is this one that was used
        assert not arrivals.any()
        assert torch.equal(inputs.attend(case), out)


def test_what_cannot_be_computed_is_refused() -> None:
    case = Case(((1, 300),), group=20, num_splits=4)
    inputs = make_inputs(case)
    with pytest.raises(ValueError, match="20 rows"):
        inputs.attend(replace(case, tile_rows=16))
    inputs.batch = replace(inputs.batch, tiles=None)
    with pytest.raises(ValueError, match="needs tiles"):
        inputs.attend(case)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 32])
def test_tiles_fill_the_rows_of_a_product(group: int) -> None:
    deepest = MAX_SPECULATIVE_TOKENS + 1
    for queries in (1, 2, 5, 16, 17, deepest):
        rows = tile_tokens_for(2 * group, 2, queries) * group
        assert rows == group or rows <= 16 < rows + group
    assert 128 - group < tile_tokens_for(2 * group, 2, deepest + 1) * group <= 128


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tile_rows", [16, 32, 64, 128])
def test_queries_and_the_blocks_under_way_fit_into_shared_memory(
    tile_rows: int, head_dim: int
) -> None:
    for num_tile_heads in (None, 1, 200, 500, 1000, 5000):
        block_keys, _, num_stages = _config(tile_rows, head_dim, 2, num_tile_heads)
        rows = tile_rows + 2 * num_stages * block_keys  # keys and values
        assert rows * head_dim * 2 <= 227 * 1024


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_passes_agree_with_float64(dtype: torch.dtype) -> None:
    shared = Case(((1, 9000), (5, 4097), (1, 17), (3, 2048)), 4, 128, 8, dtype=dtype)
    prefill = replace(shared, lengths=((300, 2300), (513, 513), (1, 3000)), num_splits=2)
    for case in (shared, replace(shared, num_splits=None), replace(shared, num_splits=32), prefill):
        inputs = make_inputs(case)
        assert_right(inputs.attend(case), expected(case, inputs), dtype)


@needs_cuda
def test_a_recorded_pass_follows_its_tiles() -> None:
    """A graph is recorded for the longest context, then repeated with other tiles in it."""
    case = Case(((1, 2000), (4, 1500)), group=4, num_kv_heads=2, num_splits=None, empty_tiles=2)
    inputs = make_inputs(case)
    want = expected(case, inputs)
    inputs.batch = replace(inputs.batch, max_context_len=2**15)
    tiles = inputs.batch.tiles
    assert tiles is not None
    inputs.attend(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = inputs.attend(case)
    for kept in (tiles.clone(), cut(case, lambda: 1)[: len(tiles)]):
        tiles.zero_()
        tiles[: len(kept)] = kept
        out.fill_(float("nan"))
        graph.replay()
        covered = torch.zeros(len(want), dtype=torch.bool)
        for first, count, _, _ in kept.tolist():
            covered[first : first + count] = True
        assert_right(out[covered], want[covered], case.dtype)
        assert bool(out[~covered].isnan().all())
