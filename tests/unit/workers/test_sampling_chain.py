"""Each sampling parameter against a slow reference, and what the scores may not depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_tools import make_sampler

from outrider.workers.sampling import filters
from outrider.workers.sampling.chain import process
from outrider.workers.sampling.rows import LogitSpan

VOCAB = 40
PROMPT = [3, 9, 9, 17, 4]
OUTPUT = [5, 6, 9, 5, 5, 21]
STOP_IDS = (0, 7)
BAD_WORDS = ((11,), (5, 21, 30), (21, 31), (9, 17, 33))

PARAMETERS: dict[str, dict[str, Any]] = {
    "bias": dict(logit_bias={2: 3.5, 5: -100.0, 39: 100.0}),
    "presence": dict(presence_penalty=1.3),
    "frequency": dict(frequency_penalty=-0.7),
    "repetition": dict(repetition_penalty=1.7),
    "repetition under 1": dict(repetition_penalty=0.6),
    "allowed": dict(allowed_token_ids=[1, 5, 7, 30]),
    "min_tokens": dict(min_tokens=9),
    "temperature": dict(temperature=0.37),
    "high temperature": dict(temperature=3.0),
    "min_p": dict(min_p=0.15),
    "top_k": dict(top_k=6),
    "top_p": dict(top_p=0.6),
    "everything": dict(
        logit_bias={5: 2.0},
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        allowed_token_ids=list(range(0, 36)),
        min_tokens=9,
        temperature=1.4,
        min_p=0.01,
        top_k=12,
        top_p=0.85,
    ),
}


def reference_scores(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    bad_words: Sequence[Sequence[int]] = BAD_WORDS,
    **params: Any,
) -> list[float]:
    """The chain in plain loops and double precision, one row."""
    scores = [float(x) for x in logits]
    for token, bias in params.get("logit_bias", {}).items():
        scores[token] += bias
    for token in set(prompt) | set(output):
        factor = params.get("repetition_penalty", 1.0)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= list(output).count(token) * params.get("frequency_penalty", 0.0)
        scores[token] -= params.get("presence_penalty", 0.0)
    allowed = params.get("allowed_token_ids", range(len(scores)))
    for token in range(len(scores)):
        banned = token not in allowed
        banned |= len(output) < params.get("min_tokens", 0) and token in STOP_IDS
        for word in bad_words:
            start = len(output) - len(word) + 1
            completes = start >= 0 and list(output[start:]) == list(word[:-1])
            banned |= completes and token == word[-1]
        if banned:
            scores[token] = -math.inf
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        return scores
    scores = [score / temperature for score in scores]
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    kept = [token for token in range(len(scores)) if weights[token] >= params.get("min_p", 0.0)]
    kept = sorted(kept, key=lambda token: (-scores[token], token))
    kept = kept[: params.get("top_k", 0) or len(kept)]
    if params.get("top_p", 1.0) < 1:
        total = sum(weights[token] for token in kept)
        before = [sum(weights[token] for token in kept[:i]) for i in range(len(kept))]
        kept = [t for t, m in zip(kept, before, strict=True) if m < params["top_p"] * total]
    scores = [scores[token] if token in kept else -math.inf for token in range(len(scores))]
    return scores


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def a_span(drafts: Sequence[int] = (), vocab_size: int = VOCAB, **params: Any) -> LogitSpan:
    sampler = make_sampler(
        vocab_size,
        prompt_len=len(PROMPT),
        stop_ids=STOP_IDS,
        bad_word_ids=BAD_WORDS,
        **params,
    )
    return LogitSpan(sampler, [*PROMPT, *OUTPUT], drafts)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("greedy", [False, True])
def test_scores_match_the_slow_reference_at_every_drafted_position(name: str, greedy: bool) -> None:
    params = PARAMETERS[name] | ({"temperature": 0.0} if greedy else {})
    drafts = [9, 17, 21, 5, 21]
    for seed in range(10):
        logits = random_logits(len(drafts) + 1, VOCAB, seed=seed)
        scores = process(logits, [a_span(drafts, **params)])
        for j, row in enumerate(scores):
            output = [*OUTPUT, *drafts[:j]]
            expected = reference_scores(logits[j].tolist(), PROMPT, output, **params)
            np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-5)


@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.floats(0.0, 1.0),
    repetition=st.floats(0.5, 2.0),
    frequency=st.floats(-2.0, 2.0),
    drafts=st.lists(st.integers(0, VOCAB - 1), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_any_combination_matches_the_slow_reference(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    frequency: float,
    drafts: list[int],
) -> None:
    params: dict[str, Any] = dict(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
    )
    logits = random_logits(len(drafts) + 1, VOCAB, seed=seed)
    row = process(logits, [a_span(drafts, **params)])[-1].double().numpy()
    expected = np.array(reference_scores(logits[-1].tolist(), PROMPT, [*OUTPUT, *drafts], **params))
    # float32 may put one token just across a threshold that doubles put it on the other side of.
    differing = np.isfinite(row) != np.isfinite(expected)
    assert differing.sum() <= 1
    np.testing.assert_allclose(row[~differing], expected[~differing], rtol=1e-4, atol=1e-4)


def test_logits_are_never_modified() -> None:
    logits = random_logits(1, VOCAB)
    before = logits.clone()
    process(logits, [a_span(**PARAMETERS["everything"])])
    assert torch.equal(logits, before)


def test_a_row_without_parameters_keeps_its_logits_bit_for_bit() -> None:
    logits = random_logits(1, VOCAB)
    span = LogitSpan(make_sampler(VOCAB), [1, 2])
    assert torch.equal(process(logits, [span]), logits)


@pytest.mark.parametrize("vocab_size", [37, 1_000, 49_152])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(vocab_size: int) -> None:
    spans = [
        a_span([9, 17], vocab_size, **params)
        for params in PARAMETERS.values()
        if max(params.get("logit_bias", {0: 0})) < vocab_size
    ]
    if vocab_size > 1_000:
        spans = spans[-4:]
    logits = random_logits(sum(span.num_rows for span in spans), vocab_size)
    together = process(logits, spans)
    first = 0
    for span in spans:
        rows = slice(first, first + span.num_rows)
        assert torch.equal(process(logits[rows].clone(), [span]), together[rows])
        first += span.num_rows


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_position_reached_by_drafts_has_the_scores_of_plain_decoding(name: str) -> None:
    drafts = [9, 17, 21, 5]
    span = a_span(drafts, **PARAMETERS[name])
    logits = random_logits(len(drafts) + 1, VOCAB)
    drafted = process(logits, [span])
    for j in range(len(drafts) + 1):
        plain = LogitSpan(span.sampler, [*PROMPT, *OUTPUT, *drafts[:j]])
        assert torch.equal(process(logits[j : j + 1].clone(), [plain])[0], drafted[j])


@pytest.mark.parametrize("flatness", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "params", [dict(top_p=0.95), dict(top_p=0.99, min_p=0.001), dict(min_p=0.2)]
)
def test_the_number_of_candidates_tried_first_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, flatness: float, params: dict[str, Any]
) -> None:
    logits = random_logits(3, 20_000) * flatness
    spans = [LogitSpan(make_sampler(20_000, **params), [1]) for _ in range(3)]
    expected = process(logits, spans)
    assert bool((expected > -math.inf).any(-1).all())
    for least in (2, 700, 20_000):
        monkeypatch.setattr(filters, "_MIN_CANDIDATES", least)
        assert torch.equal(process(logits, spans), expected)


def kept_ids(logits: Sequence[float], **params: Any) -> list[int]:
    scores = process(torch.tensor([logits]), [LogitSpan(make_sampler(len(logits), **params), [0])])
    return (scores[0] > -math.inf).nonzero().flatten().tolist()


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals() -> None:
    assert kept_ids([1.0, 2.0, 2.0, 0.0, 2.0, 3.0], top_k=3) == [1, 2, 5]


def test_top_k_on_a_flat_row_keeps_the_first_k() -> None:
    assert kept_ids([0.5] * 3_000, top_k=4) == [0, 1, 2, 3]


def test_top_k_beyond_the_candidates_keeps_the_lowest_ids_too() -> None:
    logits = [1.0] * 3_000 + [2.0] * 3_000
    assert kept_ids(logits, top_k=5_000) == [*range(2_000), *range(3_000, 6_000)]


def test_top_p_takes_the_lowest_ids_among_equals() -> None:
    assert kept_ids([0.0] * 1_000, top_p=0.01) == list(range(10))


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = [math.log(p) for p in probabilities]
    assert kept_ids(logits, top_p=0.49) == [0]
    assert kept_ids(logits, top_p=0.51) == [0, 1]
    assert kept_ids(logits, top_p=0.81) == [0, 1, 2]


def test_top_p_counts_the_mass_left_by_top_k_and_min_p() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept_ids(logits, top_p=0.55) == [0, 1]
    assert kept_ids(logits, top_p=0.55, top_k=2) == [0]
    assert kept_ids(logits, top_p=0.55, min_p=0.6) == [0]


def test_top_k_of_the_vocabulary_size_or_more_is_off() -> None:
    assert kept_ids([0.0, 1.0, 2.0], top_k=3) == [0, 1, 2]
    assert kept_ids([0.0, 1.0, 2.0], top_k=1_000) == [0, 1, 2]


def test_min_p_of_one_keeps_every_token_as_likely_as_the_best() -> None:
    assert kept_ids([1.0, 3.0, 2.0, 3.0], min_p=1.0) == [1, 3]


def test_filters_never_bring_back_a_banned_token() -> None:
    span = a_span(allowed_token_ids=[1, 2], top_k=10, top_p=0.999)
    scores = process(random_logits(1, VOCAB), [span])
    assert (scores[0] > -math.inf).nonzero().flatten().tolist() == [1, 2]


def test_bad_words_match_output_and_not_the_prompt() -> None:
    sampler = make_sampler(VOCAB, prompt_len=2, bad_word_ids=[(1, 2, 3)])
    logits = random_logits(1, VOCAB)
    assert process(logits, [LogitSpan(sampler, [1, 2])])[0, 3] == logits[0, 3]
    assert process(logits, [LogitSpan(sampler, [8, 1, 2])])[0, 3] == logits[0, 3]
    assert process(logits, [LogitSpan(sampler, [8, 8, 1, 2])])[0, 3] == -math.inf


def test_min_tokens_lifts_its_ban_in_the_middle_of_the_drafts() -> None:
    sampler = make_sampler(VOCAB, prompt_len=1, stop_ids=[7], min_tokens=2)
    scores = process(random_logits(4, VOCAB), [LogitSpan(sampler, [5], [1, 2, 3])])
    assert (scores[:, 7] == -math.inf).tolist() == [True, True, False, False]


def test_bans_that_would_leave_nothing_are_dropped() -> None:
    sampler = make_sampler(VOCAB, stop_ids=[7], min_tokens=5, allowed_token_ids=[7])
    scores = process(random_logits(1, VOCAB), [LogitSpan(sampler, [1])])
    assert (scores[0] > -math.inf).nonzero().flatten().tolist() == [7]


def test_ids_beyond_a_smaller_vocabulary_are_left_out() -> None:
    sampler = make_sampler(
        10,
        stop_ids=[12],
        bad_word_ids=[(11,)],
        min_tokens=9,
        logit_bias={10: 5.0, 3: 1.0},
        allowed_token_ids=[3, 11],
        repetition_penalty=2.0,
    )
    logits = random_logits(2, 10).abs()
    scores = process(logits, [LogitSpan(sampler, [3, 15], [15])])
    assert torch.equal(scores[:, 3], (logits[:, 3] + 1.0) / 2.0)


def test_a_vocabulary_without_any_allowed_id_leaves_nothing_to_choose() -> None:
    assert not make_sampler(10, allowed_token_ids=[10, 99]).can_choose
    assert make_sampler(10, allowed_token_ids=[9, 99]).can_choose
    assert make_sampler(10).can_choose


def test_tokens_may_be_given_as_a_buffer() -> None:
    span = a_span([9], repetition_penalty=1.5, frequency_penalty=0.2)
    tokens, drafts = cast("list[Sequence[int]]", [np.array(span.tokens), np.array([9])])
    buffered = LogitSpan(span.sampler, tokens, drafts)
    logits = random_logits(2, VOCAB)
    assert torch.equal(process(logits, [buffered]), process(logits, [span]))


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = random_logits(1, VOCAB).bfloat16()
    scores = process(logits, [a_span(temperature=0.7)])
    assert torch.equal(scores, process(logits.float(), [a_span(temperature=0.7)]))
