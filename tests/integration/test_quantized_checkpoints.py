"""Checkpoints that are quantized, in every layout that is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompt, reference_logits, save_checkpoint
from quantized_checkpoints import ALL_FORMS, FORMS, INT_FORMS, SIZES, Saved, assert_alike, write
from safetensors.torch import load_file

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.kernels.cpu.build import load_library
from outrider.kernels.cpu.ops import CpuOps
from outrider.kernels.grouped import blocks_of
from outrider.kernels.quantized import QuantizedWeight
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.stored import StoredWeight
from outrider.kernels.types import Ops
from outrider.workers.models import assembly
from outrider.workers.weights.loader import load_model

pytestmark = [pytest.mark.model]

COMMON: dict[str, Any] = {
    "device": "cpu",
    "deterministic": True,
    "kv_cache_gb": 0.01,
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 20,
    "log_level": "error",
}
OPS: dict[str, Callable[[], Ops]] = {"c": lambda: CpuOps(load_library()), "torch": ReferenceOps}
GOLDEN = [name for name in FORMS if name.startswith("compressed-tensors")]
TEXTS = ("compressed-tensors: mixed", "fp8: blocks", "modelopt: in config.json", "awq")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module", params=ALL_FORMS)
def saved(request: pytest.FixtureRequest, folder: Path) -> Saved:
    return Saved(folder / "one", write(folder / "one", ALL_FORMS[request.param]))


@pytest.mark.parametrize("kernels", OPS)
def test_logits_are_what_the_checkpoint_means(saved: Saved, kernels: str) -> None:
    assert_alike(saved, OPS[kernels])


@pytest.mark.parametrize("name", GOLDEN)
def test_compressed_tensors_itself_reads_the_same(name: str, tmp_path: Path) -> None:
    """What these tests compare with is what the library that defines the format computes."""
    import transformers

    meant = write(tmp_path, FORMS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = random_prompt(9)
    torch.testing.assert_close(reference_logits(theirs, prompt), reference_logits(meant, prompt))


@pytest.mark.parametrize(
    "name",
    ["compressed-tensors: 4 bits", "compressed-tensors: 4 bits, zero points"],
)
def test_compressed_tensors_itself_unpacks_the_same(name: str, tmp_path: Path) -> None:
    """Its compressor, because transformers does not load packed zero points."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    meant = write(tmp_path, INT_FORMS[name])
    [group] = INT_FORMS[name].config["config_groups"].values()
    tensors = load_file(tmp_path / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    for layer, module in meant.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            prefix = f"model.layers.{layer}."
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            own["weight_scale"] = own["weight_scale"].float()
            weight = compressor.decompress(own, QuantizationScheme(**group))["weight"]
            torch.testing.assert_close(weight, module.weight)


def test_packed_weights_stay_packed_on_cpus(saved: Saved) -> None:
    """Where blocks of GGUF hold the same; their products are not those of float32 bit for bit."""
    assert_alike(saved, OPS["c"], tolerance=1e-4, keeps_stored_format=True)
    assert_alike(saved, OPS["c"], tolerance=1e-4, keeps_stored_format=True, num_ranks=2)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("awq", {"Q5_0"}),
        ("gptq: symmetric", {"Q4_0"}),
        ("compressed-tensors: 8 bits", {"Q8_0"}),
        ("compressed-tensors: 4 bits, small groups", set()),
        ("gptq: in an order", set()),
    ],
)
def test_blocks_are_those_of_the_smallest_format(
    name: str, kinds: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    def recorded(weight: QuantizedWeight, kind: str) -> StoredWeight:
        found.add(kind)
        return blocks_of(weight, kind)

    monkeypatch.setattr(assembly, "blocks_of", recorded)
    write(tmp_path, INT_FORMS[name])
    where: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "keeps_stored_format": True}
    load_model(tmp_path, ops=OPS["c"](), **where)
    assert found == kinds


@pytest.mark.parametrize("kernels", OPS)
def test_two_ranks_round_the_inputs_that_each_has(saved: Saved, kernels: str) -> None:
    """As in other servers: where a layer's inputs are split, a token has a scale on each rank."""
    assert_alike(saved, OPS[kernels], num_ranks=2)


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8},
    ]
    prompts = [random_prompt(length, seed=length) for length in (1, 9, 30)]
    return prompts, [SamplingParams(max_tokens=12, ignore_eos=True, **kind) for kind in kinds]


def _tokens(model: Path, **options: Any) -> list[list[int]]:
    with LLM(str(model), **COMMON, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(*_requests())]


@pytest.mark.parametrize("name", TEXTS)
def test_speculation_does_not_change_the_text(name: str, tmp_path: Path) -> None:
    write(tmp_path / "target", ALL_FORMS[name])
    write(tmp_path / "draft", ALL_FORMS[name], num_layers=1)
    save_checkpoint(tmp_path / "whole draft", "llama", **SIZES, num_hidden_layers=1)
    drafted = {"num_speculative_tokens": 3, "speculation_policy": "fixed"}
    plain = _tokens(tmp_path / "target")
    for draft in ("draft", "whole draft"):
        assert plain == _tokens(tmp_path / "target", draft_model=str(tmp_path / draft), **drafted)
    apart = {"workers": "processes", "num_threads": 1, "draft_model": str(tmp_path / "draft")}
    assert plain == _tokens(tmp_path / "target", **apart, **drafted)


def test_the_draft_and_target_of_packed_weights_share_a_process_by_default(tmp_path: Path) -> None:
    """With dtype auto, as users have it: blocks in the C kernels."""
    write(tmp_path / "target", INT_FORMS["gptq"])
    write(tmp_path / "draft", INT_FORMS["compressed-tensors: 4 bits"], num_layers=1)
    plain = _tokens(tmp_path / "target", dtype="auto")
    drafted = {"num_speculative_tokens": 3, "speculation_policy": "fixed"}
    draft = str(tmp_path / "draft")
    assert plain == _tokens(tmp_path / "target", dtype="auto", draft_model=draft, **drafted)


def test_quantization_may_be_named_again_but_not_changed(tmp_path: Path) -> None:
    write(tmp_path, FORMS["fp8: dynamic"])
    assert _tokens(tmp_path, quantization="fp8") == _tokens(tmp_path)
    with pytest.raises(ConfigError) as caught:
        _tokens(tmp_path, quantization="int8")
    assert str(caught.value) == (
        "quantization is 'int8', but the checkpoint's weights are fp8 already (by fp8); leave it "
        "unset."
    )
