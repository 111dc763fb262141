"""What a teacher has seen of a text is what it would see again, wherever the text is packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.train import teacher_cache
from outrider.train.packing import PackedBatch, PackedDataLoader, TeacherStates
from outrider.train.shards import TrainingRecord
from outrider.train.teacher_cache import TeacherCache

LENGTH = 16
RECORDS = [
    TrainingRecord(np.arange(1, size + 1) * 7 % 50, 1, 0) for size in (5, 9, 3, 12, 20, 7, 4, 16)
]


class Seer:
    """Sees of each token what it is and where in its document it stands."""

    def __init__(self, num_features: int = 1) -> None:
        self.num_calls = 0
        self._num_features = num_features

    def states(self, batch: PackedBatch) -> TeacherStates:
        self.num_calls += 1
        told = torch.stack([batch.ids, batch.documents.positions], -1).flatten(0, 1).float()
        return TeacherStates(told, told.repeat(1, 3) * 2 if self._num_features else None)


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "_free_bytes", lambda device: 10**6)


def batches() -> PackedDataLoader:
    return PackedDataLoader(RECORDS, LENGTH, 2, 1.0, seed=3)


@pytest.mark.parametrize("num_features", [0, 1])
def test_what_is_remembered_is_what_would_be_seen(num_features: int) -> None:
    seer, fresh, source = Seer(num_features), Seer(num_features), batches()
    states = TeacherCache(seer.states, len(RECORDS), source.num_tokens)
    for _ in range(40):
        batch = source.next_batch()
        found, expected = states(batch), fresh.states(batch)
        assert batch.token_indices is not None
        is_text = batch.token_indices.ne(source.num_tokens).flatten()
        torch.testing.assert_close(found.hidden[is_text], expected.hidden[is_text])
        if num_features:
            assert found.features is not None and expected.features is not None
            torch.testing.assert_close(found.features[is_text], expected.features[is_text])
        else:
            assert found.features is None
    assert source.epoch > 3 and seer.num_calls < fresh.num_calls / 2


def test_a_text_it_has_not_seen_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seer, source = Seer(), batches()
    states = TeacherCache(seer.states, len(RECORDS), source.num_tokens)
    first = source.next_batch()
    states(first)
    states(first)
    assert seer.num_calls == 1
    states(source.next_batch())
    assert seer.num_calls == 2


def test_without_room_everything_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "_free_bytes", lambda device: 1000)
    seer, source = Seer(), batches()
    states = TeacherCache(seer.states, len(RECORDS), source.num_tokens)
    batch = source.next_batch()
    for _ in range(3):
        states(batch)
    assert seer.num_calls == 3
