"""A GPU's memory given to KV but for what was measured: no step may then run out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import damp, random_model, random_prompt, shorten

from outrider import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.model]

ROOM_BYTES = 8 * 2**30
NUM_REQUESTS = 48
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "repetition_penalty": 1.2, "top_k": 50, "top_p": 0.9, "logprobs": 20},
    {"temperature": 0, "prompt_logprobs": 5, "logprobs": 20},
]


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_the_costliest_requests_stay_inside_the_limit(tmp_path: Path) -> None:
    target = random_model("llama", num_hidden_layers=4, **SIZES)
    damp(target, 1, 0.3)
    target.save_pretrained(tmp_path / "target")
    shorten(target, 1).save_pretrained(tmp_path / "draft")
    limit = _used() + ROOM_BYTES
    llm = LLM(
        str(tmp_path / "target"),
        draft_model=str(tmp_path / "draft"),
        gpu_memory_utilization=limit / torch.cuda.mem_get_info()[1],
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=4096,
        log_level="error",
    )
    prompts = [
        random_prompt(700 + 20 * i, seed=i, vocab_size=SIZES["vocab_size"])
        for i in range(NUM_REQUESTS)
    ]
    for kinds in (KINDS[:2], KINDS):
        params = [
            SamplingParams(max_tokens=16, ignore_eos=True, **kinds[i % len(kinds)])
            for i in range(NUM_REQUESTS)
        ]
        outputs = llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == 16 for output in outputs)
        assert _used() <= limit
