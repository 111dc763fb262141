"""Log-probabilities are those of `transformers`, whatever speculation and batching do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from checkpoints import random_prompt, reference_logits
from same_text import acceptance_rate
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.text.outputs import Logprob, RequestOutput

pytestmark = pytest.mark.model

EngineFactory = Callable[..., LLM]

TOLERANCE = 1e-4
NUM_TOP = 5
BLOCK_SIZE = 8
PROMPTS = [random_prompt(length) for length in (121, 30, 2, 1)]
METHODS: Mapping[str, Mapping[str, Any]] = {
    "off": {"speculation": "off"},
    "ngram": {"speculation": "ngram"},
    "draft": {"speculation": "draft", "num_speculative_tokens": 4},
}


def asking(**params: Any) -> SamplingParams:
    return SamplingParams(**{"logprobs": NUM_TOP, "max_tokens": 16, "seed": 8} | params)


def run(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def assert_position(found: Mapping[int, Logprob], chosen: int, theirs: Tensor) -> None:
    """One position against the reference's log-probabilities [vocab] there."""
    best = sorted(found, key=lambda token: found[token].rank)[:NUM_TOP]
    values, ids = theirs.topk(NUM_TOP)
    assert best == ids.tolist()
    for token, value in zip(best, values.tolist(), strict=True):
        assert found[token].logprob == pytest.approx(value, abs=TOLERANCE)
    assert found[chosen].logprob == pytest.approx(float(theirs[chosen]), abs=TOLERANCE)
    assert found[chosen].rank == 1 + int((theirs > theirs[chosen]).sum())
    assert set(found) == {*best, chosen}


def reference_logprobs(reference: Any, output: RequestOutput) -> Tensor:
    """[tokens, vocab]: row i is the distribution of the token at position i + 1 of the text."""
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return reference_logits(reference, text).log_softmax(-1)


def assert_output_logprobs(reference: Any, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        theirs = reference_logprobs(reference, output)
        completion, start = output.outputs[0], len(output.prompt_token_ids) - 1
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        for index, token in enumerate(completion.token_ids):
            assert_position(completion.logprobs[index], token, theirs[start + index])
        total = sum(float(theirs[start + i, t]) for i, t in enumerate(completion.token_ids))
        assert completion.cumulative_logprob == pytest.approx(total, abs=16 * TOLERANCE)


def assert_prompt_logprobs(reference: Any, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        theirs = reference_logprobs(reference, output)
        found = output.prompt_logprobs
        assert found is not None and found[0] is None
        assert len(found) == len(output.prompt_token_ids)
        for position, token in enumerate(output.prompt_token_ids[1:], start=1):
            at_position = found[position]
            assert at_position is not None
            assert_position(at_position, token, theirs[position - 1])


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("method", METHODS)
def test_logprobs_equal_those_of_transformers(
    method: str, temperature: float, pair: Any, engine: EngineFactory
) -> None:
    outputs = run(engine(), asking(temperature=temperature, **METHODS[method]))
    assert_output_logprobs(pair.reference, outputs)
    if method == "draft":
        assert 0 < acceptance_rate(outputs) < 1


def test_logprobs_are_of_the_model_whatever_the_parameters_make_of_it(
    pair: Any, engine: EngineFactory
) -> None:
    params = asking(
        temperature=0.7, top_k=20, repetition_penalty=1.5, logit_bias={9: 5.0}, max_tokens=12
    )
    outputs = run(engine(), params)
    assert_output_logprobs(pair.reference, outputs)
    ranks = [
        found[token].rank
        for output in outputs
        for found, token in zip(
            output.outputs[0].logprobs or (), output.outputs[0].token_ids, strict=True
        )
    ]
    assert max(ranks) > NUM_TOP


@pytest.mark.parametrize(
    "options",
    ({"cpu_kernels": "torch", "deterministic": False}, {"lag": 1}),
    ids=("plain torch", "one step behind"),
)
def test_logprobs_do_not_depend_on_the_engine(
    options: Mapping[str, Any], pair: Any, engine: EngineFactory
) -> None:
    assert_output_logprobs(pair.reference, run(engine(**options), asking(temperature=0.7)))


@pytest.mark.parametrize("method", METHODS)
def test_prompt_logprobs_equal_those_of_transformers(
    method: str, pair: Any, engine: EngineFactory
) -> None:
    outputs = run(engine(), asking(prompt_logprobs=NUM_TOP, **METHODS[method]))
    assert_prompt_logprobs(pair.reference, outputs)
    assert_output_logprobs(pair.reference, outputs)


@pytest.mark.parametrize("lag", (0, 1))
def test_prompt_logprobs_survive_chunked_prompts(
    lag: int, pair: Any, engine: EngineFactory
) -> None:
    llm = engine(max_num_batched_tokens=11, max_num_seqs=4, lag=lag)
    assert_prompt_logprobs(pair.reference, run(llm, asking(prompt_logprobs=NUM_TOP)))


def test_prompt_logprobs_ignore_cached_prefixes(pair: Any, engine: EngineFactory) -> None:
    llm = engine(block_size=BLOCK_SIZE)
    run(llm, asking())
    assert run(llm, asking())[0].metrics.num_cached_tokens == 120
    outputs = run(llm, asking(prompt_logprobs=NUM_TOP))
    assert outputs[0].metrics.num_cached_tokens == 0
    assert_prompt_logprobs(pair.reference, outputs)


@pytest.mark.parametrize("lag", (0, 1))
def test_prompt_logprobs_are_given_once_after_preemption(
    lag: int, pair: Any, engine: EngineFactory, kv_gb: Callable[..., float]
) -> None:
    longest = len(PROMPTS[0]) + 60
    llm = engine(
        block_size=BLOCK_SIZE,
        lag=lag,
        max_model_len=longest,
        kv_cache_gb=kv_gb(longest + BLOCK_SIZE, pair.target, pair.draft, block_size=BLOCK_SIZE),
    )
    outputs = run(llm, asking(prompt_logprobs=NUM_TOP, max_tokens=60, ignore_eos=True))
    assert llm.engine.built.loop.scheduler.num_preemptions > 0
    assert_prompt_logprobs(pair.reference, outputs)
    assert_output_logprobs(pair.reference, outputs)


def test_echo_puts_the_prompt_and_its_logprobs_first(pair: Any, engine: EngineFactory) -> None:
    prompt = "the rest is letters"
    llm = engine()
    silent = llm.generate(prompt, asking(), use_tqdm=False)[0]
    echoed = llm.generate(prompt, asking(echo=True), use_tqdm=False)[0]
    assert echoed.outputs[0].text == prompt + silent.outputs[0].text
    assert echoed.outputs[0].token_ids == silent.outputs[0].token_ids
    assert_prompt_logprobs(pair.reference, [echoed])


def test_the_bundled_targets_logprobs_equal_those_of_transformers(bundled_reference: Any) -> None:
    llm = LLM(draft_model="smollm2-135m-draft", kv_cache_gb=0.1)
    params = asking(temperature=0.7, prompt_logprobs=NUM_TOP, max_tokens=8)
    outputs = llm.generate(["Water boils at a temperature of"], params, use_tqdm=False)
    assert_prompt_logprobs(bundled_reference, outputs)
    assert_output_logprobs(bundled_reference, outputs)
