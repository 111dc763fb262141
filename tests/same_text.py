"""Requests that exercise every sampling parameter by every method, and whether texts are the same.

Deterministic engines are compared with `==`. Elsewhere sums are taken in another order for another
number of rows, so two tokens whose scores (noise included) are nearly equal may change places, and
from there on the texts have nothing in common. `assert_same_text` accepts exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from checkpoints import random_prompt, reference_logits

from outrider import LLM, SamplingParams
from outrider.engine.sample_requests import sample_request
from outrider.kernels.reference import ReferenceOps
from outrider.scheduler.types import IN_PROCESS, SampleId
from outrider.text.outputs import CompletionOutput, RequestOutput
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler

FLOAT32_MARGIN = 1e-3
MOST_NEAR_TIES = 0.01  # share of the sequences of one test that may need the margin

# The token chosen after a prefix, once the given logits have been moved by so much.
Choose = Callable[[Sequence[int], Mapping[int, float]], int]


@dataclass(frozen=True)
class Text:
    """A text and how any of its tokens is decided anew."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    choose: Choose


def recomputed_choice(
    llm: LLM, reference: Any, output: RequestOutput, params: SamplingParams, index: int = 0
) -> Choose:
    """Decides as sample `index` of `output` did, from the logits `reference` has on one prompt."""
    settled = replace(params, seed=output.outputs[index].seed)
    prepared = llm.engine.input_processor.prepare("again", output.prompt_token_ids, settled)
    spec = prepared.spec
    init = sample_request(spec, index, SampleId(IN_PROCESS, 0), arrival_s=0.0).row_init()
    sampler = RowSampler.from_init(init, llm.engine.built.facts.vocab_size, torch.device("cpu"))

    def choose(prefix: Sequence[int], nudges: Mapping[int, float]) -> int:
        logits = reference_logits(reference, prefix)[-1:].clone()
        for token, change in nudges.items():
            logits[0, token] += change
        return int(sample(logits, [LogitSpan(sampler, prefix)], ReferenceOps())[0])

    return choose


def texts_of(
    llm: LLM, reference: Any, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> list[Text]:
    """Every sample of every output."""
    return [
        Text(
            output.prompt_token_ids,
            completion.token_ids,
            recomputed_choice(llm, reference, output, own, completion.index),
        )
        for output, own in zip(outputs, params, strict=True)
        for completion in output.outputs
    ]


def assert_same_text(a: Text, b: Text, margin: float) -> bool:
    """Pass if the texts are equal (returns True) or part at a near tie (returns False).

    A near tie: moving the logits of the two tokens by half the margin each, one up and one down,
    makes either of them the choice on the common prefix. That covers the edges of top_k, top_p and
    min_p as well as the noise.
    """
    assert list(a.prompt_ids) == list(b.prompt_ids), "the prompts differ"
    if list(a.token_ids) == list(b.token_ids):
        return True
    common = 0
    for one, other in zip(a.token_ids, b.token_ids, strict=False):
        if one != other:
            break
        common += 1
    shorter = min(len(a.token_ids), len(b.token_ids))
    assert common < shorter, f"one text ends after {shorter} tokens where the other goes on"
    prefix = [*a.prompt_ids, *a.token_ids[:common]]
    tokens = (a.token_ids[common], b.token_ids[common])
    for wanted, other in (tokens, tokens[::-1]):
        nudged = a.choose(prefix, {wanted: margin / 2, other: -margin / 2})
        assert nudged == wanted, (
            f"output token {common} is {tokens[0]} in one text and {tokens[1]} in the other; "
            f"a margin of {margin} would choose {nudged} rather than {wanted}"
        )
    return False


def assert_same_texts(pairs: Iterable[tuple[Text, Text]], margin: float = FLOAT32_MARGIN) -> None:
    """`assert_same_text` for each pair; near ties must be rare."""
    same = [assert_same_text(a, b, margin) for a, b in pairs]
    assert same, "nothing was compared"
    near_ties = same.count(False)
    assert near_ties <= max(1, MOST_NEAR_TIES * len(same)), f"{near_ties} near ties in {len(same)}"


def content(output: CompletionOutput) -> tuple[Any, ...]:
    """All of a completion that a reader sees and that speculation must not change."""
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.stop_reason,
        output.logprobs,
        output.cumulative_logprob,
    )


def contents(outputs: Iterable[RequestOutput]) -> list[tuple[Any, ...]]:
    """`content` of every sample, with the prompt's log-probabilities."""
    return [
        (*content(completion), output.prompt_logprobs)
        for output in outputs
        for completion in output.outputs
    ]


def acceptance_rate(outputs: Iterable[RequestOutput]) -> float:
    """Accepted over drafted tokens of all samples; 0 if nothing was drafted."""
    records = [c.speculation for output in outputs for c in output.outputs]
    drafted = sum(record.drafted for record in records)
    return sum(record.accepted for record in records) / drafted if drafted else 0.0


