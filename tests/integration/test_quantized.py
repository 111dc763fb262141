"""Models whose layers have 8-bit weights, through `LLM`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS, relative_error

# `gpu_tools` must come first, since transformers imports Triton.
from checkpoints import RaggedRun, damp, random_model, random_prompt, shorten  # isort: skip
from same_text import assert_same_texts, texts_of  # isort: skip

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.quantized import quantize
from outrider.kernels.reference import ReferenceOps
from outrider.workers import device
from outrider.workers.gpu.step import DeviceStep
from outrider.workers.weights.loader import load_model

pytestmark = [pytest.mark.model, *GPU_MARKS]

KINDS = ["fp8", "int8"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_gb": 0.01,
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 20,
    "log_level": "error",
}


class Models:
    """A target and its draft; and the target with each kind of weights, rounded beforehand."""

    def __init__(self, folder: Path) -> None:
        model = random_model("llama", num_hidden_layers=2, attention_bias=True, **SIZES)
        damp(model, 1, 0.3)
        self.target, self.draft = folder / "target", folder / "draft"
        model.save_pretrained(self.target)
        shorten(model, 1).save_pretrained(self.draft)
        self.rounded: dict[str, Path] = {}
        self.reference: dict[str, Any] = {}
        for kind in KINDS:
            self.rounded[kind] = folder / kind
            self.reference[kind] = shorten(model, 2)
            _round_layers(self.reference[kind], kind)
            self.reference[kind].save_pretrained(self.rounded[kind])


@torch.no_grad()
def _round_layers(model: Any, kind: str) -> None:
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(quantize(module.weight.detach(), kind).dequantized())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("quantized"))


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8},
    ]
    prompts = [random_prompt(length, seed=length) for length in (1, 9, 30)]
    return prompts, [SamplingParams(max_tokens=8, ignore_eos=True, **kind) for kind in kinds]


def _tokens(model: Path, **options: Any) -> list[list[int]]:
    llm = LLM(str(model), **(COMMON | {"device": "cpu"} | options))
    return [list(output.outputs[0].token_ids) for output in llm.generate(*_requests())]


def _log_probabilities(model: Path, **options: Any) -> list[float]:
    llm = LLM(str(model), **(COMMON | {"device": "cpu", "deterministic": True} | options))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([random_prompt(9)], params)
    return [step.logprob for found in output.outputs[0].logprobs or () for step in found.values()]


@pytest.mark.parametrize("kernels", ["c", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_a_checkpoint_rounded_beforehand(
    models: Models, kind: str, kernels: str
) -> None:
    options = {"cpu_kernels": kernels, "deterministic": True}
    quantized = _tokens(models.target, quantization=kind, **options)
    assert quantized == _tokens(models.rounded[kind], **options)
    numbers = _log_probabilities(models.target, quantization=kind, cpu_kernels=kernels)
    assert numbers == _log_probabilities(models.rounded[kind], cpu_kernels=kernels)
    assert numbers != _log_probabilities(models.target, cpu_kernels=kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_does_not_change_the_text_of_a_quantized_target(
    models: Models, kind: str
) -> None:
    plain = _tokens(models.target, quantization=kind)
    drafted = {
        "draft_model": str(models.draft),
        "num_speculative_tokens": 3,
        "speculation_policy": "fixed",
    }
    assert plain == _tokens(models.target, quantization=kind, **drafted)
    assert plain == _tokens(models.target, quantization=kind, draft_quantization="int8", **drafted)


def test_ranks_in_processes_of_their_own_quantize_too(models: Models) -> None:
    apart = {"workers": "processes", "draft_model": str(models.draft), "num_threads": 1}
    assert _tokens(models.target, quantization="int8", **apart) == _tokens(models.rounded["int8"])


@pytest.fixture
def colocated(models: Models, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LLM]:
    """Engines whose passes are GPU kernels, wherever they run."""

    def build(kind: str) -> LLM:
        monkeypatch.setattr(device, "select_ops", lambda _, __, exact, *___: GpuOps(exact))
        return LLM(
            str(models.target),
            draft_model=str(models.draft),
            num_speculative_tokens=2,
            speculation_policy="fixed",  # in the interpreter nothing that is drafted pays
            quantization=kind,
            draft_quantization=kind,
            device=DEVICE.type,
            **COMMON,
        )

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_of_gpu_kernels_gives_the_logits_of_the_rounded_checkpoint(
    models: Models, kind: str
) -> None:
    where: dict[str, Any] = {"dtype": torch.float32, "device": DEVICE}
    decoders = (
        load_model(models.target, ops=GpuOps(), quantization=kind, **where),
        load_model(models.rounded[kind], ops=ReferenceOps(), **where),
    )
    prompts = [random_prompt(length, seed=length) for length in (1, 4)]
    mine, expected = (torch.cat(RaggedRun(decoder, prompts).run(chunk=3)) for decoder in decoders)
    assert relative_error(mine, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernels_give_the_text_of_the_rounded_checkpoint(
    models: Models, colocated: Callable[[str], LLM], kind: str
) -> None:
    prompts, params = _requests()
    plain = LLM(str(models.rounded[kind]), device="cpu", **COMMON)
    expected = texts_of(plain, models.reference[kind], plain.generate(prompts, params), params)
    llm = colocated(kind)
    assert isinstance(llm.engine.built.loop._target, DeviceStep)
    found = texts_of(llm, models.reference[kind], llm.generate(prompts, params), params)
    assert_same_texts(zip(expected, found, strict=True))
    assert llm.engine.built.loop.scheduler.stats.accepted_tokens > 0


@pytest.mark.parametrize("name", ["quantization", "draft_quantization"])
def test_another_kind_is_refused_in_a_sentence(models: Models, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(models.target), **{name: "int4"})
    assert str(caught.value) == f"{name} is 'int4'; it must be 'fp8' or 'int8', or unset."
