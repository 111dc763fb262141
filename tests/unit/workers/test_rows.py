"""Texts as a worker knows them: which engine they are of, and what is too late to count."""

from __future__ import annotations

import pytest

from outrider.errors import OutriderError
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RowInit, RowVerdict, SampleId, StepPlan, Verdict
from outrider.workers.rows import RowTable


def plan(epoch: int, step: int, generation: int = 1) -> StepPlan:
    init = RowInit(0, generation, SampleId(0, 0), (1, 2), 2, SamplingParams(), seed=0)
    return StepPlan(epoch, step, (), (init,))


def test_a_new_engine_drops_all_rows_of_the_one_before() -> None:
    rows = RowTable(2)
    rows.begin(plan(epoch=7, step=90))
    rows.begin(StepPlan(8, 1, ()))
    with pytest.raises(OutriderError, match="never admitted"):
        rows[0]


def test_a_plan_of_an_engine_that_was_replaced_is_refused() -> None:
    rows = RowTable(2)
    rows.begin(plan(epoch=8, step=1))
    with pytest.raises(OutriderError, match="epoch 7 came after one of epoch 8"):
        rows.begin(plan(epoch=7, step=91))
    assert rows[0].tokens == [1, 2]


def test_a_verdict_of_another_engine_changes_no_text() -> None:
    rows = RowTable(2)
    rows.begin(plan(epoch=8, step=1))
    rows.commit(Verdict(7, 1, (RowVerdict(0, 1, 2, 0, 0, 0, (5,)),)))
    assert rows[0].tokens == [1, 2]
    rows.commit(Verdict(8, 1, (RowVerdict(0, 1, 2, 0, 0, 0, (5,)),)))
    assert rows[0].tokens == [1, 2, 5]
