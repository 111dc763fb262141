"""Every family, run by the whole engine in every way of batching, against `transformers`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, VARIANTS, random_prompt, reference_logits, save_checkpoint
from same_text import Text, assert_same_texts, recomputed_choice
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.text.outputs import RequestOutput
from outrider.workers.sampling.rows import LogitSpan
from outrider.workers.sampling.verify import verify

pytestmark = pytest.mark.model

PROMPT_LENGTHS = (700, 64, 17, 2, 1, 251)
NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
BLOCK_SIZE = 8

# With a tied head and so little of its blocks in the stream, this one repeats its last token.
CHANGES: Mapping[str, Mapping[str, Any]] = {"granite-biases": {"residual_multiplier": 2.0}}

# Each way of running must show in the engine's own counters, or the test would prove nothing.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 2048, "enable_prefix_caching": False},
    "chunks of prompts": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "chunks, one step behind": {"max_num_batched_tokens": 50, "max_num_seqs": 8, "lag": 1},
}


@dataclass
class Family:
    """A random checkpoint of a family, and what `transformers` writes with it."""

    folder: Path
    reference: Any
    prompts: list[list[int]]
    expected: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = [generate_alone(self.reference, prompt) for prompt in self.prompts]


def generate_alone(reference: Any, prompt: list[int]) -> list[int]:
    ids = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    new: list[int] = ids[0, len(prompt) :].tolist()
    return new


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def get(variant: str) -> Family:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            reference = save_checkpoint(folder, variant, **CHANGES.get(variant, {}))
            made[variant] = Family(folder, reference, [random_prompt(n) for n in PROMPT_LENGTHS])
        return made[variant]

    return get


class SeenLogits:
    """The logits every token was chosen from, by the text before it."""

    def __init__(self) -> None:
        self.by_text: dict[tuple[int, ...], Tensor] = {}

    def take(self, logits: Tensor, spans: list[LogitSpan]) -> None:
        rows = iter(logits)
        for span in spans:
            for count in range(span.num_rows):
                text = (*span.tokens, *span.drafts[:count])
                self.by_text[text] = next(rows).clone()

    def assert_equal_to(self, reference: Any, prompt: list[int], output: list[int]) -> None:
        theirs = reference_logits(reference, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        ours = [self.by_text[(*prompt, *output[:count])] for count in range(len(output))]
        torch.testing.assert_close(torch.stack(ours), theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[SeenLogits]:
    seen = SeenLogits()

    def watched(logits: Tensor, spans: list[LogitSpan], *others: Any) -> Any:
        seen.take(logits, spans)
        return verify(logits, spans, *others)

    monkeypatch.setattr("outrider.workers.target.verify", watched)
    yield seen


def run(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, GREEDY, use_tqdm=False)


def assert_equal_to_transformers(
    llm: LLM, family: Family, outputs: list[RequestOutput], seen: SeenLogits
) -> None:
    def pair(output: RequestOutput, expected: list[int]) -> tuple[Text, Text]:
        prompt = output.prompt_token_ids
        choose = recomputed_choice(llm, family.reference, output, GREEDY)
        return Text(prompt, output.outputs[0].token_ids, choose), Text(prompt, expected, choose)

    assert_same_texts(map(pair, outputs, family.expected))
    for output in outputs:
        seen.assert_equal_to(family.reference, output.prompt_token_ids, output.outputs[0].token_ids)


def slow_unless_a_family(variant: str) -> Any:
    marks = () if variant in FAMILIES else (pytest.mark.slow,)
    return pytest.param(variant, marks=marks)


every_variant = pytest.mark.parametrize("variant", [slow_unless_a_family(v) for v in VARIANTS])


@every_variant
def test_a_random_model_writes_many_tokens_that_depend_on_the_order_of_its_prompt(
    variant: str, family_of: Callable[[str], Family]
) -> None:
    family = family_of(variant)
    assert max(len(set(text)) for text in family.expected) >= 16, family.expected
    *shuffled, last = family.prompts[0]
    random.Random(0).shuffle(shuffled)
    assert generate_alone(family.reference, [*shuffled, last]) != family.expected[0]


@every_variant
@pytest.mark.parametrize("way", WAYS)
def test_ragged_batches_write_what_transformers_writes_alone(
    variant: str, way: str, family_of: Callable[[str], Family], seen_logits: SeenLogits
) -> None:
    family = family_of(variant)
    llm = LLM(str(family.folder), block_size=BLOCK_SIZE, kv_cache_gb=0.05, **WAYS[way])
    outputs = run(llm, family.prompts)
    assert_equal_to_transformers(llm, family, outputs, seen_logits)
    assert all(output.metrics.num_cached_tokens == 0 for output in outputs)


@every_variant
def test_cached_prefixes_change_nothing(
    variant: str, family_of: Callable[[str], Family], seen_logits: SeenLogits
) -> None:
    family = family_of(variant)
    llm = LLM(str(family.folder), block_size=BLOCK_SIZE, kv_cache_gb=0.05)
    run(llm, family.prompts[::-1])  # so that every prompt has another row the second time
    seen_logits.by_text.clear()
    outputs = run(llm, family.prompts)
    for output in outputs:
        length = len(output.prompt_token_ids)
        assert output.metrics.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_equal_to_transformers(llm, family, outputs, seen_logits)


@every_variant
def test_preempted_requests_change_nothing(
    variant: str,
    family_of: Callable[[str], Family],
    seen_logits: SeenLogits,
    kv_gb: Callable[..., float],
) -> None:
    family = family_of(variant)
    longest = max(PROMPT_LENGTHS) + NUM_TOKENS
    llm = LLM(
        str(family.folder),
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        # Room for the prompts up to the fifth, but not for what follows them.
        kv_cache_gb=kv_gb(longest + 14 * BLOCK_SIZE, family.folder, block_size=BLOCK_SIZE),
        max_num_batched_tokens=100,
    )
    outputs = run(llm, family.prompts)
    assert llm.engine.built.loop.scheduler.num_preemptions > 0
    assert_equal_to_transformers(llm, family, outputs, seen_logits)


@pytest.mark.parametrize(
    "lengths", ((1, 45), pytest.param((1, 45, 251, 700), marks=pytest.mark.slow)), ids=str
)
def test_the_bundled_target_writes_what_transformers_writes_alone(
    lengths: tuple[int, ...], bundled_reference: Any, seen_logits: SeenLogits
) -> None:
    llm = LLM(draft_model="none", kv_cache_gb=0.2, max_num_batched_tokens=32, max_num_seqs=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [random_prompt(length, vocab_size=49_000) for length in lengths]
    prompts.append(llm.get_tokenizer()("The capital of France is").input_ids)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    telling = dataclasses.replace(greedy, logprobs=0)  # or not all logits are computed
    told = llm.generate(prompts, telling, use_tqdm=False)
    for output, other in zip(outputs, told, strict=True):
        ids = output.outputs[0].token_ids
        assert ids == other.outputs[0].token_ids
        theirs = reference_logits(bundled_reference, [*output.prompt_token_ids, *ids[:-1]])
        assert ids == theirs[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()
        seen_logits.assert_equal_to(bundled_reference, output.prompt_token_ids, ids)
    assert " Paris" in outputs[-1].outputs[0].text
