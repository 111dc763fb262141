"""The page of limits quotes what is said, word for word."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.text.tokenizer import check_same_tokenizer
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import load_spec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "limits.md").read_text()


class Words:
    """A tokenizer, as far as two are compared."""

    def __init__(self, *words: str) -> None:
        self._ids = {word: i for i, word in enumerate(words)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def adapter(folder: Path) -> Path:
    told = {"peft_type": "LORA", "base_model_name_or_path": "a/b"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def refused(ask: Callable[[], Any]) -> str:
    with pytest.raises(OutriderError) as caught:
        ask()
    return str(caught.value)


def test_every_sentence_on_the_page_is_said(tmp_path: Path) -> None:
    wishes: list[dict[str, Any]] = [
        {"enable_lora": True},
        {"method": "eagle"},
        {"pipeline_parallel_size": 2},
        {"enable_expert_parallel": True},
        {"decode_context_parallel_size": 2},
        {"kv_transfer_config": {}},
        {"cpu_offload_gb": 4},
        {"kv_cache_dtype": "fp8"},
    ]
    said = [refused(partial(EngineConfig.from_kwargs, **wish)) for wish in wishes]
    configs: tuple[dict[str, Any], ...] = (
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}},
        {"model_type": "bert"},
    )
    for config in configs:
        said.append(refused(partial(ModelSpec.from_hf, config)))
    said.append(refused(lambda: load_spec(adapter(tmp_path))))
    said.append(refused(lambda: check_same_tokenizer(Words("a", "b"), Words("b", "a"))))

    cells = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    quoted = [cell.strip("` ") for cell in cells if cell.startswith("`")]
    assert len(quoted) == len(said)
    for quote in quoted:
        pattern = ".*".join(map(re.escape, quote.split("...")))
        assert [each for each in said if re.search(pattern, each)], quote
