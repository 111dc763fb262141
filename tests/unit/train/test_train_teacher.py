"""The teacher over packed documents is the target over each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, random_prompt, reference_logits, save_checkpoint

from outrider.train.cuda_graphs import CapturedStep
from outrider.train.packing import PackedBatch, make_batch
from outrider.train.shards import TrainingRecord
from outrider.train.teacher import Teacher

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
PROMPTS = [random_prompt(length) for length in (7, 12, 30)]


def batch() -> PackedBatch:
    first, second, third = (TrainingRecord(np.array(ids), 1, 0) for ids in PROMPTS)
    return make_batch([[first, second], [third]], 32, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_documents_are_those_of_each_alone(family: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family)
    teacher = Teacher(str(tmp_path), CPU)
    logits = teacher.logits(teacher.states(batch()).hidden)
    for first, ids in zip((0, 7, 32), PROMPTS, strict=True):
        expected = reference_logits(model, ids)
        torch.testing.assert_close(logits[first : first + len(ids)], expected, atol=2e-4, rtol=1e-3)


def test_features_are_what_enters_the_layers_asked_for(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    features = Teacher(str(tmp_path), CPU, (1, 3)).states(batch()).features
    assert features is not None
    with torch.no_grad():
        states = model(torch.tensor([PROMPTS[1]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0], states[3][0]], -1)
    torch.testing.assert_close(features[7:19], expected, atol=2e-4, rtol=1e-3)


@pytest.mark.gpu
def test_a_recorded_pass_sees_what_a_plain_one_does(tmp_path: Path) -> None:
    """Also when documents are of other lengths than those it was recorded with."""
    save_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    device = torch.device("cuda")
    plain, teacher = Teacher(str(tmp_path), device, (1, 3)), Teacher(str(tmp_path), device, (1, 3))
    lengths = [(7, 12, 30), (20, 5, 9), (3, 8, 2), (31, 1, 32)]
    for number, (a, b, c) in enumerate(lengths):
        made = [TrainingRecord(np.array(random_prompt(length)), 1, 0) for length in (a, b, c)]
        given = make_batch([made[:2], made[2:]], 32, 1.0).to(device)
        found = teacher.states(given)
        expected = plain._forward(given)
        assert found.features is not None and expected.features is not None, number
        torch.testing.assert_close(found.hidden, expected.hidden)
        torch.testing.assert_close(found.features, expected.features)
    assert isinstance(teacher._run, CapturedStep) and len(teacher._run._captures) == 1
