"""Recorded passes: the same bits as the pass itself, for new contents, batches and sizes."""

from pathlib import Path

import pytest
import torch
from c_kernels import make_ops
from checkpoints import random_prompt, save_checkpoint

from outrider.kernels.types import RaggedBatch
from outrider.workers.models.kv import KVCache
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.weights.loader import load_model

CPU = torch.device("cpu")


def make_runner(folder: Path, repeats: bool) -> Runner:
    ops = make_ops("c")
    if not repeats:
        ops.captured = lambda run: run  # type: ignore[method-assign]
    decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=ops)
    kv = KVCache(decoder.spec, 32, 8, torch.float32, CPU)
    runner = Runner(decoder, kv, 4, 64, decoder.spec.vocab_size)
    for row in range(4):
        runner.extend_table(row, 0, range(row * 8, row * 8 + 8))
    return runner


@pytest.mark.model
@pytest.mark.parametrize("variant", ["llama", "qwen3", "qwen2", "mistral", "granite", "opt"])
def test_passes_run_again_give_the_bits_of_passes_run_plainly(variant: str, tmp_path: Path) -> None:
    """Ragged passes of 1 to 8 tokens over growing contexts; OPT and Granite are not recorded."""
    save_checkpoint(tmp_path, variant)
    recorded, plain = make_runner(tmp_path, True), make_runner(tmp_path, False)
    tokens = random_prompt(64, seed=3)
    positions = [0, 0, 0, 0]
    sizes = [(1, 1), (2, 1), (1,), (3, 2, 1), (1, 1), (2, 1), (4, 4), (1,), (3, 2, 1), (1, 1)]
    for pass_sizes in sizes * 2:
        chunks = []
        for row, size in enumerate(pass_sizes):
            start = positions[row]
            chunks.append(RowChunk(row, start, tokens[start : start + size]))
            positions[row] = start + size
        assert torch.equal(recorded.forward(chunks), plain.forward(chunks))


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_pass_that_is_not_all_kernels_is_not_recorded(place: str) -> None:
    ops = make_ops("c")
    weight = torch.ones(16)

    def run(x: torch.Tensor, _: RaggedBatch) -> torch.Tensor:
        if place == "before":
            return ops.rms_norm(x.tanh(), weight, 1e-6)
        return ops.rms_norm(x, weight, 1e-6).tanh()

    again = ops.captured(run)
    for _ in range(4):
        x = torch.randn(2, 16)
        assert torch.equal(again(x, empty_batch()), run(x, empty_batch()))


def test_layer_norm_passes_are_not_recorded() -> None:
    ops = make_ops("c")
    weight, calls = torch.ones(16), []

    def run(x: torch.Tensor, _: RaggedBatch) -> torch.Tensor:
        calls.append(1)
        return ops.layer_norm(x, weight, None, 1e-6)

    again = ops.captured(run)
    for _ in range(4):
        again(torch.randn(2, 16), empty_batch())
    assert len(calls) == 6  # the first one runs three times: twice to find out


def empty_batch() -> RaggedBatch:
    whole, half = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    return RaggedBatch(whole, whole, half, half, half[None], 1, 1)
