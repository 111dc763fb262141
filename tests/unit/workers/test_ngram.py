"""Prompt lookup says what it would have offered of tokens that were decoded without it."""

from __future__ import annotations

import random

import pytest

from outrider.catalog.proposers import DRAFT, NGRAM
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import (
    IN_PROCESS,
    Agreement,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)
from outrider.workers.proposers.ngram import NgramIndex, NgramProposer
from outrider.workers.rows import RowTable

REPEATING = [1, 2, 3, 4] * 8


class Decoding:
    """One row, token by token, of which some are decoded plainly."""

    def __init__(self, prompt: list[int], proposer: str = NGRAM) -> None:
        self.rows = RowTable(1)
        self.proposer = NgramProposer(self.rows, 1, 4)
        self.step = 1
        sample = SampleId(IN_PROCESS, 0)
        init = RowInit(
            0, 0, sample, tuple(prompt), len(prompt), SamplingParams(), 0, proposer=proposer
        )
        self.proposer.follow(StepPlan(0, self.step, (), (init,)))
        self.found: list[Agreement] = []

    def decode(self, token: int) -> None:
        base_len = len(self.rows[0].tokens)
        row = RowVerdict(0, 0, base_len, 0, 0, 0, (token,), (), ())
        self.proposer.observe(Verdict(0, self.step, (row,), 0.0, 0.0))
        self.step += 1
        self.proposer.follow(StepPlan(0, self.step, ()))
        self.found += self.proposer.take_agreements()

    def offer(self) -> list[int]:
        plan = RowPlan(0, 0, 1, 4, 4, True, NGRAM, 0, (), 0, (), 0)
        offered = self.proposer.propose(StepPlan(0, self.step, (plan,)))
        return list(offered[0].tokens) if offered else []


def test_a_text_that_begins_to_repeat_is_told_after_two_tokens() -> None:
    decoding = Decoding([9, *REPEATING])
    for token in (1, 2):
        assert decoding.found == []
        decoding.decode(token)
    assert decoding.found == [Agreement(0, 0, (True, True))]


def test_wrong_guesses_are_told_in_bunches_and_tokens_without_one_not_at_all() -> None:
    decoding = Decoding([1, 2])
    for token in range(100, 200):
        decoding.decode(token)
    assert decoding.found == [], "nothing was ever known of what follows"
    for token in range(200, 217):
        decoding.decode(1)  # behind which there was something else each time
        decoding.decode(token)
    assert decoding.found == [Agreement(0, 0, (False,) * 16)]


@pytest.mark.parametrize("seed", range(4))
def test_what_it_foresees_is_what_it_would_have_offered(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(6) for _ in range(12)]
    plain, asked = Decoding(prompt), Decoding(prompt)
    expected: list[bool] = []
    for _ in range(300):
        token = rng.randrange(6)
        offered = asked.offer()
        if offered:
            expected.append(offered[0] == token)
        asked.decode(token)
        plain.decode(token)
    told = [hit for each in plain.found for hit in each.hits]
    assert len(told) > 250 and told == expected[: len(told)]


def test_rows_of_others_are_not_looked_up() -> None:
    decoding = Decoding([9, *REPEATING], proposer=DRAFT)
    for token in (1, 2, 3, 4):
        decoding.decode(token)
    assert decoding.found == []


def test_an_index_of_the_beginning_of_a_text_says_what_that_of_the_beginning_alone_does() -> None:
    tokens = [*REPEATING, 7, 1, 2]
    for length in range(1, len(tokens)):
        part, whole = NgramIndex(1, 4), NgramIndex(1, 4)
        part.extend(tokens[:length])
        whole.extend(tokens, length)
        offered, size = part.lookup(tokens[:length], 1)
        assert whole.next_after(tokens, length) == (offered[0] if size else None)
