"""Weights that stay in the form a checkpoint stores them: the same model, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import with_kernels
from checkpoints import RaggedRun, random_model, random_prompt, reference_logits
from gguf_files import write_stored

from outrider.kernels.cpu.stored import CpuStored
from outrider.kernels.ops import select_ops
from outrider.kernels.stored import KINDS, StoredWeight
from outrider.workers.device import place
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Partition, Shard
from outrider.workers.models.source import WeightRequest
from outrider.workers.weights import packed_cache as packed_cache_module
from outrider.workers.weights.checkpoint import converted_folder
from outrider.workers.weights.loader import load_model
from outrider.workers.weights.safetensors_source import SafetensorsSource
from outrider.workers.weights.stored_source import StoredFolder

pytest.importorskip("gguf")
pytestmark = pytest.mark.model

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32)
needs_kernels = pytest.mark.skipif(OPS.packing is None, reason="no C compiler")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 200}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", with_kernels(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache_module, "MIN_BYTES", 0)
    return tmp_path / "cache"


def write_model(
    path: Path, kind_of: Callable[[str], str], variant: str = "llama", **sizes: int
) -> Any:
    model = random_model(variant, **(SIZES | sizes))
    write_stored(path, model, kind_of)
    return model


def load(path: Path, **options: Any) -> Decoder:
    return load_model(
        path, dtype=torch.float32, device=CPU, ops=OPS, keeps_stored_format=True, **options
    )


def mixed(name: str) -> str:
    """As files of medium quality have it: what matters most has more bits."""
    if "embed" in name or "lm_head" in name:
        return "Q8_0"
    return "Q6_K" if "v_proj" in name or "down_proj" in name else "Q4_K"


def kinds_of_use() -> list[str]:
    if OPS.packing is None:
        return []
    return [kind for kind in KINDS if kind != "INT8" and OPS.packing.stored.gains_by(kind)]


@needs_kernels
@pytest.mark.parametrize("kind", kinds_of_use())
def test_a_model_of_each_kind_gives_the_logits_of_transformers_and_is_never_made_whole(
    kind: str, tmp_path: Path, read_names: list[str]
) -> None:
    model = write_model(tmp_path / "model.gguf", lambda _: kind)
    prompt = random_prompt(40, vocab_size=200)
    ours = RaggedRun(load(tmp_path / "model.gguf"), [prompt]).run(chunk=16)[0]
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert not read_names


@needs_kernels
@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_kinds_may_be_mixed_within_a_layer(
    variant: str, tmp_path: Path, read_names: list[str]
) -> None:
    model = write_model(tmp_path / "model.gguf", mixed, variant)
    prompt = random_prompt(40, vocab_size=200)
    ours = RaggedRun(load(tmp_path / "model.gguf"), [prompt]).run(chunk=16)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)
    assert not read_names


@needs_kernels
def test_logits_are_the_same_bits_whatever_the_passes(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", mixed)
    decoder, prompt = load(tmp_path / "model.gguf"), random_prompt(70, vocab_size=200)
    one_by_one = RaggedRun(decoder, [prompt]).run(chunk=1)[0]
    for chunk in (3, 8, 70):
        assert torch.equal(RaggedRun(decoder, [prompt]).run(chunk)[0], one_by_one)


@needs_kernels
def test_what_was_packed_is_mapped_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model.gguf", mixed, "llama-tied")
    prompt = random_prompt(20, vocab_size=200)
    first = RaggedRun(load(tmp_path / "model.gguf", cache_packed=True), [prompt]).run(4)[0]
    packed: list[StoredWeight] = []
    monkeypatch.setattr(CpuStored, "pack", lambda _, weight, out: packed.append(weight))
    decoder = load(tmp_path / "model.gguf", cache_packed=True)
    assert torch.equal(RaggedRun(decoder, [prompt]).run(4)[0], first)
    assert not packed


@needs_kernels
def test_float32_and_stored_weights_are_kept_apart(tmp_path: Path, cache: Path) -> None:
    model = write_model(tmp_path / "model.gguf", mixed)
    prompt = random_prompt(20, vocab_size=200)
    load(tmp_path / "model.gguf", cache_packed=True)
    plain = load_model(
        tmp_path / "model.gguf", dtype=torch.float32, device=CPU, ops=OPS, cache_packed=True
    )
    assert len(list((cache / "packed").glob("*.weights"))) == 2
    ours = RaggedRun(plain, [prompt]).run(4)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)


@needs_kernels
def test_a_share_between_blocks_stays_stored_and_one_inside_a_block_is_made_whole(
    tmp_path: Path, read_names: list[str]
) -> None:
    """512 columns in halves are two blocks of Q6_K; 256 columns of `o_proj` are one of Q4_K."""
    write_model(tmp_path / "model.gguf", mixed)
    for rank in range(2):
        read_names.clear()
        load(tmp_path / "model.gguf", shard=Shard(rank, 2))
        assert {name.rsplit(".", 2)[-2] for name in read_names} == {"o_proj"}


@needs_kernels
def test_shares_together_are_the_whole(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", lambda _: "Q4_1", "llama-tied")
    spec = load(tmp_path / "model.gguf").spec
    folder = converted_folder(tmp_path / "model.gguf")
    stored = StoredFolder(folder, SafetensorsSource(folder, torch.float32, CPU))
    name, shape = "model.layers.0.mlp.down_proj.weight", (256, 512)
    whole = stored.find(WeightRequest(name, shape))
    assert whole is not None
    parts = []
    for rank in range(2):
        columns = Partition.of(spec, Shard(rank, 2)).intermediate
        part = stored.find(WeightRequest(name, shape, columns=columns))
        assert part is not None
        parts.append(part.read().blocks)
    assert torch.equal(torch.cat(parts, dim=1), whole.read().blocks)


def test_only_dtype_auto_keeps_the_form() -> None:
    assert place("cpu", "auto", "auto", False, "target").keeps_stored_format
    assert not place("cpu", "float32", "auto", False, "target").keeps_stored_format


def test_kernels_that_cannot_get_weights_that_are_whole(
    tmp_path: Path, read_names: list[str]
) -> None:
    model = write_model(tmp_path / "model.gguf", mixed)
    ops = select_ops(CPU, torch.float32, backend="torch")
    decoder = load_model(
        tmp_path / "model.gguf", dtype=torch.float32, device=CPU, ops=ops, keeps_stored_format=True
    )
    prompt = random_prompt(20, vocab_size=200)
    ours = RaggedRun(decoder, [prompt]).run(4)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)
    assert read_names


@needs_kernels
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "opt"])
def test_a_checkpoint_of_bfloat16_stays_so_and_gives_bit_for_bit_what_it_gives_in_float32(
    variant: str, tmp_path: Path, read_names: list[str]
) -> None:
    folder = tmp_path / "model"
    random_model(variant).bfloat16().save_pretrained(folder)
    prompt = random_prompt(20)
    plain = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS)
    expected = RaggedRun(plain, [prompt]).run(4)[0]
    read_names.clear()
    assert torch.equal(RaggedRun(load(folder), [prompt]).run(4)[0], expected)
    assert all("embed_positions" in name or "project_" in name for name in read_names)


@needs_kernels
@pytest.mark.parametrize("rank", [0, 1])
def test_int8_is_multiplied_with_as_it_is_and_gives_what_rounding_gave(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    random_model("llama", **SIZES).save_pretrained(folder)
    packed: list[str] = []
    original = CpuStored.pack

    def pack(self: CpuStored, weight: StoredWeight, out: torch.Tensor) -> None:
        packed.append(weight.kind)
        original(self, weight, out)

    monkeypatch.setattr(CpuStored, "pack", pack)
    options: dict[str, Any] = {"quantization": "int8", "shard": Shard(rank, 2)}
    rounded = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS, **options)
    assert not packed
    bytes_of = load(folder, **options)
    assert packed.count("INT8") == 4 * SIZES["num_hidden_layers"]
    prompt = random_prompt(20, vocab_size=200)
    expected = RaggedRun(rounded, [prompt]).run(4)[0]
    ours = RaggedRun(bytes_of, [prompt]).run(4)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_a_narrow_model_is_in_8_bits_but_for_an_embedding_that_is_no_head(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    random_model(variant, **SIZES).bfloat16().save_pretrained(folder)
    packed: list[tuple[str, tuple[int, int]]] = []
    original = CpuStored.pack

    def pack(self: CpuStored, weight: StoredWeight, out: torch.Tensor) -> None:
        packed.append((weight.kind, weight.shape))
        original(self, weight, out)

    monkeypatch.setattr(CpuStored, "pack", pack)
    prompt = random_prompt(20, vocab_size=200)
    exact = RaggedRun(load(folder), [prompt]).run(4)[0]
    assert not [kind for kind, _ in packed if kind == "INT8"]
    packed.clear()
    narrow = RaggedRun(load(folder, narrow=True, cache_packed=True), [prompt]).run(4)[0]
    heads = [kind for kind, shape in packed if shape == (200, 256)]
    assert heads == (["INT8"] if variant == "llama-tied" else ["BF16", "INT8"])
    assert {kind for kind, shape in packed if shape != (200, 256)} == {"INT8"}
    assert not torch.equal(narrow, exact)
    assert (narrow - exact).norm() < 0.1 * exact.norm()
    # What was packed for one is not taken for the other.
    assert torch.equal(RaggedRun(load(folder, cache_packed=True), [prompt]).run(4)[0], exact)


@needs_kernels
def test_what_is_stored_in_few_bits_stays_as_it_is_in_a_narrow_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", mixed)
    prompt = random_prompt(20, vocab_size=200)
    expected = RaggedRun(load(tmp_path / "model.gguf"), [prompt]).run(4)[0]
    narrow = load(tmp_path / "model.gguf", narrow=True)
    assert torch.equal(RaggedRun(narrow, [prompt]).run(4)[0], expected)
