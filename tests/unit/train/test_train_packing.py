"""Packing: whole documents in rows, every record once an epoch, the same order after a restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.train.packing import PackedDataLoader, make_batch, pack_rows
from outrider.train.shards import TrainingRecord


def record(first: int, length: int, begin: int) -> TrainingRecord:
    return TrainingRecord(np.arange(first, first + length), begin, 0)


def test_every_document_lies_whole_in_one_row_and_rows_are_well_filled() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 400).tolist()
    rows = pack_rows(lengths, 128)
    assert sorted(number for row in rows for number in row) == list(range(400))
    assert all(sum(lengths[number] for number in row) <= 128 for row in rows)
    assert sum(lengths) / (128 * len(rows)) > 0.9


def test_what_is_learned_is_the_next_token_within_a_document() -> None:
    batch = make_batch([[record(10, 4, 2), record(20, 3, 1)]], 8, prompt_weight=0.5)
    assert batch.ids.tolist() == [[10, 11, 12, 13, 20, 21, 22, 0]]
    # Of 10..13 the target wrote 12 and 13; place 3 would predict another document's token.
    assert batch.loss_indices.tolist() == [0, 1, 2, 4, 5]
    assert batch.loss_weights.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert batch.loss_positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.documents.cu_seqlens.tolist() == [0, 4, 7, 8]


def test_without_weight_the_tokens_of_prompts_are_not_computed() -> None:
    batch = make_batch([[record(10, 4, 2)]], 4, prompt_weight=0.0)
    assert batch.loss_indices.tolist() == [1, 2]


def test_no_token_sees_another_document_or_what_follows_it() -> None:
    documents = make_batch([[record(10, 3, 0), record(20, 2, 0)]], 5, 0.0).documents
    expected = torch.zeros(5, 5, dtype=torch.bool)
    expected[:3, :3] = torch.ones(3, 3).tril().bool()
    expected[3:, 3:] = torch.ones(2, 2).tril().bool()
    assert torch.equal(documents.mask()[0, 0], expected)
    assert not documents.mask(window=2)[0, 0, 2, 0]


def batches(records: list[TrainingRecord]) -> PackedDataLoader:
    return PackedDataLoader(records, row_length=16, num_rows=2, prompt_weight=0.0, seed=3)


def test_batches_go_on_from_a_saved_position_as_they_would_have() -> None:
    records = [record(number, 3 + number % 7, 1) for number in range(40)]
    whole, cut = batches(records), batches(records)
    for _ in range(11):
        whole.next_batch()
    cut.epoch, cut.index = whole.epoch, whole.index
    assert whole.epoch > 0
    for _ in range(9):
        assert torch.equal(whole.next_batch().ids, cut.next_batch().ids)


def test_an_epoch_takes_no_record_twice() -> None:
    records = [record(100 * number, 5, 1) for number in range(1, 31)]
    source, seen = batches(records), []
    while True:
        batch = source.next_batch()
        if source.epoch > 0:
            break
        seen += [token for token in batch.ids.flatten().tolist() if token and token % 100 == 0]
    assert len(seen) == len(set(seen)) >= 24


def test_a_record_longer_than_a_row_is_cut() -> None:
    batch = make_batch([[record(1, 20, 4)]], 8, 0.0)
    assert batch.ids.tolist() == [list(range(1, 9))]


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_records_for_a_batch_are_a_smaller_one(count: int) -> None:
    source = batches([record(10, 9, 1) for _ in range(count)])
    assert len(source.next_batch().ids) == min(count, 2)
