"""Rotation, the paged cache and attention: against dense torch, and bitwise independence."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from c_kernels import make_ops
from torch import Tensor

from outrider.kernels.ops import Ops, RaggedBatch

MAX_POSITION = 1024


@dataclass
class Heads:
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


HEADS = [
    Heads(),
    Heads(8, 1, 128),
    Heads(4, 4, 80, block_size=1),
    Heads(6, 2, 16, block_size=4),
    Heads(2, 2, 96, block_size=3),
    Heads(3, 1, 8),
]


def make_batch(
    context_lens: list[int], query_lens: list[int], block_size: int, shuffle: int = 0
) -> RaggedBatch:
    """Sequences whose blocks are scattered over a pool of twice the size needed."""
    num_blocks = [-(-c // block_size) for c in context_lens]
    generator = torch.Generator().manual_seed(shuffle)
    pool = torch.randperm(2 * sum(num_blocks) + 1, generator=generator).tolist()
    tables = torch.zeros(len(context_lens), max(num_blocks, default=0), dtype=torch.int32)
    positions, slots = [], []
    for b, (context_len, query_len) in enumerate(zip(context_lens, query_lens, strict=True)):
        blocks, pool = pool[: num_blocks[b]], pool[num_blocks[b] :]
        tables[b, : num_blocks[b]] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(context_len - query_len, context_len):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    return RaggedBatch(
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(query_lens, default=0),
        max_context_len=max(context_lens, default=0),
    )


def empty_caches(batch: RaggedBatch, heads: Heads) -> tuple[Tensor, Tensor]:
    """Filled with NaN: nothing that was not written may be read. Between blocks there is more, as
    there is with `KVCache`.
    """
    num_blocks = int(batch.block_tables.max()) + 1 if batch.block_tables.numel() else 1
    shape = (num_blocks, 3, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    keys, values = torch.full(shape, float("nan"))[:, 1].unbind(1)
    return keys, values


def rope_tables(head_dim: int) -> tuple[Tensor, Tensor]:
    half = head_dim // 2
    angles = torch.outer(torch.arange(MAX_POSITION).float(), 1e4 ** (-torch.arange(half) / half))
    return angles.cos(), angles.sin()


def run(
    ops: Ops, heads: Heads, qkv: list[Tensor], chunks: list[list[int]], window: int, shuffle: int
) -> list[Tensor]:
    """Each sequence's outputs when its tokens pass in the given chunks, the sequences together."""
    totals = [len(rows) for rows in qkv]
    caches = empty_caches(make_batch(totals, totals, heads.block_size, shuffle), heads)
    cos, sin = rope_tables(heads.head_dim)
    outputs: list[list[Tensor]] = [[] for _ in qkv]
    tables = make_batch(totals, totals, heads.block_size, shuffle).block_tables
    done = [0] * len(qkv)
    for step in zip(*chunks, strict=True):
        running = [b for b, n in enumerate(step) if n]
        lens = [done[b] + step[b] for b in running]
        batch = paged_batch(tables[running], lens, [step[b] for b in running], heads.block_size)
        rows = torch.cat([qkv[b][done[b] : done[b] + step[b]] for b in running])
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
        q = ops.rotate_and_store(rows, cos, sin, batch, *caches, *sizes)
        out = ops.attention(q, *caches, batch, heads.head_dim**-0.5, window)
        for b, part in zip(running, out.split([step[b] for b in running]), strict=True):
            outputs[b].append(part)
            done[b] += step[b]
    return [torch.cat(parts) for parts in outputs]


def paged_batch(
    tables: Tensor, context_lens: list[int], query_lens: list[int], block_size: int
) -> RaggedBatch:
    positions = torch.cat(
        [torch.arange(c - q, c) for c, q in zip(context_lens, query_lens, strict=True)]
    )
    rows = torch.repeat_interleave(torch.arange(len(tables)), torch.tensor(query_lens))
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    return RaggedBatch(
        positions,
        slots,
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        tables.contiguous(),
        max(query_lens),
        max(context_lens),
    )


