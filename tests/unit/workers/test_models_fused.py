"""Fused passes of tensor-parallel shards, against the whole decoder in plain torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS, TOLERANCE, ragged_batch, relative_error
from torch import Tensor

# `gpu_tools` must come first, since transformers imports Triton.
from checkpoints import VOCAB_SIZE, save_checkpoint  # isort: skip
from rank_threads import ThreadGroup, run_ranks

from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.types import Ops
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Shard
from outrider.workers.weights.loader import load_model

pytestmark = [pytest.mark.model, *GPU_MARKS]

PASSES = ([(5, 5), (1, 1), (18, 18)], [(1, 6), (3, 4), (2, 20)])  # the second goes on
BIASED = {"attention_bias": True, "mlp_bias": True}
THREE_KV_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def load(folder: Path, dtype: torch.dtype, ops: Ops, shard: Shard | None = None) -> Decoder:
    return load_model(folder, dtype=dtype, device=DEVICE, ops=ops, shard=shard)


def run(decoder: Decoder) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Hidden states, logits and features of each pass."""
    cache = KVCache(decoder.spec, 20, 4, decoder.dtype, DEVICE, decoder.shard)
    decoder.tap([0, 1, decoder.spec.num_layers])
    generator, found = torch.Generator(), []
    for lengths in PASSES:
        generator.manual_seed(5)  # both passes have as many blocks, and so get the same ones
        batch = ragged_batch(
            lengths,
            block_size=4,
            tile_tokens=decoder.tile_tokens(max(queries for queries, _ in lengths)) or 1,
            num_blocks=20,
            generator=generator,
        )
        ids = torch.randint(VOCAB_SIZE, batch.positions.shape, generator=generator).to(DEVICE)
        hidden = decoder.forward(ids, batch, cache)
        found.append((hidden, decoder.logits(hidden), decoder.features))
    index = torch.tensor([hidden.shape[0] - 1, 2], device=DEVICE)
    assert torch.equal(decoder.forward_some(ids, batch, cache, index), hidden[index])
    return found


@pytest.mark.parametrize(
    ("size", "changes", "dtype"),
    [
        (2, THREE_KV_HEADS | BIASED | {"intermediate_size": 91}, torch.float32),
        (3, {}, torch.float16),  # the only head of keys is on every rank
        pytest.param(2, {}, torch.float32, marks=pytest.mark.slow),
        pytest.param(3, THREE_KV_HEADS | BIASED, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_fused_shards_together_are_the_whole_decoder(
    size: int, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """All ranks have the same hidden states, bit for bit: they choose the same tokens."""
    save_checkpoint(tmp_path, "llama-wide-heads", **changes)
    expected = run(load(tmp_path, torch.float32, ReferenceOps()))
    turn = threading.Lock()  # Triton's interpreter runs one kernel at a time

    def run_rank(group: ThreadGroup) -> list[tuple[Tensor, Tensor, Tensor]]:
        def reduce(partial: Tensor) -> Tensor:
            turn.release()
            try:
                return group.all_reduce(partial)
            finally:
                turn.acquire()

        with turn:
            decoder = load(tmp_path, dtype, GpuOps(), Shard(group.rank, size, reduce))
            assert decoder._fused is not None
            found = run(decoder)
        num_passes = len(PASSES) + 1  # the last one twice
        assert len(group.calls) == num_passes * (1 + 2 * decoder.spec.num_layers)
        return found

    ranks = run_ranks(size, run_rank)
    for number, (hidden, logits, features) in enumerate(expected):
        own = [rank[number] for rank in ranks]
        for other in own[1:]:
            assert torch.equal(other[0], own[0][0]) and torch.equal(other[2], own[0][2])
        assert relative_error(own[0][0], hidden) < TOLERANCE[dtype]
        assert relative_error(torch.cat([each[1] for each in own], 1), logits) < TOLERANCE[dtype]
        assert relative_error(own[0][2], features) < TOLERANCE[dtype]
