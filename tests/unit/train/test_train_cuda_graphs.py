"""What recordings read is what they are given, whatever room is left in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from distill_tools import NUM_LAYERS, VOCAB_SIZE, save_toy_target

from outrider.train.cuda_graphs import CapturedStep, _fill, _static_batch
from outrider.train.packing import PackedBatch, make_batch
from outrider.train.settings import DraftSizes, Eagle3Sizes, TrainSettings
from outrider.train.shards import TrainingRecord
from outrider.train.students.base import Student
from outrider.train.students.draft import DraftStudent
from outrider.train.students.eagle3 import Eagle3Student, chosen_layers
from outrider.train.teacher import Teacher
from outrider.train.trainer import Trainer

LENGTH = 32
COUNTS = np.arange(VOCAB_SIZE)[::-1].copy()


def texts(count: int, seed: int) -> list[TrainingRecord]:
    rng = np.random.default_rng(seed)
    return [
        TrainingRecord(rng.integers(3, VOCAB_SIZE, rng.integers(4, LENGTH)), 2, 0)
        for _ in range(count)
    ]


def packed(seed: int) -> PackedBatch:
    first, second, third = texts(3, seed)
    return make_batch([[first], [second], [third]], LENGTH, 0.5)


def test_a_held_batch_is_the_one_it_was_filled_with_last() -> None:
    static = _static_batch(packed(0), 128)
    for seed in (1, 2, 3):
        given = packed(seed)
        _fill(static, given)
        count, documents = len(given.loss_indices), len(given.documents.cu_seqlens)
        assert torch.equal(static.ids, given.ids)
        assert torch.equal(static.documents.positions, given.documents.positions)
        assert torch.equal(static.documents.document_ids, given.documents.document_ids)
        assert torch.equal(static.documents.cu_seqlens[:documents], given.documents.cu_seqlens)
        assert set(static.documents.cu_seqlens[documents:].tolist()) == {3 * LENGTH}
        assert torch.equal(static.loss_indices[:count], given.loss_indices)
        assert torch.equal(static.loss_weights[:count], given.loss_weights)
        assert torch.equal(static.loss_positions[:count], given.loss_positions)
        assert not static.loss_weights[count:].any() and not static.loss_indices[count:].any()


def trainer(kind: str, target: Path, folder: Path) -> Trainer:
    torch.manual_seed(2)
    device = torch.device("cuda")
    layers = chosen_layers(NUM_LAYERS) if kind == "eagle3" else ()
    teacher = Teacher(str(target), device, layers)
    student: Student
    if kind == "draft":
        student = DraftStudent(DraftSizes(width=32, heads=2), teacher, LENGTH)
    else:
        student = Eagle3Student(Eagle3Sizes(draft_vocab=24, unroll=3), teacher, LENGTH, COUNTS)
    settings = TrainSettings(steps=40, batch_tokens=4 * LENGTH, context=LENGTH, warmup=0)
    return Trainer(student.to(device), teacher, texts(40, 5), settings, folder, {})


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_recorded_steps_learn_what_plain_ones_do(kind: str, tmp_path: Path) -> None:
    save_toy_target(tmp_path / "target")
    recorded, plain = (
        trainer(kind, tmp_path / "target", tmp_path / name) for name in ("recorded", "plain")
    )
    plain._run_step = plain._train_step
    for _ in range(12):
        kl = [float(each._next_step().kl.sum()) for each in (recorded, plain)]
        assert kl[0] == pytest.approx(kl[1], rel=0.02)
        for each in (recorded, plain):
            each.step += 1
    assert isinstance(recorded._run_step, CapturedStep) and recorded._run_step._captures
    for one, other in zip(recorded.student.parameters(), plain.student.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0.05)
