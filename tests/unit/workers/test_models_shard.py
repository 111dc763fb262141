"""Tensor-parallel shards: together they are the whole model, and each reads only its share."""

from __future__ import annotations

import dataclasses
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import VARIANTS, RaggedRun, random_prompt, save_checkpoint
from torch import Tensor

from outrider.errors import CapacityError, ModelError
from outrider.kernels.ops import select_ops
from outrider.workers.models.kv import KVCache, bytes_per_block
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.loader import load_model

CPU = torch.device("cpu")


class ThreadGroup:
    """Ranks as threads of this process; their reduction adds in rank order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts = [torch.empty(0)] * size

    def reducer(self, rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(partial: Tensor) -> Tensor:
            self._parts[rank] = partial
            self._barrier.wait()
            total = sum(self._parts[1:], self._parts[0])
            self._barrier.wait()
            return total

        return reduce


def logits_of(folder: Path, shard: Shard, prompts: list[list[int]]) -> list[Tensor]:
    ops = select_ops(CPU, torch.float32, backend="torch")
    decoder = load_model(folder, dtype=torch.float32, device="cpu", ops=ops, shard=shard)
    return RaggedRun(decoder, prompts).run(chunk=6)


@pytest.mark.model
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "variant", ["llama", "llama-biases", "qwen3", "granite-biases", "opt-350m", "opt-bare"]
)
def test_shards_together_are_the_whole_model(variant: str, size: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant)
    prompts = [random_prompt(5), random_prompt(13)]
    whole = logits_of(tmp_path, Shard(), prompts)
    group = ThreadGroup(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(logits_of, tmp_path, Shard(rank, size, group.reducer(rank)), prompts)
            for rank in range(size)
        ]
        shards = [future.result() for future in futures]
    for index, expected in enumerate(whole):
        joined = torch.cat([logits[index] for logits in shards], dim=-1)
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-4)


def spec_with(num_heads: int, num_kv_heads: int) -> ModelSpec:
    config = VARIANTS["llama"][1] | {
        "model_type": "llama",
        "head_dim": 16,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    return ModelSpec.from_hf(config)


@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (32, 8), (28, 4), (6, 1), (64, 8)])
def test_every_head_and_row_is_held_once_whatever_the_size(heads: tuple[int, int]) -> None:
    spec = spec_with(*heads)
    for size in range(1, heads[0] + 1):
        parts = [Partition.of(spec, Shard(rank, size)) for rank in range(size)]
        assert all(part.heads for part in parts)
        for field, total in (
            ("heads", spec.num_heads),
            ("intermediate", spec.intermediate_size),
            ("vocab", spec.vocab_size),
        ):
            held = [index for part in parts for index in getattr(part, field)]
            assert held == list(range(total))


@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (32, 8), (28, 4), (6, 1), (64, 8)])
def test_every_query_head_finds_its_key_head_by_the_local_rule(heads: tuple[int, int]) -> None:
    spec = spec_with(*heads)
    group = spec.num_heads // spec.num_kv_heads
    for size in range(1, heads[0] + 1):
        parts = [Partition.of(spec, Shard(rank, size)) for rank in range(size)]
        for part in parts:
            local_group = len(part.heads) // len(part.kv_heads)
            for local, head in enumerate(part.heads):
                assert part.kv_heads[local // local_group] == head // group


def test_the_bundled_target_splits_over_two_ranks_without_padding() -> None:
    parts = [Partition.of(spec_with(9, 3), Shard(rank, 2)) for rank in range(2)]
    assert [len(part.heads) for part in parts] == [3, 6]
    assert [len(part.kv_heads) for part in parts] == [1, 2]


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="tensor_parallel is 5 but the model has only 4"):
        Partition.of(spec_with(4, 2), Shard(0, 5))


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ModelError, match="rank is 2; it must be from 0 to 1"):
        Shard(2, 2)


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(3, 4)])
def test_the_cache_takes_the_memory_foretold(shard: Shard) -> None:
    spec = spec_with(8, 4)
    cache = KVCache(spec, 3, 16, torch.bfloat16, "cpu", shard)
    taken = sum(tensor.nbytes for tensor in [*cache.keys, *cache.values])
    assert taken == 3 * bytes_per_block(spec, 16, torch.bfloat16, shard)


def test_a_block_takes_memory_only_when_it_is_used() -> None:
    """Pages may be large: those of one block have to lie together."""
    spec = dataclasses.replace(spec_with(8, 8), num_layers=24, windows=(0,) * 24)
    block = bytes_per_block(spec, 16, torch.float32)
    cache = KVCache(spec, (400 << 20) // block, 16, torch.float32, "cpu", is_interleaved=True)
    before = resident_bytes()
    for tensor in (*cache.keys, *cache.values):
        tensor[7] = 1.0
    assert resident_bytes() - before < block + (16 << 20)


@pytest.mark.parametrize("gigabytes", [10**6, 10**12])
def test_memory_that_is_not_there_is_named_with_what_to_lower(gigabytes: int) -> None:
    spec = spec_with(8, 8)
    num_blocks = gigabytes * 2**30 // bytes_per_block(spec, 16, torch.float32)
    with pytest.raises(CapacityError, match=r"e\+\d+ GB for keys and values.*lower kv_cache_gb"):
        KVCache(spec, num_blocks, 16, torch.float32, "cpu", is_interleaved=True)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
