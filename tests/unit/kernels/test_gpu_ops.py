"""The GPU kernels as one set of operations: chosen where they run, and whole decoders on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS, ragged_batch, relative_error
from torch import Tensor

# `gpu_tools` must come first, since transformers imports Triton.
from checkpoints import VOCAB_SIZE, save_checkpoint  # isort: skip

import outrider.kernels.ops
from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.ops import select_ops
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.types import Ops
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import KVCache
from outrider.workers.weights.loader import load_model

pytestmark = GPU_MARKS

CUDA = torch.device("cuda")
GPU_OPS: Ops = GpuOps()
REFERENCE = ReferenceOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_triton_is_the_default_on_a_gpu(dtype: torch.dtype, deterministic: bool) -> None:
    ops = select_ops(CUDA, dtype, deterministic)
    assert (ops.name, ops.deterministic) == ("triton", deterministic)


def test_elsewhere_torch_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops(CUDA, torch.float64).name == "torch"
    assert select_ops(CUDA, torch.bfloat16, backend="torch").name == "torch"
    monkeypatch.setattr(outrider.kernels.ops, "find_spec", lambda _: None)
    assert select_ops(CUDA, torch.bfloat16).name == "torch"


def test_triton_leaves_cpus_alone() -> None:
    assert select_ops(torch.device("cpu"), torch.bfloat16).name == "torch"


def load(folder: Path, ops: Ops) -> Decoder:
    return load_model(folder, dtype=torch.float32, device=DEVICE, ops=ops)


@pytest.mark.model
@pytest.mark.parametrize(
    ("variant", "is_fused"),
    [
        pytest.param("llama-biases", False, marks=pytest.mark.slow),
        ("llama-wide-heads", True),
        pytest.param("mistral-window", False, marks=pytest.mark.slow),
        ("qwen3", False),
        ("opt", False),
    ],
)
def test_a_decoder_gives_the_hidden_states_of_the_reference(
    variant: str, is_fused: bool, tmp_path: Path
) -> None:
    """Two ragged passes over one cache, the second one continuing every sequence of the first."""
    save_checkpoint(tmp_path, variant)
    decoders = load(tmp_path, GPU_OPS), load(tmp_path, REFERENCE)
    caches = [KVCache(decoder.spec, 20, 4, torch.float32, DEVICE) for decoder in decoders]
    assert (decoders[0]._fused is not None) == is_fused
    generator = torch.Generator()
    for lengths in ([(5, 5), (1, 1), (18, 18)], [(1, 6), (3, 4), (2, 20)]):
        generator.manual_seed(5)  # both passes have as many blocks, and so get the same ones
        batch = ragged_batch(
            lengths,
            block_size=4,
            tile_tokens=decoders[0].tile_tokens(max(queries for queries, _ in lengths)),
            num_blocks=20,
            generator=generator,
            empty_tiles=2,
        )
        ids = torch.randint(VOCAB_SIZE, batch.positions.shape, generator=generator).to(DEVICE)
        mine, expected = (
            decoder.forward(ids, batch, cache)
            for decoder, cache in zip(decoders, caches, strict=True)
        )
        assert relative_error(mine, expected) < 1e-5
        logits = [decoder.logits(expected[-4:]) for decoder in decoders]
        assert relative_error(*logits) < 1e-5
    for layer in range(decoders[0].spec.num_layers):
        assert relative_error(caches[0].keys[layer], caches[1].keys[layer]) < 1e-5
        assert relative_error(caches[0].values[layer], caches[1].values[layer]) < 1e-5


def test_attention_without_tiles_is_refused() -> None:
    batch = ragged_batch(
        [(1, 1)], block_size=4, tile_tokens=1, num_blocks=1, generator=torch.Generator()
    )
    cache = torch.zeros(1, 1, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="tiles"):
        GPU_OPS.attention(cache[0, :, :1], cache, cache, replace(batch, tiles=None), 1.0)


def random_scores(
    generator: torch.Generator, rows: int, vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with their keys: seeds, streams and positions."""
    scores = torch.randn(rows, vocab, generator=generator).to(DEVICE)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator).to(DEVICE)
    streams = torch.randint(4, (rows,), generator=generator).to(DEVICE)
    positions = torch.randint(5000, (rows,), generator=generator).to(DEVICE)
    return scores, seeds, streams, positions


def test_samples_are_those_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = random_scores(generator, 6, 700)
    assert torch.equal(GPU_OPS.gumbel_argmax(*inputs), REFERENCE.gumbel_argmax(*inputs))
    best, columns = GPU_OPS.gumbel_max(*inputs, first_id=50)
    expected_best, expected_columns = REFERENCE.gumbel_max(*inputs, first_id=50)
    assert torch.equal(columns, expected_columns)
    torch.testing.assert_close(best, expected_best)
    tokens = torch.randint(700, (6,), generator=generator).to(DEVICE)
    torch.testing.assert_close(
        GPU_OPS.probability_of(inputs[0], tokens), REFERENCE.probability_of(inputs[0], tokens)
    )


def test_a_pass_is_repeated_as_it_is() -> None:
    assert GPU_OPS.captured(run := lambda hidden, batch: hidden) is run


def test_float64_is_refused_everywhere() -> None:
    x = torch.ones(2, 8, dtype=torch.float64, device=DEVICE)
    cache = torch.ones(1, 1, 4, 8, dtype=torch.float64, device=DEVICE)
    batch = ragged_batch(
        [(2, 2)], block_size=4, tile_tokens=2, num_blocks=1, generator=torch.Generator()
    )
    ids = batch.positions
    for call in (
        lambda: GPU_OPS.linear(x, None),
        lambda: GPU_OPS.embed(ids, x),
        lambda: GPU_OPS.rms_norm(x, x[0], 1e-5),
        lambda: GPU_OPS.add_rms_norm(x, x, x[0], 1e-5),
        lambda: GPU_OPS.layer_norm(x, x[0], None, 1e-5),
        lambda: GPU_OPS.silu_mul(x),
        lambda: GPU_OPS.rotate_and_store(
            x.repeat(1, 3), None, None, batch, cache, cache.clone(), 1, 1, 8
        ),
        lambda: GPU_OPS.attention(x.view(2, 1, 8), cache, cache, batch, 1.0),
        lambda: GPU_OPS.gumbel_argmax(x, ids, ids, ids),
        lambda: GPU_OPS.gumbel_max(x, ids, ids, ids, 0),
        lambda: GPU_OPS.probability_of(x, ids),
    ):
        with pytest.raises(TypeError, match="not torch.float64"):
            call()