# -- requests to compare -----------------------------------------------------------------------

# A prompt and what is asked of it.
Asked = tuple[list[int], SamplingParams]

EOS = 2
TEMPERATURES = (0.0, 0.7, 1.0)
PROMPTS = [random_prompt(length) for length in (1, 9, 40)]
NUM_TOKENS = 20
PLAIN: Mapping[str, Any] = {"speculation": "off"}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "off": PLAIN,
    "ngram": {"speculation": "ngram", "num_speculative_tokens": 4},
    **{
        f"draft at depth {depth}": {"speculation": "draft", "num_speculative_tokens": depth}
        for depth in (1, 3, 5, 8)
    },
}


@dataclass(frozen=True)
class Case:
    """A sampling parameter at work; leaving `params` out must show, or it was not at work."""

    params: Mapping[str, Any]
    background: Mapping[str, Any] = field(default_factory=dict)


_LIKELY_STOPS = {"stop_token_ids": list(range(30, 90))}
CASES: Mapping[str, Case] = {
    "top_k": Case({"top_k": 4}),
    "top_p": Case({"top_p": 0.5}),
    "min_p": Case({"min_p": 0.2}),
    "presence_penalty": Case({"presence_penalty": 2.0}),
    "frequency_penalty": Case({"frequency_penalty": -2.0}),
    "repetition_penalty": Case({"repetition_penalty": 1.8}),
    "logit_bias": Case({"logit_bias": {7: 4.0, 50: 4.0, 200: -100.0}}),
    "allowed_token_ids": Case({"allowed_token_ids": list(range(3, 60))}),
    "bad_words": Case({"bad_words": ["e", "qu", "st"]}),
    # "h" and "at" are likely, so that drafts often begin the word.
    "a bad word of two tokens": Case({"bad_words": ["hat"]}, {"logit_bias": {10: 6.0, 56: 6.0}}),
    "stop_token_ids": Case(_LIKELY_STOPS),
    "min_tokens": Case({"min_tokens": 9}, _LIKELY_STOPS),
    "ignore_eos": Case({"ignore_eos": True}, {"logit_bias": {EOS: 6.0}}),
    "skip_special_tokens": Case({"skip_special_tokens": False}, {"logit_bias": {1: 5.0}}),
    "stop": Case({"stop": ["te", "ss", "ol", "ea", "n"]}),
    "include_stop_str_in_output": Case(
        {"include_stop_str_in_output": True}, {"stop": ["te", "ss", "ol", "ea", "n"]}
    ),
    "stop after min_tokens": Case({"min_tokens": 9}, {"stop": ["e", "a", "o"]}),
    "max_tokens": Case({"max_tokens": 7}),
    "n": Case({"n": 3}),
    "logprobs": Case({"logprobs": 3}),
    "prompt_logprobs": Case({"prompt_logprobs": 2}),
    "echo": Case({"echo": True, "logprobs": 1}),
    "all": Case(
        {
            "n": 2,
            "top_k": 60,
            "top_p": 0.95,
            "min_p": 0.01,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.2,
            "logit_bias": {7: 2.0, 50: 3.0, EOS: 2.0},
            "allowed_token_ids": list(range(2, 250)),
            "bad_words": ["e", "hat"],
            "min_tokens": 5,
            "stop": ["st", "ol"],
            "stop_token_ids": [60, 61, 62],
            "logprobs": 2,
            "prompt_logprobs": 1,
        }
    ),
}


def all_temperatures(**params: Any) -> list[Asked]:
    """Every prompt at every temperature, each request with a seed of its own."""
    return [
        (prompt, SamplingParams(temperature=temperature, seed=seed, **params))
        for seed, (prompt, temperature) in enumerate(
            (prompt, temperature) for prompt in PROMPTS for temperature in TEMPERATURES
        )
    ]


def case_requests(case: Case, **params: Any) -> list[Asked]:
    together = {"max_tokens": NUM_TOKENS, **case.background, **case.params, **params}
    return all_temperatures(**together)


def run(llm: LLM, requests: Sequence[Asked]) -> list[RequestOutput]:
    prompts = [prompt for prompt, _ in requests]
    return llm.generate(prompts, [params for _, params in requests], use_tqdm=False)


def by_every_method(
    requests: Sequence[Asked],
) -> list[Asked]:
    """Each request once by each method, so that one batch mixes them all."""
    return [
        (prompt, replace(params, **method))
        for prompt, params in requests
        for method in METHODS.values()
    ]


def repeated_for_every_method(expected: list[Any], n: int = 1) -> list[Any]:
    """What `by_every_method` must give: all n samples of a request for each method."""
    return [
        sample
        for start in range(0, len(expected), n)
        for _ in METHODS
        for sample in expected[start : start + n]
    ]