def dense_attention(heads: Heads, qkv: Tensor, window: int) -> Tensor:
    """Written apart from the kernels: complex rotation, float64, one head at a time."""
    n, dim = len(qkv), heads.head_dim
    cos, sin = rope_tables(dim)
    turn = torch.complex(cos[:n].double(), sin[:n].double())
    parts = qkv.double().view(n, -1, dim)
    pairs = torch.complex(parts[..., : dim // 2], parts[..., dim // 2 :])[
        :, : heads.num_heads + heads.num_kv_heads
    ]
    turned = pairs * turn.unsqueeze(1)
    turned = torch.cat([turned.real, turned.imag], dim=-1)
    distance = torch.arange(n).unsqueeze(1) - torch.arange(n)
    seen = (distance >= 0) & ((distance < window) if window else torch.tensor(True))
    outputs = []
    for h in range(heads.num_heads):
        kv = h // (heads.num_heads // heads.num_kv_heads)
        scores = turned[:, h] @ turned[:, heads.num_heads + kv].t() * dim**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(weights @ parts[:, heads.num_heads + heads.num_kv_heads + kv])
    return torch.cat(outputs, dim=-1).float()


@pytest.mark.parametrize("kind", ["c", "torch", "torch-deterministic"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 3, 70])
def test_ragged_chunks_equal_dense_attention(kind: str, heads: Heads, window: int) -> None:
    lengths = [1, 7, 65, 150]
    qkv = [torch.randn(n, heads.width) for n in lengths]
    chunks = [[0, 1, 0, 0], [4, 0, 2, 1], [64, 0, 1, 0], [20, 100, 1, 29]]
    outputs = run(make_ops(kind), heads, qkv, chunks, window, shuffle=1)
    for rows, output in zip(qkv, outputs, strict=True):
        expected = dense_attention(heads, rows, window)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["c", "torch-deterministic"])
