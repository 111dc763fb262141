"""Rejection sampling commits text distributed exactly as p': by enumeration, then by sampling.

The enumeration runs `verify` itself: its coins are scripted so that every outcome is visited, and
each outcome is weighted with the probability `verify` gave it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sampling_tools import CPU, PrefixModel, make_sampler, rest_thorough, with_seed
from scipy import stats
from torch import Tensor

from outrider.kernels.noise import NoiseStream
from outrider.kernels.ops import select_ops
from outrider.kernels.reference import ReferenceOps
from outrider.workers.sampling import verify as verify_module
from outrider.workers.sampling.chain import process
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import (
    SpanVerdict,
    acceptance_probability,
    residual,
    verify,
)
from outrider.workers.selection import Offer, select_drafts

OPS = select_ops(CPU, torch.float32)
PROMPT = (1, 0)
LENGTH = 3
TOLERANCE = 1e-6

PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": dict(),
    "temperature": dict(temperature=0.6),
    "top_k": dict(top_k=2),
    "top_p": dict(top_p=0.75),
    "penalties": dict(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.4),
    "bans": dict(min_tokens=2, logit_bias={2: 1.0}),
    "combined": dict(temperature=1.3, min_p=0.05, top_p=0.95, frequency_penalty=0.7, min_tokens=1),
}


class Policy(NamedTuple):
    """What is drafted. Only `peeks` looks at the drafted token, which is what is forbidden."""

    is_certain: Callable[[tuple[int, ...]], bool]  # from the prefix: n-gram or draft model
    goes_on: Callable[[tuple[int, ...], torch.Tensor], bool]  # from the tokens before, and q there
    most: int
    peeks: bool = False
    num_selected: int | None = None  # of these drafts and those of two other rows
    selects_by_token: bool = False  # forbidden as well: by q of the drafted token


NEIGHBOURS = ((0.7, 0.8), (0.55, 0.6))  # the confidences of other rows' drafts

POLICIES = {
    "draft, depth 1": Policy(lambda prefix: False, lambda before, q: True, 1),
    "draft, depth 2": Policy(lambda prefix: False, lambda before, q: True, 2),
    "draft, depth 3": Policy(lambda prefix: False, lambda before, q: True, 3),
    "n-gram, depth 2": Policy(lambda prefix: True, lambda before, q: True, 2),
    "trimmed by the prefix": Policy(
        lambda prefix: False, lambda before, q: sum(before) % 3 != 0, 3
    ),
    "trimmed by the largest q": Policy(
        lambda prefix: False, lambda before, q: bool(q.max() > 0.5), 3
    ),
    "proposers switching": Policy(
        lambda prefix: sum(prefix) % 2 == 0, lambda before, q: len(before) % 4 != 1, 3
    ),
    "three selected": Policy(lambda prefix: False, lambda before, q: True, 3, num_selected=3),
    "four selected": Policy(
        lambda prefix: sum(prefix) % 2 == 0, lambda before, q: True, 3, num_selected=4
    ),
}


@dataclass(frozen=True)
class RecordingOps(ReferenceOps):
    """Keeps the distributions it was last asked to sample from, and takes the likeliest token."""

    distributions: list[Tensor] = field(default_factory=list)

    def gumbel_argmax(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
    ) -> Tensor:
        self.distributions[:] = scores.double().softmax(-1)
        return scores.argmax(-1)


class Enumeration:
    """All that can be committed after PROMPT, with its probability."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, sampler: RowSampler, policy: Policy
    ) -> None:
        self.sampler, self.policy = sampler, policy
        self.target = PrefixModel(sampler.vocab_size, spread=1.2)
        self.draft = PrefixModel(sampler.vocab_size, "draft", spread=1.2)
        self.ops = RecordingOps()
        self.num_rejections = 0
        self.num_verified: set[int] = set()

        def record(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
            self.accept = acceptance_probability(p, q, tokens)
            return self.accept

        monkeypatch.setattr(verify_module, "acceptance_probability", record)
        monkeypatch.setattr(verify_module, "uniform", lambda *_: self.coins)

    def drafts(self, prefix: tuple[int, ...]) -> list[tuple[float, LogitSpan]]:
        """Every sequence that may be drafted after `prefix`, with its probability."""
        is_certain = self.policy.is_certain(prefix)
        found: list[tuple[float, LogitSpan]] = []
        sure: tuple[float, ...] = ()
        open_ends = [(1.0, LogitSpan(self.sampler, prefix), sure)]
        while open_ends:
            befores = [prefix + tuple(span.drafts) for _, span, _ in open_ends]
            logits = torch.from_numpy(np.stack([self.draft(before) for before in befores]))
            step = draft_sample(logits, [span for _, span, _ in open_ends], self.ops, "rejection")
            assert step.q is not None
            longer = []
            parts = zip(open_ends, befores, step.q, step.confidence.tolist(), strict=True)
            for (weight, span, sure), before, q, confidence in parts:
                if len(span.drafts) == self.policy.most or not self.policy.goes_on(before, q):
                    found.append((weight, self.selected(span, sure)))
                    continue
                if is_certain:
                    q = torch.eye(len(q))[sum(before) % len(q)]
                    confidence = 0.5
                for token in q.nonzero().flatten().tolist():
                    chance = weight * float(q[token])
                    if self.policy.peeks and token == 0:
                        found.append((chance, span))
                        continue
                    if self.policy.selects_by_token:
                        confidence = float(q[token])
                    qs = [q.unsqueeze(0)] if span.draft_q is None else [span.draft_q, q[None]]
                    draft_q = None if is_certain else torch.cat(qs)
                    drafts = (*span.drafts, token)
                    longer_span = LogitSpan(self.sampler, prefix, drafts, draft_q)
                    longer.append((chance, longer_span, (*sure, confidence)))
            open_ends = longer
        return found

    def selected(self, span: LogitSpan, confidences: tuple[float, ...]) -> LogitSpan:
        """What is verified of it beside the neighbours' drafts."""
        neighbours = [Offer(each, len(each)) for each in NEIGHBOURS]
        offers = [neighbours[0], Offer(confidences, len(confidences)), neighbours[1]]
        _, count, _ = select_drafts(offers, self.policy.num_selected)
        self.num_verified.add(count)
        q = None if span.draft_q is None else span.draft_q[:count]
        return LogitSpan(span.sampler, span.tokens, span.drafts[:count], q)

    def outcomes(self, prefix: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """What one round commits after `prefix`, with its probability."""
        found = []
        drafted = self.drafts(prefix)
        for num_accepted in range(self.policy.most + 1):
            members = [m for m in drafted if len(m[1].drafts) >= num_accepted]
            if not members:
                continue
            spans = [span for _, span in members]
            places = [j for span in spans for j in range(len(span.drafts))]
            # 0 accepts whatever can be accepted, 1 accepts nothing.
            self.coins = torch.tensor([0.0 if j < num_accepted else 1.0 for j in places]).double()
            verdicts = verify(self.target.batch_logits(spans), spans, self.ops, "rejection")
            accept = iter(self.accept.tolist() if places else [])
            for i, (weight, span) in enumerate(members):
                chances = list(itertools.islice(accept, len(span.drafts)))
                weight *= float(np.prod(chances[:num_accepted]))
                if num_accepted < len(span.drafts):
                    weight *= 1 - chances[num_accepted]
                    self.num_rejections += 1
                if weight == 0:
                    continue
                assert verdicts[i].num_accepted == num_accepted
                for token, chance in enumerate(self.ops.distributions[i].tolist()):
                    tokens = (*verdicts[i].tokens[:-1], token)
                    found.append((weight * chance, tokens))
        return found

    def committed(self) -> dict[tuple[int, ...], float]:
        """The distribution of the first LENGTH tokens after PROMPT."""
        total: dict[tuple[int, ...], float] = defaultdict(float)
        open_ends: dict[tuple[int, ...], float] = {(): 1.0}
        while open_ends:
            following: dict[tuple[int, ...], float] = defaultdict(float)
            for text, weight in open_ends.items():
                for chance, tokens in self.outcomes(PROMPT + text):
                    longer = (*text, *tokens)
                    store = total if len(longer) >= LENGTH else following
                    store[longer[:LENGTH]] += weight * chance
            open_ends = following
        return total

    def expected(self) -> dict[tuple[int, ...], float]:
        """The same by plain sampling from p'."""
        total = {}
        for text in itertools.product(range(self.sampler.vocab_size), repeat=LENGTH):
            weight = 1.0
            for i, token in enumerate(text):
                prefix = PROMPT + text[:i]
                logits = torch.from_numpy(self.target(prefix)).unsqueeze(0)
                scores = process(logits, [LogitSpan(self.sampler, prefix)])
                weight *= float(scores[0].double().softmax(-1)[token])
            total[text] = weight
        return total

    def largest_error(self) -> float:
        committed, expected = self.committed(), self.expected()
        assert sum(committed.values()) == pytest.approx(1.0, abs=TOLERANCE)
        return max(abs(committed.get(text, 0.0) - chance) for text, chance in expected.items())


def a_sampler(vocab_size: int, **params: Any) -> RowSampler:
    bad_words = [(2, 1)] if "min_tokens" in params else []
    return make_sampler(vocab_size, 0, len(PROMPT), [0], bad_words, **params)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", rest_thorough(PARAMETERS, fast="combined"))
def test_the_committed_distribution_is_exactly_that_of_the_target(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: str
) -> None:
    run = Enumeration(monkeypatch, a_sampler(3, **PARAMETERS[name]), POLICIES[policy])
    assert run.largest_error() < TOLERANCE
    assert run.num_rejections > 0


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["draft, depth 3", "proposers switching"])
def test_the_committed_distribution_is_exact_on_a_larger_vocabulary(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    sampler = a_sampler(4, **PARAMETERS["combined"])
    assert Enumeration(monkeypatch, sampler, POLICIES[policy]).largest_error() < TOLERANCE


def test_trimming_by_the_drafted_token_would_bias_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration does see a violation of the one rule this mode has."""
    peeking = Policy(lambda prefix: False, lambda before, q: True, 2, peeks=True)
    assert Enumeration(monkeypatch, a_sampler(3), peeking).largest_error() > 1e-3


def test_selecting_by_the_drafted_token_would_bias_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peeking = POLICIES["three selected"]._replace(selects_by_token=True)
    assert Enumeration(monkeypatch, a_sampler(3), peeking).largest_error() > 1e-3


@pytest.mark.parametrize("policy", ["three selected", "four selected"])
def test_the_enumeration_sees_rows_of_which_some_drafts_are_selected(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    run = Enumeration(monkeypatch, a_sampler(3), POLICIES[policy])
    run.committed()
    assert len(run.num_verified) > 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["nothing", "combined"])
def test_many_seeds_sample_the_targets_distribution_end_to_end(name: str) -> None:
    vocab_size, num_seeds = 4, 20_000
    base = a_sampler(vocab_size, **PARAMETERS[name])
    target = PrefixModel(vocab_size, spread=1.2)
    draft = PrefixModel(vocab_size, "draft", spread=1.2)
    spans = [LogitSpan(with_seed(base, seed), PROMPT) for seed in range(num_seeds)]
    for _ in range(2):
        logits = np.stack([draft((*PROMPT, *span.drafts)) for span in spans])
        step = draft_sample(torch.from_numpy(logits), spans, OPS, "rejection")
        assert step.q is not None
        for span, token, q in zip(spans, step.tokens.tolist(), step.q.unsqueeze(1), strict=True):
            span.drafts = (*span.drafts, token)
            span.draft_q = q if span.draft_q is None else torch.cat((span.draft_q, q))
    verdicts = verify(target.batch_logits(spans), spans, OPS, "rejection")
    texts = [verdict.tokens for verdict in verdicts]
    short = [i for i, text in enumerate(texts) if len(text) < 2]
    assert 0 < len(short) < num_seeds
    more = [LogitSpan(spans[i].sampler, (*PROMPT, *texts[i])) for i in short]
    for i, verdict in zip(
        short, verify(target.batch_logits(more), more, OPS, "rejection"), strict=True
    ):
        texts[i] = (*texts[i], *verdict.tokens)

    counts = np.zeros((vocab_size, vocab_size))
    for first, second, *_ in texts:
        counts[first, second] += 1
    chances = np.zeros_like(counts)
    for first in range(vocab_size):
        rows = [target(PROMPT), target((*PROMPT, first))]
        pair = [LogitSpan(base, PROMPT), LogitSpan(base, (*PROMPT, first))]
        p = process(torch.from_numpy(np.stack(rows)), pair).double().softmax(-1).numpy()
        chances[first] = p[0, first] * p[1]
    possible = chances > 0
    assert counts[~possible].sum() == 0
    result = stats.chisquare(counts[possible], chances[possible] * num_seeds, sum_check=False)
    assert result.pvalue > 1e-4


def random_distributions(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


def test_acceptance_is_the_capped_ratio() -> None:
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.4, 0.1, 0.5])
    chances = [float(acceptance_probability(p, q, torch.tensor(t))) for t in range(3)]
    assert chances == pytest.approx([0.5, 1.0, 0.6])


def test_a_draft_the_target_rules_out_never_stands() -> None:
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([0.9, 0.1])
    assert float(acceptance_probability(p, q, torch.tensor(0))) == 0.0


def test_the_residual_is_what_p_has_beyond_q() -> None:
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.4, 0.1, 0.5])
    assert residual(p, q).tolist() == [0.0, 1.0, 0.0]


def test_the_residual_of_equal_distributions_is_p() -> None:
    p = random_distributions(5)
    assert torch.equal(residual(p, p.clone()), p.double())


def test_greedy_rows_compare_with_the_argmax() -> None:
    logits = torch.zeros(3, 4)
    logits[[0, 1, 2], [3, 1, 2]] = 2.0
    span = LogitSpan(make_sampler(4, temperature=0.0), [0], [3, 2])
    assert verify(logits, [span], OPS, "rejection") == [SpanVerdict(1, (3, 1))]


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    model = PrefixModel(6)
    spans = []
    for seed in range(30):
        sampler = make_sampler(6, seed, temperature=0.0 if seed % 3 == 0 else 0.9)
        drafts = [seed % 6, seed % 5][: seed % 4]
        q = None if seed % 2 else random_distributions(len(drafts), 6)
        spans.append(LogitSpan(sampler, [seed, 1], drafts, q))
    together = verify(model.batch_logits(spans), spans, OPS, "rejection")
    alone = [verify(model.batch_logits([s]), [s], OPS, "rejection")[0] for s in spans]
    assert together == alone
    assert len({verdict.num_accepted for verdict in together}) > 1


def test_each_decision_draws_from_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Ops(ReferenceOps):
        def gumbel_argmax(
            self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
        ) -> Tensor:
            seen.append((streams.tolist(), positions.tolist()))
            return scores.argmax(-1)

    def uniform(seeds: Tensor, streams: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
        seen.append((streams.tolist(), positions.tolist()))
        return torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)

    monkeypatch.setattr(verify_module, "uniform", uniform)
    q = random_distributions(2, 4)
    spans = [
        LogitSpan(make_sampler(4), [0, 1, 2], [1, 2], q),
        LogitSpan(make_sampler(4), [0], [3], q[:1]),
    ]
    verify(torch.zeros(5, 4), spans, Ops(), "rejection")
    assert seen == [
        ([NoiseStream.ACCEPT] * 3, [3, 4, 1]),
        ([NoiseStream.RESIDUAL, NoiseStream.SHARED], [4, 2]),
    ]


def test_a_narrower_q_is_padded_with_zeros() -> None:
    sampler = make_sampler(6, allowed_token_ids=[4, 5])
    span = LogitSpan(sampler, [0], [1], random_distributions(1, 4))
    verdict = verify(torch.zeros(2, 6), [span], OPS, "rejection")[0]
    assert verdict.num_accepted == 0
    assert verdict.tokens[0] in (4, 5)
