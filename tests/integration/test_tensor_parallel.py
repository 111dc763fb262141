"""Tensor parallelism of any size: the text of one rank, for every family and sampling parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS, VOCAB_SIZE, random_prompt, save_checkpoint
from lockstep import generate, lockstep_engine
from same_text import assert_same_texts, texts_of

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.model

NUM_TOKENS = 16
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "speculation": "ngram", "num_speculative_tokens": 4},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.7, "logit_bias": {7: 3.0, 200: 3.0}, "presence_penalty": 1.0},
    {"temperature": 0.0, "allowed_token_ids": list(range(100, 140)), "logprobs": 2},
    {"temperature": 1.0, "prompt_logprobs": 1, "min_tokens": 4, "stop_token_ids": [40, 41]},
]


def requests(**more: Any) -> list[tuple[list[int], SamplingParams]]:
    return [
        (random_prompt(5 + 9 * i), SamplingParams(max_tokens=NUM_TOKENS, seed=i, **(params | more)))
        for i, params in enumerate(MIXED)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_write_what_one_writes_in_every_family(variant: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, variant)
    compare(tmp_path, reference, lockstep_engine(tmp_path, 2), requests())


@pytest.mark.parametrize(("target_size", "draft_size"), [(3, 1), (4, 3), (1, 2)])
def test_target_and_draft_may_have_any_sizes(
    target_size: int, draft_size: int, tmp_path: Path
) -> None:
    reference = save_checkpoint(tmp_path, "llama")
    engine = lockstep_engine(tmp_path, target_size, tmp_path, draft_size)
    asked = [
        (prompt, params)
        for depth in (1, 3)
        for prompt, params in requests(**{"num_speculative_tokens": depth})
        if params.speculation is None
    ]
    outputs = compare(tmp_path, reference, engine, asked)
    accepted = sum(output.outputs[0].speculation.accepted for output in outputs)
    assert accepted > len(asked), "a draft with the target's own weights is nearly always right"


def test_heads_and_vocabulary_need_not_divide(tmp_path: Path) -> None:
    """Nine heads in three groups and an odd number of tokens over two ranks."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    reference = save_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE + 1, **sizes)
    compare(tmp_path, reference, lockstep_engine(tmp_path, 2), requests())


def compare(
    folder: Path, reference: Any, engine: Any, asked: list[tuple[list[int], SamplingParams]]
) -> Any:
    """The engine's texts are those of one rank, near ties aside."""
    whole = LLM(str(folder), kv_cache_gb=0.05, log_level="error", workers="inline")
    parameters = [params for _, params in asked]
    plain = [replace(params, speculation="off") for params in parameters]
    expected = whole.generate([prompt for prompt, _ in asked], plain, use_tqdm=False)
    outputs = generate(engine, asked)
    assert_same_texts(
        zip(
            texts_of(whole, reference, expected, parameters),
            texts_of(whole, reference, outputs, parameters),
            strict=True,
        )
    )
    return outputs
