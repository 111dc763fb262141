"""Passes of a rank's runner, recorded on a GPU, padded in the same way in Triton's interpreter.

Whatever mix of prompts, single tokens and spans comes, hidden states and KV are those of a runner
that launches kernel by kernel, and nothing is written for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, random_prompt, save_checkpoint
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA, TOLERANCE, relative_error
from rendezvous import OpenRendezvous
from torch import Tensor

from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.reference import ReferenceOps
from outrider.workers.cuda_graphs.captured_passes import row_sizes
from outrider.workers.cuda_graphs.runner_passes import cuda_graph_bytes
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.groups.process_group import TensorParallelGroup, can_capture
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Shard
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.weights.loader import load_model

pytestmark = [pytest.mark.model, *GPU_MARKS]

DTYPE = torch.float32
ROWS, MAX_LEN, BLOCK_SIZE = 4, 40, 4
BLOCKS_PER_ROW = MAX_LEN // BLOCK_SIZE
NUM_BLOCKS = ROWS * BLOCKS_PER_ROW + 1  # the last is nobody's
QUERY_LEN = 2  # spans are longer
MAX_TOKENS = 12
POISON = 7.0  # what no pass writes

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,  # of one KV head: a tile takes four tokens
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Each pass computes (row, tokens) more: prompts alone, prompts beside single tokens and spans,
# single tokens, exactly a recorded size, spans longer than a tile.
PASSES = (
    ((0, 4), (2, 3)),
    ((0, 1), (1, 9), (2, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((2, 3), (0, 2), (3, 1), (1, 2)),
    ((3, 1),),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    save_checkpoint(found, "llama", **SIZES)
    return found


def load(
    folder: Path, deterministic: bool = False, group: SingleRankGroup | None = None
) -> Decoder:
    group = group or SingleRankGroup()
    shard = Shard(group.rank, group.size, group.all_reduce)
    ops = GpuOps(deterministic)
    return load_model(folder, dtype=DTYPE, device=DEVICE, ops=ops, shard=shard)


class Rows:
    """A runner over a poisoned cache, and how far each of its rows is. Blocks are handed out as
    they are needed, in no order."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        is_recorded: bool,
        group: SingleRankGroup | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        kv = KVCache(decoder.spec, NUM_BLOCKS, BLOCK_SIZE, DTYPE, DEVICE, decoder.shard)
        self.kv = kv
        for cache in (*kv.keys, *kv.values):
            cache.fill_(POISON)
        self.runner = Runner(decoder, kv, ROWS, MAX_LEN, vocab_size, group)
        if is_recorded:
            self.runner.capture(QUERY_LEN, MAX_TOKENS)
        generator = torch.Generator().manual_seed(3)
        self._free = torch.randperm(NUM_BLOCKS - 1, generator=generator).tolist()
        self._tables: list[list[int]] = [[] for _ in range(ROWS)]
        self._texts = [random_prompt(MAX_LEN, seed=row) for row in range(ROWS)]
        self._done = [0] * ROWS

    def forward(self, counts: Sequence[tuple[int, int]]) -> Tensor:
        chunks = []
        for row, count in counts:
            start, end = self._done[row], self._done[row] + count
            self._grow(row, end)
            chunks.append(RowChunk(row, start, self._texts[row][start:end]))
            self._done[row] = end
        return self.runner.forward(chunks)

    def restart(self, row: int) -> None:
        """Another text comes to the row, and its blocks are others."""
        self._free += self._tables[row]
        self._tables[row] = []
        self._done[row] = 0
        self._texts[row] = random_prompt(MAX_LEN, seed=100 + row)

    def is_written(self) -> Tensor:
        """bool [blocks, block size]: which slots hold a token of a row."""
        written = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
        for table, done in zip(self._tables, self._done, strict=True):
            for at in range(done):
                written[table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE] = True
        return written.view(NUM_BLOCKS, BLOCK_SIZE)

    def _grow(self, row: int, length: int) -> None:
        start = len(self._tables[row])
        new = [self._free.pop(0) for _ in range(-(-length // BLOCK_SIZE) - start)]
        self._tables[row] += new
        self.runner.extend_table(row, start, new)


def assert_same(out: Tensor, expected: Tensor, is_exact: bool) -> None:
    assert out.shape == expected.shape
    assert relative_error(out, expected) < TOLERANCE[DTYPE]
    if is_exact:
        assert torch.equal(out, expected)


def assert_same_cache(rows: Rows, expected: Rows, is_exact: bool) -> None:
    """What rows wrote is the same, and all else is as it was."""
    written = rows.is_written()
    own, other = rows.kv, expected.kv
    pairs = zip((*own.keys, *own.values), (*other.keys, *other.values), strict=True)
    for cache, expected_cache in pairs:
        by_slot, expected_by_slot = cache.transpose(1, 2), expected_cache.transpose(1, 2)
        assert_same(by_slot[written], expected_by_slot[written], is_exact)
        assert (by_slot[~written] == POISON).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_mix_gives_what_kernel_by_kernel_gives(folder: Path, deterministic: bool) -> None:
    decoder = load(folder, deterministic)
    recorded, eager = (Rows(decoder, is_recorded=each) for each in (True, False))
    for counts in PASSES:
        assert_same(recorded.forward(counts), eager.forward(counts), deterministic)
    assert_same_cache(recorded, eager, deterministic)


def test_the_passes_are_of_different_recorded_sizes() -> None:
    totals = [sum(count for _, count in counts) for counts in PASSES]
    sizes = row_sizes(MAX_TOKENS)
    assert max(totals) <= MAX_TOKENS
    assert len({next(size for size in sizes if size >= total) for total in totals}) >= 4
    assert set(totals) & set(sizes) and set(totals) - set(sizes)


@pytest.mark.parametrize(("variant", "is_fused"), [("llama", True), ("qwen3", False)])
def test_a_part_of_a_model_with_ids_it_holds_elsewhere(
    variant: str, is_fused: bool, tmp_path: Path
) -> None:
    """The other rank is missing, so sums are parts, the same in both ways."""
    save_checkpoint(tmp_path, variant, **SIZES)
    group = SingleRankGroup(rank=1, size=2)
    decoder = load(tmp_path, group=group)
    assert (decoder._fused is not None) == is_fused
    recorded, eager = (Rows(decoder, is_recorded=each, group=group) for each in (True, False))
    for counts in PASSES[:3]:
        assert_same(recorded.forward(counts), eager.forward(counts), False)
    assert_same_cache(recorded, eager, False)


def test_recording_and_padding_store_nothing(folder: Path) -> None:
    rows = Rows(load(folder), is_recorded=True)
    caches = (*rows.kv.keys, *rows.kv.values)
    assert all((cache == POISON).all() for cache in caches)
    rows.forward([(1, 3)])  # a token short of a recorded size
    written = rows.is_written()
    assert int(written.sum()) == 3
    for cache in caches:
        assert ((cache.transpose(1, 2) == POISON).all(-1).all(-1) == ~written).all()


def test_larger_passes_are_not_recorded_and_see_the_same_rows(folder: Path) -> None:
    decoder = load(folder)
    recorded, eager = (Rows(decoder, is_recorded=each) for each in (True, False))
    large = ((0, MAX_TOKENS - 2), (1, 4))
    small = recorded.forward([(0, 3)])
    eager.forward([(0, 3)])
    before = small.clone()
    assert_same(recorded.forward(large), eager.forward(large), False)
    assert torch.equal(small, before), "a pass that is not recorded leaves the result alone"
    assert_same(recorded.forward(((0, 1), (1, 2))), eager.forward(((0, 1), (1, 2))), False)
    assert not torch.equal(small, before), "a recorded pass writes where the last one wrote"
    assert_same_cache(recorded, eager, False)


def test_a_row_that_got_other_blocks(folder: Path) -> None:
    decoder = load(folder)
    recorded, eager = (Rows(decoder, is_recorded=each) for each in (True, False))
    for rows in (recorded, eager):
        rows.forward([(0, 5), (1, 3)])
        rows.restart(0)
    for counts in (((0, 6), (1, 1)), ((0, 1),)):
        assert_same(recorded.forward(counts), eager.forward(counts), False)


def test_tables_from_before_the_recording_are_known(folder: Path) -> None:
    decoder = load(folder)
    late, eager = (Rows(decoder, is_recorded=False) for _ in range(2))
    for rows in (late, eager):
        rows.forward([(0, 5), (1, 3)])
    late.runner.capture(QUERY_LEN, MAX_TOKENS)
    counts = ((0, 1), (1, 2))
    assert_same(late.forward(counts), eager.forward(counts), False)


def test_ids_a_draft_lacks_are_read_as_its_last(folder: Path) -> None:
    decoder = load(folder)
    wide = VOCAB_SIZE + 50
    runner = Rows(decoder, is_recorded=True, vocab_size=wide).runner
    runner.extend_table(0, 0, [0])
    beyond = runner.forward([RowChunk(0, 0, [5, VOCAB_SIZE + 20])]).clone()
    assert torch.equal(beyond, runner.forward([RowChunk(0, 0, [5, VOCAB_SIZE - 1])]))


def test_kernels_without_tiles_go_on_as_before(folder: Path) -> None:
    decoder = load_model(folder, dtype=DTYPE, device=DEVICE, ops=ReferenceOps())
    rows = Rows(decoder, is_recorded=True)
    first = rows.forward([(0, 3)])
    before = first.clone()
    rows.forward([(0, 3)])
    assert torch.equal(first, before)


def test_forgotten_recordings_are_not_needed(folder: Path) -> None:
    rows = Rows(load(folder), is_recorded=True)
    first = rows.forward([(0, 2)])
    before = first.clone()
    rows.runner.release_graphs()
    rows.forward([(0, 2)])
    assert torch.equal(first, before), "a pass that is not recorded leaves the result alone"


def test_which_groups_can_be_recorded() -> None:
    cpu = torch.device("cpu")
    with OpenRendezvous() as board:
        store = board.store()
        gloo = TensorParallelGroup(store, "gloo", 0, 1, cpu, deterministic=False)
        assert not can_capture(gloo)
        assert can_capture(SingleRankGroup())
        if HAS_CUDA:
            assert can_capture(
                TensorParallelGroup(store, "nccl", 0, 1, DEVICE, deterministic=False)
            )


@pytest.mark.skipif(not HAS_CUDA, reason="nothing is recorded without a GPU")
def test_recordings_keep_to_what_is_set_aside_for_them(folder: Path) -> None:
    decoder = load(folder)
    kv = KVCache(decoder.spec, NUM_BLOCKS, BLOCK_SIZE, DTYPE, DEVICE)
    first, runner = (Runner(decoder, kv, ROWS, MAX_LEN, VOCAB_SIZE) for _ in range(2))
    first.capture(QUERY_LEN)  # compiles all kernels; its memory must not be given back meanwhile
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    runner.capture(QUERY_LEN)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert 0 < before - after <= cuda_graph_bytes(decoder)
    first.release_graphs()


def test_room_is_set_aside_for_an_8_bit_weight_that_is_written_out(folder: Path) -> None:
    plain = load(folder)
    packed = load_model(folder, dtype=DTYPE, device=DEVICE, ops=GpuOps(), quantization="int8")
    largest = 2 * plain.spec.intermediate_size * plain.spec.hidden_size * DTYPE.itemsize
    assert cuda_graph_bytes(packed) == cuda_graph_bytes(plain) + largest
