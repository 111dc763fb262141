"""Runners of a tensor-parallel group: which logits each has, and ids beyond the limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, random_prompt, save_checkpoint
from rank_threads import ThreadGroup, run_ranks
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.ops import select_ops
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Shard
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
BLOCKS = range(4)


def make_runner(folder: Path, shard: Shard, group: Collective, vocab_size: int) -> Runner:
    ops = select_ops(CPU, torch.float32)
    decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=ops, shard=shard)
    kv = KVCache(decoder.spec, len(BLOCKS), 8, torch.float32, CPU, shard)
    return Runner(decoder, kv, 1, 32, vocab_size, group)


def logits_of(runner: Runner) -> Tensor:
    runner.extend_table(0, 0, BLOCKS)
    return runner.logits(runner.forward([RowChunk(0, 0, random_prompt(9))]), [2, 8])


# The last limit leaves the last rank of three without any id.
@pytest.mark.parametrize("limit", [VOCAB_SIZE + 5, 300, 200])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_have_every_id_under_the_limit(
    size: int, limit: int, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "llama")
    whole = logits_of(make_runner(tmp_path, Shard(), SingleRankGroup(), limit))

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, range]:
        shard = Shard(group.rank, group.size, group.all_reduce)
        runner = make_runner(tmp_path, shard, group, limit)
        own = logits_of(runner)
        return own, runner.vocab.gather(own), runner.vocab.held

    results = run_ranks(size, work)
    assert whole.shape[-1] == min(limit, VOCAB_SIZE)
    assert [token for _, _, held in results for token in held] == list(range(whole.shape[-1]))
    for own, gathered, held in results:
        assert own.shape[-1] == len(held)
        torch.testing.assert_close(gathered, whole, rtol=1e-4, atol=1e-4)


def test_a_group_that_is_not_the_decoders_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    with pytest.raises(ModelError, match="rank 1 of 2 but its group says rank 0 of 1"):
        make_runner(tmp_path, Shard(1, 2), SingleRankGroup(), VOCAB_SIZE)
