"""Shared-noise verification writes the text of plain decoding, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import CPU, PrefixModel, decode_plainly, make_sampler

from outrider.kernels.ops import select_ops
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import SpanVerdict, verify

VOCAB = 24
NUM_TOKENS = 20
PROMPT = (3, 9, 9, 17, 4)
STOP_IDS = (0, 7)
BAD_WORDS = ((11,), (2, 5), (9, 4, 6), (13, 13))
MODEL = PrefixModel(VOCAB)
DRAFT = PrefixModel(VOCAB, "draft")
OPS = select_ops(CPU, torch.float32)

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "nothing": dict(),
    "temperature": dict(temperature=0.7),
    "top_k": dict(top_k=4),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.1),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=1.2),
    "repetition": dict(repetition_penalty=1.6),
    "greedy with penalties": dict(temperature=0.0, frequency_penalty=0.9, repetition_penalty=1.3),
    "bias": dict(logit_bias={1: 2.0, 2: 4.0}),
    "allowed": dict(allowed_token_ids=[0, 1, 2, 5, 9, 13]),
    "min_tokens": dict(min_tokens=10, logit_bias={0: 6.0, 7: 6.0}),
    "bad_words": dict(logit_bias={13: 3.0, 2: 3.0, 5: 3.0}),
    "combined": dict(
        temperature=1.2,
        top_k=9,
        top_p=0.9,
        min_p=0.03,
        presence_penalty=0.4,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={0: 3.0, 5: 1.5},
        min_tokens=8,
    ),
}

Drafter = Callable[[Sequence[int], int], list[int]]


def a_sampler(seed: int = 5, **params: Any) -> RowSampler:
    return make_sampler(VOCAB, seed, len(PROMPT), STOP_IDS, BAD_WORDS, **params)


def decode_with_drafts(
    sampler: RowSampler, drafters: Sequence[Drafter], num_tokens: int = NUM_TOKENS
) -> list[tuple[list[int], int]]:
    """Per drafter, the text committed by rounds of verification and how many rounds it took.

    They run as requests of one batch.
    """
    texts, rounds = [list(PROMPT) for _ in drafters], [0] * len(drafters)
    end = len(PROMPT) + num_tokens
    while running := [i for i, text in enumerate(texts) if len(text) < end]:
        spans = [LogitSpan(sampler, texts[i], drafters[i](texts[i], rounds[i])) for i in running]
        verdicts = verify(MODEL.batch_logits(spans), spans, OPS, "shared")
        for i, span, verdict in zip(running, spans, verdicts, strict=True):
            assert verdict.tokens[:-1] == tuple(span.drafts[: verdict.num_accepted])
            texts[i] = [*texts[i], *verdict.tokens]
            rounds[i] += 1
    return [(text[len(PROMPT) : end], n) for text, n in zip(texts, rounds, strict=True)]


def perfect(plain: Sequence[int], depth: int) -> Drafter:
    return lambda tokens, _: list(plain[len(tokens) - len(PROMPT) :][:depth])


def at_random(depth: int, seed: int = 0) -> Drafter:
    generator = random.Random(seed)
    return lambda tokens, _: [generator.randrange(VOCAB) for _ in range(depth)]


def half_right(plain: Sequence[int], depth: int) -> Drafter:
    generator = random.Random(depth)

    def draft(tokens: Sequence[int], _: int) -> list[int]:
        right = perfect(plain, depth)(tokens, _)
        return [t if generator.random() < 0.7 else generator.randrange(VOCAB) for t in right]

    return draft


def banned_or_repeated(depth: int) -> Drafter:
    """Tokens that parameters rule out, and repetitions that move the penalties most."""
    pool = [0, 7, 11, 5, 6, 13, 13]
    return lambda tokens, rounds: [
        tokens[-1] if (rounds + j) % 2 else pool[(rounds + j) % len(pool)] for j in range(depth)
    ]


def by_a_model(sampler: RowSampler, model: PrefixModel, depth: int) -> Drafter:
    def draft(tokens: Sequence[int], _: int) -> list[int]:
        drafts: list[int] = []
        for _step in range(depth):
            logits = torch.from_numpy(model([*tokens, *drafts])).unsqueeze(0)
            step = draft_sample(logits, [LogitSpan(sampler, tokens, drafts)], OPS, "shared")
            drafts = [*drafts, int(step.tokens[0])]
        return drafts

    return draft


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_text_is_that_of_plain_decoding_under_each_parameter(name: str) -> None:
    sampler = a_sampler(**PARAMETERS[name])
    plain = decode_plainly(MODEL, sampler, PROMPT, NUM_TOKENS + 8, OPS)
    assert len(set(plain)) >= 3
    drafters = [
        drafter
        for depth in (1, 2, 3, 5, 8)
        for drafter in (
            perfect(plain, depth),
            half_right(plain, depth),
            at_random(depth),
            banned_or_repeated(depth),
            by_a_model(sampler, DRAFT, min(depth, 3)),
        )
    ]
    for text, _ in decode_with_drafts(sampler, drafters):
        assert text == plain[:NUM_TOKENS]


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_changes_the_text(name: str) -> None:
    """Else the test above would show nothing about it."""
    base = a_sampler(temperature=0.0 if name == "greedy with penalties" else 1.0)
    if name == "bad_words":
        base = make_sampler(VOCAB, 5, len(PROMPT), STOP_IDS, (), **PARAMETERS[name])
    if name == "min_tokens":
        base = a_sampler(logit_bias=PARAMETERS[name]["logit_bias"])
    if name == "nothing":
        base = a_sampler(seed=6)
    sampler = a_sampler(**PARAMETERS[name])
    texts = [decode_plainly(MODEL, s, PROMPT, NUM_TOKENS, OPS) for s in (base, sampler)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("name", PARAMETERS)
def test_perfect_drafts_are_all_accepted(name: str) -> None:
    sampler = a_sampler(**PARAMETERS[name])
    plain = decode_plainly(MODEL, sampler, PROMPT, NUM_TOKENS + 8, OPS)
    results = decode_with_drafts(sampler, [perfect(plain, depth) for depth in range(1, 9)])
    assert [rounds for _, rounds in results] == [
        -(-NUM_TOKENS // (depth + 1)) for depth in range(1, 9)
    ]


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    sampler = a_sampler(**PARAMETERS["combined"])
    ((_, rounds),) = decode_with_drafts(sampler, [by_a_model(sampler, MODEL, 4)])
    assert rounds == NUM_TOKENS // 5


@given(
    seed=st.integers(0, 2**64 - 1),
    params=st.fixed_dictionaries(
        {},
        optional=dict(
            temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
            top_k=st.integers(0, VOCAB),
            top_p=st.floats(0.05, 1.0),
            min_p=st.floats(0.0, 0.5),
            presence_penalty=st.floats(-2, 2),
            frequency_penalty=st.floats(-2, 2),
            repetition_penalty=st.floats(0.5, 2.0),
            logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=4),
            allowed_token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB),
            min_tokens=st.integers(0, 12),
        ),
    ),
    depths=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_any_parameters_depths_and_drafts_give_the_plain_text(
    seed: int, params: dict[str, Any], depths: list[int], accuracy: float
) -> None:
    sampler = a_sampler(seed, **(params | {"max_tokens": None}))
    num_tokens = 14
    plain = decode_plainly(MODEL, sampler, PROMPT, num_tokens, OPS)
    generator = random.Random(seed)

    def draft(tokens: Sequence[int], rounds: int) -> list[int]:
        right = plain[len(tokens) - len(PROMPT) :][: depths[rounds % len(depths)]]
        return [t if generator.random() < accuracy else generator.randrange(VOCAB) for t in right]

    assert decode_with_drafts(sampler, [draft], num_tokens)[0][0] == plain


def test_requests_with_every_parameter_and_depth_share_a_batch() -> None:
    samplers = [a_sampler(seed, **params) for seed, params in enumerate(PARAMETERS.values())]
    plain = [decode_plainly(MODEL, s, PROMPT, NUM_TOKENS, OPS) for s in samplers]
    texts = [list(PROMPT) for _ in samplers]
    generator = random.Random(0)
    while any(len(text) < len(PROMPT) + NUM_TOKENS for text in texts):
        spans = []
        for i, sampler in enumerate(samplers):
            right = plain[i][len(texts[i]) - len(PROMPT) :][: generator.randrange(6)]
            drafts = [t if generator.random() < 0.8 else generator.randrange(VOCAB) for t in right]
            spans.append(LogitSpan(sampler, texts[i], drafts))
        verdicts = verify(MODEL.batch_logits(spans), spans, OPS, "shared")
        texts = [[*text, *v.tokens] for text, v in zip(texts, verdicts, strict=True)]
    assert [text[len(PROMPT) :][:NUM_TOKENS] for text in texts] == plain


def test_a_resumed_request_goes_on_with_the_same_text() -> None:
    sampler = a_sampler(**PARAMETERS["combined"])
    plain = decode_plainly(MODEL, sampler, PROMPT, NUM_TOKENS, OPS)
    resumed = a_sampler(**PARAMETERS["combined"])
    rest = decode_plainly(MODEL, resumed, [*PROMPT, *plain[:9]], NUM_TOKENS - 9, OPS)
    assert rest == plain[9:]


def test_a_span_without_drafts_commits_one_token() -> None:
    span = LogitSpan(make_sampler(VOCAB, temperature=0.0), PROMPT)
    logits = MODEL.batch_logits([span])
    assert verify(logits, [span], OPS, "shared") == [SpanVerdict(0, (int(logits.argmax()),))]


def test_what_follows_a_wrong_draft_is_dropped_even_if_it_is_right() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[[0, 1, 2, 3], [5, 6, 8, 9]] = 3.0
    span = LogitSpan(a_sampler(temperature=0.0), PROMPT, [5, 10, 8])
    assert verify(logits, [span], OPS, "shared") == [SpanVerdict(1, (5, 6))]
