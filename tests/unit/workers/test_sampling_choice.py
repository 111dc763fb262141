"""The plain sampler: its distribution over many seeds, its fast paths, and the draft's step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling_tools import CPU, make_sampler, rest_thorough, with_seed
from scipy import stats

from outrider.kernels.noise import NoiseStream
from outrider.kernels.ops import select_ops
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.types import Ops
from outrider.workers.sampling.chain import process
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.draw import argmax
from outrider.workers.sampling.rows import LogitSpan

VOCAB = 12
NUM_SEEDS = 100_000
LEAST_P_VALUE = 1e-4
TOKENS = [1, 2, 2, 5, 1, 3]
OPS = select_ops(CPU, torch.float32)

PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": dict(),
    "temperature": dict(temperature=0.6),
    "top_k": dict(top_k=5),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.1),
    "presence": dict(presence_penalty=1.1),
    "frequency": dict(frequency_penalty=0.8),
    "repetition": dict(repetition_penalty=1.8),
    "bias": dict(logit_bias={4: 1.5, 0: -2.0}),
    "allowed": dict(allowed_token_ids=[0, 3, 4, 9]),
    "bad_words": dict(bad_words=["x"]),
    "min_tokens": dict(min_tokens=10),
    "combined": dict(temperature=1.3, top_k=8, top_p=0.9, min_p=0.02, frequency_penalty=0.5),
}


def fixed_logits() -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    return float(stats.chisquare(counts[possible], expected, sum_check=False).pvalue)


def probabilities_of(span: LogitSpan) -> np.ndarray:
    return process(fixed_logits(), [span])[0].double().softmax(-1).numpy()


def a_span(**params: Any) -> LogitSpan:
    bad_words = [(3, 6), (8,)] if "bad_words" in params else []
    sampler = make_sampler(VOCAB, 0, 2, stop_ids=[7, 9], bad_word_ids=bad_words, **params)
    return LogitSpan(sampler, TOKENS)


@pytest.mark.parametrize("name", rest_thorough(PARAMETERS, fast="combined"))
def test_sequential_seeds_sample_the_processed_distribution(name: str) -> None:
    span = a_span(**PARAMETERS[name])
    expected = probabilities_of(span)
    spans = [LogitSpan(with_seed(span.sampler, seed), TOKENS) for seed in range(NUM_SEEDS)]
    tokens = sample(fixed_logits().expand(NUM_SEEDS, -1), spans, OPS)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert p_value(counts, expected) > LEAST_P_VALUE


@pytest.mark.parametrize("ops", [OPS, ReferenceOps()], ids=["selected", "reference"])
@pytest.mark.parametrize("varying", ["seeds at random", "positions"])
def test_other_keys_sample_the_distribution_too(ops: Ops, varying: str) -> None:
    scores = fixed_logits().expand(NUM_SEEDS, -1)
    keys = torch.arange(NUM_SEEDS)
    seeds, positions = torch.full_like(keys, 42), keys
    if varying == "seeds at random":
        seeds = torch.from_numpy(
            np.random.default_rng(0).integers(-(2**63), 2**63, NUM_SEEDS, dtype=np.int64)
        )
        positions = torch.full_like(keys, 5)
    tokens = ops.gumbel_argmax(scores, seeds, torch.zeros_like(keys), positions)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert p_value(counts, scores[0].double().softmax(-1).numpy()) > LEAST_P_VALUE


def test_rare_tokens_come_as_often_as_they_should() -> None:
    probabilities = np.array([0.6, 1e-5, 0.3, 2e-5, 0.05, 1e-5, 0.04991, 5e-5])
    probabilities /= probabilities.sum()
    scores = torch.from_numpy(probabilities).log().float().unsqueeze(0)
    num_draws, chunk = 2_000_000, 500_000
    counts = np.zeros(len(probabilities), dtype=np.int64)
    for first in range(0, num_draws, chunk):
        seeds = torch.arange(first, first + chunk)
        zeros = torch.zeros_like(seeds)
        tokens = OPS.gumbel_argmax(scores.expand(chunk, -1).contiguous(), seeds, zeros, zeros + 9)
        counts += np.bincount(tokens.numpy(), minlength=len(probabilities))
    assert p_value(counts, probabilities) > LEAST_P_VALUE


def test_consecutive_positions_of_one_seed_are_independent() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    num_pairs = 200_000
    scores = torch.from_numpy(probabilities).log().float().expand(num_pairs + 1, -1).contiguous()
    positions = torch.arange(num_pairs + 1)
    zeros = torch.zeros_like(positions)
    tokens = OPS.gumbel_argmax(scores, zeros + 7, zeros, positions).numpy()
    # Pairs that do not overlap, or the chi-square statistic would not be one.
    pairs = np.bincount(tokens[0:-1:2] * 4 + tokens[1::2], minlength=16)
    assert p_value(pairs, np.outer(probabilities, probabilities).ravel()) > LEAST_P_VALUE


def test_a_greedy_row_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    spans = [LogitSpan(make_sampler(4, temperature=0), [0]) for _ in range(2)]
    assert sample(logits, spans, OPS).tolist() == [1, 0]


def test_a_plain_greedy_batch_computes_no_noise() -> None:
    class NoNoise(ReferenceOps):
        def gumbel_argmax(self, *_: Any) -> Any:
            raise AssertionError("noise for a greedy row")

    logits = torch.randn(3, VOCAB)
    spans = [
        LogitSpan(make_sampler(VOCAB, temperature=0), [0], [1]),
        LogitSpan(make_sampler(VOCAB, temperature=0), [0]),
    ]
    assert torch.equal(sample(logits, spans, NoNoise()), logits.argmax(-1))


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    logits = torch.tensor([[1.0, 60000.0, 60001.0]])
    span = LogitSpan(make_sampler(3, temperature=1e-37), [0])
    assert sample(logits, [span], OPS).tolist() == [2]


def test_a_mixed_batch_chooses_for_each_row_what_it_chooses_alone() -> None:
    logits = torch.randn(13 * 2, VOCAB, generator=torch.Generator().manual_seed(1))
    spans = [
        LogitSpan(with_seed(a_span(**params).sampler, seed), TOKENS, [seed % VOCAB])
        for seed, params in enumerate([*PARAMETERS.values()][:-1] + [dict(temperature=0)])
    ]
    together = sample(logits, spans, OPS)
    alone = [sample(logits[2 * i : 2 * i + 2], [span], OPS) for i, span in enumerate(spans)]
    assert torch.equal(together, torch.cat(alone))


def test_a_choice_moves_with_seed_and_position() -> None:
    logits = torch.zeros(1, 1_000)
    choices = {
        int(sample(logits, [LogitSpan(make_sampler(1_000, seed), [0] * length)], OPS)[0])
        for seed in (0, 1, 2**63, 2**64 - 1)
        for length in (1, 2, 3)
    }
    assert len(choices) > 9


@pytest.mark.parametrize("rows", [1, 3])
def test_the_fast_argmax_is_torchs(rows: int) -> None:
    scores = torch.randint(0, 50, (rows, 5_000), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(argmax(scores), scores.argmax(-1))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_draft_with_the_targets_logits_guesses_the_targets_choice(name: str) -> None:
    span = a_span(**PARAMETERS[name])
    drafting = LogitSpan(span.sampler, TOKENS[:-2], TOKENS[-2:])
    step = draft_sample(fixed_logits(), [drafting], OPS, "shared")
    assert step.q is None
    assert step.tokens.tolist() == sample(fixed_logits(), [span], OPS).tolist()
    expected = probabilities_of(span)[int(step.tokens[0])]
    assert float(step.confidence[0]) == pytest.approx(expected, rel=1e-5)


def test_a_greedy_drafts_confidence_is_the_probability_of_its_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    step = draft_sample(logits, [LogitSpan(make_sampler(3, temperature=0), [0])], OPS, "shared")
    total = 1 + math.exp(2) + math.exp(1)
    assert step.tokens.tolist() == [1]
    assert float(step.confidence[0]) == pytest.approx(math.exp(2) / total, rel=1e-6)


def test_rejection_drafts_are_sampled_from_the_q_they_return() -> None:
    num_seeds = 50_000
    sampler = a_span(temperature=0.8, top_k=6).sampler
    spans = [LogitSpan(with_seed(sampler, seed), TOKENS) for seed in range(num_seeds)]
    step = draft_sample(fixed_logits().expand(num_seeds, -1), spans, OPS, "rejection")
    assert step.q is not None
    counts = np.bincount(step.tokens.numpy(), minlength=VOCAB)
    assert p_value(counts, step.q[0].double().numpy()) > LEAST_P_VALUE


def test_rejection_drafts_use_noise_of_their_own() -> None:
    spans = [LogitSpan(with_seed(a_span().sampler, seed), TOKENS) for seed in range(64)]
    logits = fixed_logits().expand(64, -1)
    drafted = draft_sample(logits, spans, OPS, "rejection").tokens
    assert torch.equal(drafted, sample(logits, spans, OPS, NoiseStream.DRAFT))
    assert not torch.equal(drafted, sample(logits, spans, OPS))


def test_rejection_confidence_does_not_depend_on_the_drafted_token() -> None:
    spans = [LogitSpan(with_seed(a_span().sampler, seed), TOKENS) for seed in range(64)]
    step = draft_sample(fixed_logits().expand(64, -1), spans, OPS, "rejection")
    assert len(set(step.tokens.tolist())) > 1
    assert len(set(step.confidence.tolist())) == 1


def test_a_greedy_row_among_rejection_drafts_has_a_one_hot_q() -> None:
    spans = [a_span(temperature=0.0), a_span()]
    step = draft_sample(fixed_logits().expand(2, -1), spans, OPS, "rejection")
    assert step.q is not None
    assert step.q[0].argmax() == step.tokens[0] == fixed_logits().argmax()
    assert sorted(step.q[0].tolist())[-2:] == [0.0, 1.0]
    assert step.q[1].sum() == pytest.approx(1.0)
