"""The loss in chunks is the loss, and so are its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.train.loss import DraftOutputs, distillation_loss
from outrider.train.packing import PackedBatch, make_batch
from outrider.train.shards import TrainingRecord

VOCAB, WIDTH, LENGTH = 23, 6, 24
HEAD = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))


def batch() -> PackedBatch:
    rows = [
        [TrainingRecord(np.arange(9), 3, 0), TrainingRecord(np.arange(12), 5, 0)],
        [TrainingRecord(np.arange(20), 2, 0)],
    ]
    return make_batch(rows, LENGTH, prompt_weight=0.25)


def tensors() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2 * LENGTH, WIDTH, generator=generator)
    states = [torch.randn(2 * LENGTH, WIDTH, generator=generator) for _ in range(2)]
    tables = [torch.randn(VOCAB, WIDTH, generator=generator) for _ in range(2)]
    return hidden, [s.requires_grad_() for s in states], [t.requires_grad_() for t in tables]


def plain_loss(
    hidden: Tensor, states: list[Tensor], tables: list[Tensor], vocabulary: Tensor | None
) -> Tensor:
    """The same with everything in memory, row by row."""
    packed, total = batch(), torch.zeros(())
    ids = torch.arange(VOCAB) if vocabulary is None else vocabulary
    for level, (behind, count) in enumerate(((1, 1.0), (2, 0.5))):
        summed, weights = torch.zeros(()), 0.0
        for row, weight, loss_positions in zip(
            packed.loss_indices, packed.loss_weights, packed.loss_positions, strict=True
        ):
            if loss_positions < behind:
                continue
            taught = functional.log_softmax(HEAD @ hidden[row], -1)[ids]
            table = tables[level] if vocabulary is None else tables[level][: len(ids)]
            guessed = functional.log_softmax(table @ states[level][row - behind], -1)
            summed = summed + weight * (taught.exp() * (taught - guessed)).sum()
            weights += float(weight)
        total = total + count / 1.5 * summed / weights
    return total


@pytest.mark.parametrize("chunk_rows", [3, 1000])
@pytest.mark.parametrize("part", [None, 11])
def test_loss_and_gradients_in_chunks_are_those_of_all_rows_at_once(
    chunk_rows: int, part: int | None
) -> None:
    vocabulary = None if part is None else torch.arange(0, 2 * part, 2)
    found: list[Any] = []
    expected: list[Any] = []
    for results in (found, expected):
        hidden, states, tables = tensors()
        if results is expected:
            loss = plain_loss(hidden, states, tables, vocabulary)
        else:
            used = [table if part is None else table[:part] for table in tables]
            draft_outputs = DraftOutputs(states, used, [0, 1], [1, 2], [1.0, 0.5], vocabulary)
            loss, _ = distillation_loss(
                lambda rows: rows @ HEAD.T,
                hidden,
                batch(),
                draft_outputs,
                chunk_rows=chunk_rows,
                with_metrics=False,
            )
        loss.backward()
        results += [each.grad for each in (*states, *tables)]
        results.append(loss.detach())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_student_that_is_the_teacher_agrees_with_it_wholly() -> None:
    hidden, _, _ = tensors()
    shifted = hidden.roll(-1, 0)  # a level that looks from one token further back
    draft_outputs = DraftOutputs([shifted], [HEAD], [0], [1], [1.0])
    with torch.no_grad():
        loss, measured = distillation_loss(
            lambda rows: rows @ HEAD.T, hidden, batch(), draft_outputs, chunk_rows=7
        )
    means = measured.means()
    assert float(loss) == pytest.approx(0.0, abs=1e-5)
    assert means["agreement"] == pytest.approx([1.0]) and means["overlap"] == pytest.approx([1.0])
