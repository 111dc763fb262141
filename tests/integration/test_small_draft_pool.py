"""A draft whose KV is smaller than the target's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_model

from outrider import LLM, SamplingParams
from outrider.engine import inline
from outrider.engine.sizing import PoolSizes, size_pools

pytestmark = pytest.mark.model

# The first is long: it has most of the draft's KV before the last get any.
PROMPTS = [
    {"prompt_token_ids": [3 + i, *range(7 * i, 7 * i + n)]} for i, n in enumerate([16, 4, 4, 4, 4])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    random_model("llama").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_draft_kv_get_the_same_text_undrafted(
    model: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_small_draft(*args: Any) -> PoolSizes:
        return dataclasses.replace(size_pools(*args), draft=10)

    monkeypatch.setattr(inline, "size_pools", with_small_draft)
    llm = LLM(
        model,
        draft_model=model,
        device="cpu",
        deterministic=True,
        block_size=4,
        max_model_len=24,
        speculation_policy="fixed",
        num_speculative_tokens=2,
    )
    scheduler = llm.engine.built.loop.scheduler
    assert scheduler.draft_pool.num_blocks == 10 < scheduler.target_pool.num_blocks
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=16, ignore_eos=True)
    plain = dataclasses.replace(params, speculation="off")
    drafted = [each.outputs[0] for each in llm.generate(PROMPTS, params)]
    undrafted = [each.outputs[0] for each in llm.generate(PROMPTS, plain)]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in undrafted]
    accepted = [each.speculation.accepted for each in drafted]
    assert max(accepted) > 0, "those with KV are drafted for"
    assert min(accepted) < max(accepted), "there is none for all"
    assert scheduler.draft_pool.num_free == 10
    scheduler.check_integrity()
