"""Sampling over ranks that each hold a part of the vocabulary: the tokens whole rows give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from c_kernels import make_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import ThreadGroup, run_ranks, same_on_all
from sampling_tools import CPU
from torch import Tensor

from outrider.kernels.ops import select_ops
from outrider.kernels.types import Ops
from outrider.scheduler.params import SamplingParams
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.sampling import sharded_filters
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.draft import DraftSample, draft_sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import SpanVerdict, VerificationMode, verify
from outrider.workers.sampling.vocab import VocabPart

OPS = select_ops(CPU, torch.float32)
NEG_INF = float("-inf")
TEXT = [3, 9, 9, 1, 4, 0, 2, 9]
DRAFTS = [2, 4, 9]
PROMPT_LEN = 5
EVEN = (0, 100, 200, 300)


class Case:
    """Requests and their logits, to be sampled on whole rows or over ranks."""

    def __init__(
        self, logits: Tensor, params: Sequence[dict[str, Any]], bounds: tuple[int, ...] = EVEN
    ) -> None:
        self.logits = logits
        self.params = params
        self.bounds = bounds

    @property
    def size(self) -> int:
        return len(self.bounds) - 1

    def spans(self, held: range | None = None, drafts: Sequence[int] = ()) -> list[LogitSpan]:
        vocab_size = self.bounds[-1]
        return [
            LogitSpan(
                RowSampler(
                    *(SamplingParams(**params), seed, PROMPT_LEN, (0, 7), ((11,), (9, 2), (2, 4))),
                    *(vocab_size, CPU, held),
                ),
                TEXT,
                drafts,
            )
            for seed, params in enumerate(self.params)
        ]

    def part(self, group: ThreadGroup) -> tuple[Tensor, VocabPart]:
        vocab = VocabPart(self.bounds, group)
        return self.logits[:, vocab.held.start : vocab.held.stop], vocab

    def sample_whole(self, ops: Ops = OPS) -> list[int]:
        return sample(self.logits, self.spans(), ops).tolist()

    def sample_parts(self, ops: Ops = OPS) -> list[int]:
        return self.sample_and_count(ops)[0]

    def sample_and_count(
        self, ops: Ops = OPS
    ) -> tuple[list[int], list[tuple[str, tuple[int, ...]]]]:
        def work(group: ThreadGroup) -> tuple[list[int], list[tuple[str, tuple[int, ...]]]]:
            logits, vocab = self.part(group)
            return sample(logits, self.spans(vocab.held), ops, vocab=vocab).tolist(), group.calls

        return same_on_all(run_ranks(self.size, work))

    def verify_whole(
        self, mode: VerificationMode, drafts: Sequence[int] = DRAFTS
    ) -> list[SpanVerdict]:
        return verify(self.logits, self.spans(drafts=drafts), OPS, mode)

    def verify_parts(
        self, mode: VerificationMode, drafts: Sequence[int] = DRAFTS
    ) -> list[SpanVerdict]:
        def work(group: ThreadGroup) -> list[SpanVerdict]:
            logits, vocab = self.part(group)
            return verify(logits, self.spans(vocab.held, drafts), OPS, mode, vocab)

        return same_on_all(run_ranks(self.size, work))

    def draft_whole(self, mode: VerificationMode) -> DraftSample:
        return draft_sample(self.logits, self.spans(drafts=DRAFTS), OPS, mode)

    def draft_parts(self, mode: VerificationMode) -> DraftSample:
        def work(group: ThreadGroup) -> DraftSample:
            logits, vocab = self.part(group)
            return draft_sample(logits, self.spans(vocab.held, DRAFTS), OPS, mode, vocab)

        steps = run_ranks(self.size, work)
        same_on_all([step.tokens.tolist() for step in steps])
        same_on_all([step.confidence.tolist() for step in steps])
        return steps[0]


def random_logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.integers(1, 400),
        "top_p": st.floats(0.01, 0.999),
        "min_p": st.floats(0.001, 1.0),
        "presence_penalty": st.just(1.1),
        "frequency_penalty": st.just(-0.6),
        "repetition_penalty": st.sampled_from([0.7, 1.4]),
        "logit_bias": st.dictionaries(st.integers(0, 12), st.floats(-8, 8), min_size=1),
        "allowed_token_ids": st.lists(st.integers(0, 12), min_size=1),
        "min_tokens": st.just(9),
    },
)


@st.composite
def cases(draw: st.DrawFn, num_rows: int = 1) -> Case:
    """Requests of all kinds over 2 to 4 ranks, with ties and tokens that are impossible."""
    vocab_size = draw(st.sampled_from([13, 40, 300, 3000]))
    size = draw(st.integers(2, 4))
    cuts = draw(st.lists(st.integers(0, vocab_size), min_size=size - 1, max_size=size - 1))
    params = draw(st.lists(PARAMETERS, min_size=1, max_size=5))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0]))
    logits = random_logits(len(params) * num_rows, vocab_size, draw(st.integers(0, 10_000)), spread)
    steps = draw(st.sampled_from([None, 2, 8]))  # in a unit of the logits
    if steps is not None:
        logits = (logits * steps).round() / steps
    share = draw(st.sampled_from([0.0, 0.5, 0.97]))
    impossible = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < share
    impossible[:, :13] = False
    return Case(logits.masked_fill(impossible, NEG_INF), params, (0, *sorted(cuts), vocab_size))


@pytest.mark.thorough
@given(case=cases(), backend=st.sampled_from(["c", "torch"]), repeats=st.sampled_from([0, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_every_rank_chooses_what_whole_rows_choose(case: Case, backend: str, repeats: int) -> None:
    ops = make_ops(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_filters, "_MAX_REPEATS", repeats)
        assert case.sample_parts(ops) == case.sample_whole(ops)


@given(case=cases(num_rows=len(DRAFTS) + 1), mode=st.sampled_from(["shared", "rejection"]))
@settings(max_examples=60, deadline=None)
def test_every_rank_reaches_the_verdict_of_whole_rows(case: Case, mode: VerificationMode) -> None:
    assert case.verify_parts(mode) == case.verify_whole(mode)


@given(case=cases(), mode=st.sampled_from(["shared", "rejection"]))
@settings(max_examples=60, deadline=None)
def test_every_rank_drafts_what_whole_rows_draft(case: Case, mode: VerificationMode) -> None:
    whole, parts = case.draft_whole(mode), case.draft_parts(mode)
    assert parts.tokens.tolist() == whole.tokens.tolist()
    torch.testing.assert_close(parts.confidence, whole.confidence, rtol=1e-4, atol=1e-6)
    assert (parts.q is None) == (whole.q is None)
    if whole.q is not None and parts.q is not None:
        assert torch.equal(parts.q, whole.q)


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("top_k", [0, 2, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.9])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 0.7])
def test_every_combination_of_filters_chooses_what_whole_rows_choose(
    spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = dict(top_k=top_k, top_p=top_p, min_p=min_p)
    logits = (random_logits(80, 300, spread=spread) * 4).round() / 4
    case = Case(logits, [params] * 80, (0, 17, 200, 300))
    assert case.sample_parts() == case.sample_whole()


@pytest.mark.parametrize("bounds", [(0, 150, 300), EVEN, (0, 1, 299, 300), (0, 40, 90, 200, 300)])
@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(), dict(top_p=0.7), dict(top_k=3)])
def test_the_winner_may_lie_on_any_rank(bounds: tuple[int, ...], params: dict[str, Any]) -> None:
    for start, stop in pairwise(bounds):
        for token in {start, stop - 1}:
            logits = random_logits(1, 300)
            logits[0, token] = 60.0
            assert Case(logits, [params], bounds).sample_parts() == [token]


def test_equals_on_several_ranks_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [130, 170, 250]] = 5.0
    assert Case(logits, [dict(temperature=0.0)]).sample_parts() == [130]


@pytest.mark.parametrize("params", [dict(top_k=2), dict(top_k=2, top_p=0.99), dict(top_p=0.6)])
def test_equals_at_the_cut_are_kept_by_lowest_id_whichever_rank_holds_them(
    params: dict[str, Any],
) -> None:
    logits = torch.full((200, 300), NEG_INF)
    logits[:, [50, 120, 220, 221]] = 1.0
    case = Case(logits, [params] * 200)
    chosen = case.sample_parts()
    assert chosen == case.sample_whole()
    assert 220 not in chosen or params == dict(top_p=0.6)
    assert 221 not in chosen
    assert len(set(chosen)) > 1


def test_bans_that_only_leave_tokens_of_other_ranks_stand() -> None:
    """Stop ids 0 and 7 are all that the first rank holds of the allowed."""
    params = dict(min_tokens=9, allowed_token_ids=[0, 7, 150], temperature=0.0)
    logits = torch.zeros(1, 300)
    logits[0, [0, 7]] = 5.0
    assert Case(logits, [params]).sample_parts() == [150]


def test_bans_that_would_leave_nothing_on_any_rank_are_dropped() -> None:
    params = dict(min_tokens=9, allowed_token_ids=[0, 7], temperature=0.0)
    logits = torch.zeros(1, 300)
    logits[0, 7] = 5.0
    assert Case(logits, [params]).sample_parts() == [7]


@pytest.mark.parametrize(
    "params", [dict(temperature=0.0), dict(temperature=0.8), dict(repetition_penalty=1.2)]
)
def test_rows_without_filters_take_one_small_exchange(params: dict[str, Any]) -> None:
    _, calls = Case(random_logits(6, 300), [params, dict(temperature=0.0)] * 3).sample_and_count()
    assert calls == [("all_gather", (3, 6))]


@pytest.mark.parametrize("params", [dict(top_p=0.95), dict(top_k=20), dict(min_p=0.1)])
def test_a_winner_that_passes_its_filters_takes_one_exchange_more(params: dict[str, Any]) -> None:
    logits = random_logits(2, 300)
    logits[:, 123] = 40.0
    _, calls = Case(logits, [params, dict()]).sample_and_count()
    assert [operation for operation, _ in calls] == ["all_gather", "all_reduce"]
    assert calls[1][1][1] == 1  # the row without filters has no part


def test_top_k_with_top_p_sends_no_more_than_the_best_of_each_rank() -> None:
    logits = random_logits(1, 300)
    logits[:, 123] = 40.0
    _, calls = Case(logits, [dict(top_k=7, top_p=0.9)]).sample_and_count()
    assert calls == [("all_gather", (4, 1)), ("all_gather", (1, 7)), ("all_reduce", (3, 1))]


def test_rows_are_gathered_only_after_the_last_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_filters, "_MAX_REPEATS", 1)
    logits = torch.zeros(1, 300)
    logits[0, 299] = 0.001
    _, calls = Case(logits, [dict(top_k=1)]).sample_and_count()
    operations = [operation for operation, _ in calls]
    assert operations == ["all_gather", "all_reduce"] * 2 + ["all_gather"]
    assert calls[-1][1] == (1, 100)


def test_a_winner_that_fails_takes_all_behind_it_out_of_the_contest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dropping the winner alone would take hundreds of rounds here."""
    monkeypatch.setattr(sharded_filters, "_MAX_REPEATS", 16)
    case = Case(random_logits(20, 300, spread=0.01), [dict(top_k=1)] * 20)
    chosen, calls = case.sample_and_count()
    assert chosen == case.sample_whole()
    assert calls[-1][0] == "all_reduce"


def test_a_rank_without_any_token_makes_the_others_gather() -> None:
    case = Case(random_logits(3, 300), [dict(), dict(top_p=0.5), dict(temperature=0.0)], (0, 0, 9))
    case.logits = case.logits[:, :9]
    assert case.sample_parts() == case.sample_whole()


def test_the_whole_vocabulary_gathers_nothing() -> None:
    scores = random_logits(2, 30)
    vocab = VocabPart.whole(30)
    assert vocab.gather(scores) is scores
    assert (vocab.size, vocab.held, vocab.is_sharded) == (30, range(30), False)


def test_ids_beyond_the_limit_are_nobodys() -> None:
    ranges = [range(0, 10), range(10, 20), range(20, 30)]
    assert VocabPart.of(ranges, 15, SingleRankGroup()).bounds == (0, 10, 15, 15)


def test_gathered_rows_are_whole_on_every_rank() -> None:
    whole = random_logits(4, 300)

    def work(group: ThreadGroup) -> Tensor:
        vocab = VocabPart((0, 7, 7, 300), group)
        return vocab.gather(whole[:, vocab.held.start : vocab.held.stop])

    assert all(torch.equal(gathered, whole) for gathered in run_ranks(3, work))
