"""Log-probabilities of the raw distribution, their ranks and their best tokens."""

from __future__ import annotations

import pytest
import torch

from outrider.workers.sampling.logprobs import token_logprobs


def random_logits(rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3


def test_logprobs_are_those_of_log_softmax() -> None:
    logits = random_logits(5, 1_000)
    expected = torch.log_softmax(logits.double(), -1)
    for i, (token, entry) in enumerate(
        zip([3, 999, 0, 5, 17], token_logprobs(logits, [3, 999, 0, 5, 17], 4), strict=True)
    ):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        assert entry.rank == 1 + int((logits[i] > logits[i, token]).sum())
        best = sorted(range(1_000), key=lambda t: -float(logits[i, t]))[:4]
        assert [t for t, _ in entry.top] == best
        for t, logprob in entry.top:
            assert logprob == pytest.approx(float(expected[i, t]), abs=1e-5)


def test_equals_are_ranked_and_listed_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    entries = [token_logprobs(logits, [token], 2)[0] for token in range(5)]
    assert [entry.rank for entry in entries] == [4, 1, 2, 3, 5]
    assert [token for token, _ in entries[0].top] == [1, 2]


def test_each_row_may_ask_for_another_number() -> None:
    entries = token_logprobs(random_logits(3, 50), [1, 2, 3], [0, 2, 50])
    assert [len(entry.top) for entry in entries] == [0, 2, 50]


def test_no_best_tokens_are_listed_when_none_are_asked_for() -> None:
    entry = token_logprobs(random_logits(1, 50), [7], 0)[0]
    assert entry.top == () and entry.logprob < 0


def test_asking_for_more_than_the_vocabulary_lists_all_of_it() -> None:
    assert len(token_logprobs(random_logits(1, 5), [1], 20)[0].top) == 5


def test_no_rows_give_no_entries() -> None:
    assert token_logprobs(random_logits(0, 5), [], 3) == []


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = random_logits(1, 200).bfloat16()
    expected = float(torch.log_softmax(logits.float(), -1)[0, 9])
    assert token_logprobs(logits, [9], 0)[0].logprob == expected


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = random_logits(4, 49_152)
    together = token_logprobs(logits, [1, 2, 3, 4], 3)
    alone = [token_logprobs(logits[i : i + 1].clone(), [i + 1], 3)[0] for i in range(4)]
    assert together == alone
