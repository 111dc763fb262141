"""Engines of small random models, and the models themselves as `transformers` runs them.

The pair shares its first layers, and the target's later layers are damped: so the draft is often
right and often wrong, which a test of speculation needs. Its tokenizer spells texts in letters and
pairs of letters, so that stop strings and bad words span tokens in many ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import damp, kv_gb, random_model, shorten
from letters import letter_tokenizer
from wheel_tools import Built, build, install

from outrider import LLM
from outrider.workers.weights.checkpoint import whole_folder

NUM_SHARED_LAYERS = 2
DAMPING = 0.2

EngineFactory = Callable[..., LLM]


@dataclass(frozen=True)
class Pair:
    """Checkpoint folders of a target and its draft, and the target as `transformers` runs it."""

    target: Path
    draft: Path
    reference: Any


@pytest.fixture(scope="session")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return letter_tokenizer()


@pytest.fixture(scope="session")
def pair(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: transformers.PreTrainedTokenizerFast
) -> Pair:
    target = random_model("llama", num_hidden_layers=2 * NUM_SHARED_LAYERS)
    damp(target, NUM_SHARED_LAYERS, DAMPING)
    folder = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("draft", shorten(target, NUM_SHARED_LAYERS))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return Pair(folder / "target", folder / "draft", target)


@pytest.fixture(scope="session")
def engine(pair: Pair) -> EngineFactory:
    """Engines of the pair, deterministic unless told; one for each set of options."""
    built: dict[str, LLM] = {}

    def get(**options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in built:
            defaults = {
                "draft_model": str(pair.draft),
                "deterministic": True,
                "kv_cache_gb": 0.05,
                "log_level": "error",
                "speculation_policy": "fixed",  # drafts are what most tests are about
            }
            built[key] = LLM(str(pair.target), **(defaults | options))
        return built[key]

    return get


@pytest.fixture(scope="session", name="kv_gb")
def kv_gb_fixture() -> Callable[..., float]:
    return kv_gb


@pytest.fixture(scope="session")
def bundled_reference() -> Any:
    """The bundled target as `transformers` runs it."""
    folder = whole_folder("smollm2-135m-instruct")
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _always_one_thread(one_thread: None) -> None:
    """In all tests here."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Wheel and sdist of this checkout."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def engine_programs(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that the engine's image would have."""
    return install("engine", built.wheel, tmp_path_factory.mktemp("engine") / "prefix")
