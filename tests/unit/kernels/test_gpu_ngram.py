"""Prompt lookup on the device offers what the host's would, round after round."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS
from torch import Tensor

from outrider.catalog.proposers import NGRAM
from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.columns import EntryColumn, TotalColumn
from outrider.kernels.gpu.ngram import TrustTable, look_up
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import (
    IN_PROCESS,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Verdict,
)
from outrider.workers.proposers.ngram import NgramIndex, NgramProposer
from outrider.workers.rows import RowTable

pytestmark = GPU_MARKS

MAX_DEPTH = 5


class Device:
    """The tables that a lookup reads and writes."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.text = TextTable.create(num_rows, max_len, MAX_DEPTH, DEVICE)
        self.trust = TrustTable.create(num_rows, DEVICE)
        self.confidences = torch.full((num_rows, MAX_DEPTH), -1.0, device=DEVICE)

    def write(self, row: int, tokens: list[int]) -> None:
        self.text.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.text.lengths[row] = len(tokens)

    def look_up(self, depths: dict[int, int], min_n: int, max_n: int, room: int = 0) -> None:
        """`room` is for more entries than there are."""
        entries = torch.full((EntryColumn.SIZE, len(depths) + room), -1, dtype=torch.int32)
        entries[EntryColumn.ROW, : len(depths)] = torch.tensor(list(depths))
        entries[EntryColumn.DEPTH, : len(depths)] = torch.tensor(list(depths.values()))
        totals = torch.zeros(TotalColumn.SIZE, dtype=torch.int32)
        totals[TotalColumn.ENTRIES] = len(depths)
        look_up(
            entries.to(DEVICE),
            totals.to(DEVICE),
            self.text,
            self.trust,
            self.confidences,
            min_n,
            max_n,
        )

    def offer(self, row: int) -> tuple[list[int], list[float]]:
        count = int(self.trust.offered[row])
        return self.text.drafts[row, :count].tolist(), self.confidences[row, :count].tolist()


class Host:
    """The proposer over rows of one step each."""

    def __init__(self, num_rows: int, min_n: int, max_n: int) -> None:
        self.rows = RowTable(num_rows)
        self.proposer = NgramProposer(self.rows, min_n, max_n)
        self.step = 0

    def begin(self, texts: dict[int, list[int]]) -> None:
        self.step += 1
        admitted = tuple(
            RowInit(
                row,
                0,
                SampleId(IN_PROCESS, row),
                tuple(tokens),
                len(tokens),
                SamplingParams(),
                seed=0,
            )
            for row, tokens in texts.items()
        )
        self.proposer.follow(StepPlan(0, self.step, (), admitted))

    def offers(self, depths: dict[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        self.step += 1
        rows = tuple(
            RowPlan(row, 0, 1, depth, depth, True, NGRAM, 0, (), 0, (), 0)
            for row, depth in depths.items()
        )
        proposals = self.proposer.propose(StepPlan(0, self.step, rows))
        return {row: (list(p.tokens), list(p.confidences)) for row, p in proposals.items()}

    def observe(self, rows: list[RowVerdict]) -> None:
        self.proposer.observe(Verdict(0, self.step, tuple(rows)))


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4)])
def test_offers_are_the_hosts_round_after_round(min_n: int, max_n: int) -> None:
    """Texts of few different tokens that repeat themselves for a while, and rounds without drafts
    in between."""
    rng = random.Random(max_n)
    num_rows, num_rounds = 4, 12
    device, host = Device(num_rows, 400), Host(num_rows, min_n, max_n)
    texts = {row: [rng.randrange(4) for _ in range(1 + 9 * row)] for row in range(num_rows)}
    host.begin(texts)
    for row, tokens in texts.items():
        device.write(row, tokens)
    num_offered = num_stood = 0
    for _ in range(num_rounds):
        depths = {row: rng.randrange(1, MAX_DEPTH + 1) for row in texts if rng.random() < 0.8}
        device.look_up(depths, min_n, max_n, room=2)
        offers = host.offers(depths)
        verdicts = []
        for row, tokens in texts.items():
            own, sure = device.offer(row) if row in depths else ([], [])
            expected, expected_sure = offers.get(row, ([], []))
            assert own == expected
            assert sure == pytest.approx(expected_sure)
            accepted = 0
            while accepted < len(own) and rng.random() < 0.7:
                accepted += 1
            wrong = (own[accepted] + 1) % 4 if accepted < len(own) else rng.randrange(4)
            new = (*own[:accepted], wrong)
            verdicts.append(RowVerdict(row, 0, len(tokens), len(own), len(own), accepted, new))
            tokens += new
            device.write(row, tokens)
            num_offered += len(own)
            num_stood += accepted
        host.observe(verdicts)
    assert 0 < num_stood < num_offered


@pytest.mark.parametrize("length", [1, 2, 1024, 1025, 2600])
def test_long_texts_are_looked_through_to_their_beginning(length: int) -> None:
    """What was seen last comes first, but what agrees further comes before that."""
    rng = random.Random(length)
    device = Device(3, 2600)
    texts = [
        [rng.randrange(8) for _ in range(length)],
        [7, *range(100, 98 + length), 7][-length:],  # only its very first token is found
        [5, 6, 1, *[9] * (length - 8), 6, 4, 3, 5, 6][-length:],
    ]
    for row, tokens in enumerate(texts):
        device.write(row, tokens)
        device.trust.trust[row] = MAX_DEPTH
    device.look_up(dict.fromkeys(range(3), MAX_DEPTH), 1, 2)
    for row, tokens in enumerate(texts):
        index = NgramIndex(1, 2)
        index.extend(tokens)
        assert device.offer(row)[0] == index.lookup(tokens, MAX_DEPTH)[0]


def test_what_is_not_offered_is_a_token_with_confidence_zero() -> None:
    """The pass computes it all the same, so it has to be one that the models know."""
    device = Device(2, 50)
    device.write(0, [1, 2, 3, 4])
    device.write(1, [8, 9, 8])
    device.look_up({0: 3, 1: 3}, 1, 3)
    assert device.text.drafts.tolist() == [[4] * MAX_DEPTH, [9, 8, 8, 8, 8]]
    assert device.confidences.tolist() == [[0.0] * MAX_DEPTH, [0.5, 0.0, 0.0, 0.0, 0.0]]


def test_a_row_keeps_nothing_of_who_had_it_before() -> None:
    device = Device(1, 50)
    for _ in range(2):
        device.trust.begin(0)
        tokens = [1, 2] * 3
        for expected in (1, 2, 4):
            device.write(0, tokens)
            device.look_up({0: 4}, 1, 2)
            own, _ = device.offer(0)
            assert len(own) == expected
            tokens += [*own, 1 + len(tokens + own) % 2]


def test_padding_changes_no_row() -> None:
    device = Device(2, 50)
    before = _all_of(device)
    device.look_up({}, 1, 2, room=3)
    assert all(torch.equal(*pair) for pair in zip(before, _all_of(device), strict=True))


def _all_of(device: Device) -> list[Tensor]:
    trust = device.trust
    tensors = (device.text.drafts, device.confidences, trust.trust, trust.offered, trust.base_len)
    return [each.clone() for each in tensors]