@pytest.mark.parametrize("window", [0, 50])
def test_a_token_has_the_same_bits_however_it_was_batched(kind: str, window: int) -> None:
    ops, heads = make_ops(kind), Heads()
    qkv = [torch.randn(n, heads.width) for n in (140, 33)]
    at_once = run(ops, heads, qkv, [[140, 0], [0, 33]], window, shuffle=1)
    together = run(ops, heads, qkv, [[64, 5, 1, 0, 70], [0, 30, 1, 2, 0]], window, shuffle=2)
    one_by_one = run(ops, heads, qkv, [[1] * 140, [0] * 107 + [1] * 33], window, shuffle=3)
    for a, b, c in zip(at_once, together, one_by_one, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def ops_of(num_threads: int) -> Ops:
    """Torch itself keeps its threads: sines and cosines depend on how many there are."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        return make_ops("c")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_chunks_shared_out_among_threads_change_no_bit(heads: Heads) -> None:
    """One row alone is shared out by its keys, one of many is not."""
    lengths = [700, *range(2, 40, 2)]
    qkv = [torch.randn(n, heads.width) for n in lengths]
    alone = [[699, 1]]
    among_others = [[699, 1], *([n - 1, 1] for n in lengths[1:])]
    outputs = []
    for num_threads in (1, 2, 3):
        ops = ops_of(num_threads)
        outputs.append(run(ops, heads, qkv[:1], alone, window=0, shuffle=num_threads)[0])
        outputs.append(run(ops, heads, qkv, among_others, window=0, shuffle=num_threads)[0])
    make_ops("c")  # with as many threads as before
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("window", [0, 70])
def test_wherever_the_parts_of_threads_end_no_row_is_missed(seed: int, window: int) -> None:
    heads, draw = HEADS[seed % 4], random.Random(seed)
    lengths = [50, *(draw.choice((1, 17, 32, 33, 90, 400)) for _ in range(draw.randint(1, 8)))]
    qkv = [torch.randn(n, heads.width) for n in lengths]
    asked = [min(n, draw.choice((1, 1, 3, 9))) for n in lengths]
    chunks = [[n - last, last] for n, last in zip(lengths, asked, strict=True)]
    alone, *together = (
        run(ops_of(num_threads), heads, qkv, chunks, window, shuffle=seed)
        for num_threads in (1, 2, 3, 5)
    )
    make_ops("c")  # with as many threads as before
    for outputs in together:
        assert all(map(torch.equal, alone, outputs))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
@pytest.mark.parametrize("window", [0, 40])
def test_a_token_that_is_no_number_breaks_only_those_who_see_it(
    heads: Heads, window: int, value: float
) -> None:
    """As drafts do that are not accepted, and tokens of a prompt that others have the start of."""
    [sound] = qkv = [torch.randn(120, heads.width)]
    at = 65
    broken = sound.clone()
    broken[at, (heads.num_heads + heads.num_kv_heads) * heads.head_dim :] = value
    expected = run(make_ops("c"), heads, qkv, [[64, 56]], window, shuffle=1)[0]
    sees = torch.zeros(120, dtype=torch.bool)
    sees[at : at + window if window else 120] = True
    for num_threads in (1, 2, 3):
        for chunks in ([120], [64, 2, 54], [66, 1, 53], [60, 10, 50]):
            output = run(ops_of(num_threads), heads, [broken], [chunks], window, shuffle=1)[0]
            assert torch.equal(output[~sees], expected[~sees])
            assert not output[sees].isfinite().all(-1).any()
    make_ops("c")  # with as many threads as before


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_queries_and_keys_are_normalised_before_the_rotation(kind: str) -> None:
    heads, ops = Heads(4, 2, 32), make_ops(kind)
    qkv, q_norm, k_norm = torch.randn(9, heads.width) * 4, torch.randn(32), torch.randn(32)
    batch = make_batch([9], [9], heads.block_size)
    keys, values = empty_caches(batch, heads)
    cos, sin = rope_tables(32)
    q = ops.rotate_and_store(
        qkv, cos, sin, batch, keys, values, 4, 2, 32, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-6
    )
    parts = qkv.view(9, -1, 32)[:, :6]
    normed = parts / (parts.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = normed * torch.cat([q_norm.expand(4, -1), k_norm.expand(2, -1)])
    first, second = normed.chunk(2, dim=-1)
    c, s = cos[:9].unsqueeze(1), sin[:9].unsqueeze(1)
    expected = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    torch.testing.assert_close(q, expected[:, :4], atol=1e-5, rtol=1e-4)
    stored = keys.transpose(1, 2).reshape(-1, 2, 32)[batch.slots]
    torch.testing.assert_close(stored, expected[:, 4:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_without_tables_nothing_is_rotated(kind: str) -> None:
    heads = Heads(2, 2, 16)
    qkv, batch = torch.randn(5, heads.width), make_batch([5], [5], heads.block_size)
    keys, values = empty_caches(batch, heads)
    q = make_ops(kind).rotate_and_store(qkv, None, None, batch, keys, values, 2, 2, 16)
    parts = qkv.view(5, 6, 16)
    assert torch.equal(q, parts[:, :2])
    assert torch.equal(keys.transpose(1, 2).reshape(-1, 2, 16)[batch.slots], parts[:, 2:4])
    assert torch.equal(values.transpose(1, 2).reshape(-1, 2, 16)[batch.slots], parts[:, 4:])


@pytest.mark.parametrize("kind", ["c", "torch", "torch-deterministic"])
def test_a_pass_without_tokens_is_empty(kind: str) -> None:
    heads, ops = Heads(), make_ops(kind)
    batch = make_batch([], [], heads.block_size)
    caches = empty_caches(batch, heads)
    cos, sin = rope_tables(64)
    q = ops.rotate_and_store(torch.empty(0, heads.width), cos, sin, batch, *caches, 9, 3, 64)
    assert ops.attention(q, *caches, batch, 0.125).shape == (0, 576)


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_a_sequence_without_queries_in_this_pass_is_skipped(kind: str) -> None:
    heads, ops = Heads(2, 1, 16), make_ops(kind)
    batch = make_batch([8, 6], [0, 6], heads.block_size)
    caches = empty_caches(batch, heads)
    q = ops.rotate_and_store(torch.randn(6, heads.width), None, None, batch, *caches, 2, 1, 16)
    assert ops.attention(q, *caches, batch, 0.25).isfinite().all()


def test_the_c_kernels_refuse_what_would_leave_the_cache() -> None:
    heads, ops = Heads(2, 1, 16), make_ops("c")
    batch = make_batch([8], [8], heads.block_size)
    caches = empty_caches(batch, heads)
    qkv, (cos, sin) = torch.randn(8, heads.width), rope_tables(16)
    with pytest.raises(IndexError, match="slot"):
        too_small = caches[0][:0], caches[1][:0]
        ops.rotate_and_store(qkv, cos, sin, batch, *too_small, 2, 1, 16)
    with pytest.raises(IndexError, match="position"):
        ops.rotate_and_store(qkv, cos[:7], sin[:7], batch, *caches, 2, 1, 16)
    batch.block_tables.fill_(10_000)
    with pytest.raises(IndexError, match="block"):
        ops.attention(torch.randn(8, 2, 16), *caches, batch, 0.25)


def test_the_reference_works_in_bfloat16() -> None:
    heads, ops = Heads(2, 1, 16), make_ops("torch")
    batch = make_batch([8], [8], heads.block_size)
    caches = [cache.bfloat16() for cache in empty_caches(batch, heads)]
    cos, sin = rope_tables(16)
    qkv = torch.randn(8, heads.width)
    q = ops.rotate_and_store(qkv.bfloat16(), cos, sin, batch, caches[0], caches[1], 2, 1, 16)
    out = ops.attention(q, caches[0], caches[1], batch, 0.25)
    assert out.dtype == torch.bfloat16
    expected = dense_attention(heads, qkv, 0)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
