"""Costs measured at start-up: of real passes, the same on every rank, without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, save_checkpoint
from rank_threads import ThreadGroup, run_ranks, same_on_all

from outrider.kernels.ops import select_ops
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import NO_PROPOSER, RowInit, RowPlan, SampleId, StepPlan, Ticket
from outrider.workers import costs
from outrider.workers.costs import DRAFT_ROWS, measure_draft, measure_step, measure_target
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Shard
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.target import LocalTarget
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, "llama")
    return folder


def make_runner(
    folder: Path, num_rows: int = 32, max_model_len: int = 64, group: Collective | None = None
) -> Runner:
    shard = Shard()
    if group is not None and group.size > 1:
        shard = Shard(group.rank, group.size, group.all_reduce)
    decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS, shard=shard)
    kv = KVCache(decoder.spec, 32, 4, torch.float32, CPU, shard)
    return Runner(decoder, kv, num_rows, max_model_len, VOCAB_SIZE, group or SingleRankGroup())


def is_a_table(sizes: Sequence[int], seconds: Sequence[float]) -> bool:
    rising = list(seconds) == sorted(seconds)
    return len(sizes) == len(seconds) and min(seconds) > 0 and rising


def test_passes_of_target_and_draft_are_timed_by_their_sizes(folder: Path) -> None:
    found = measure_step(make_runner(folder), make_runner(folder), OPS)
    assert found.verify.sizes[:6] == (1, 2, 3, 4, 6, 8)
    assert found.first_draft.sizes == found.next_draft.sizes == DRAFT_ROWS
    for table in (found.verify, found.first_draft, found.next_draft):
        assert is_a_table(table.sizes, table.seconds) and not table.is_padded
    assert found.prefill_s > 0


def test_without_a_draft_drafting_costs_nothing(folder: Path) -> None:
    found = measure_step(make_runner(folder), None, OPS)
    assert (found.first_draft.at(64), found.next_draft.at(1), found.prefill_s) == (0, 0, 0)


@pytest.mark.parametrize(("num_rows", "max_model_len"), [(1, 2), (1, 64), (3, 5), (16, 2)])
def test_few_rows_or_short_ones_are_enough(folder: Path, num_rows: int, max_model_len: int) -> None:
    runner = make_runner(folder, num_rows, max_model_len)
    table = measure_target(runner, OPS)
    assert 1 <= table.sizes[-1] <= num_rows * max_model_len
    assert measure_draft(runner, OPS).first.sizes[-1] <= num_rows


@pytest.mark.parametrize(("pass_s", "last"), [(1.0, 8), (0.002, 64)])
def test_sizes_end_where_they_would_take_too_long_but_small_ones_are_always_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pass_s: float, last: int
) -> None:
    """Costs of small passes are not in proportion to their size, so none may stand for them."""
    monkeypatch.setattr(costs, "_timed", lambda runner, run, size, before: pass_s * size)
    table = measure_target(make_runner(folder), OPS)
    assert table.sizes[-1] == last
    assert table.at(2 * last) == pytest.approx(2 * table.at(last))


def test_a_disturbed_pass_does_not_make_larger_ones_look_cheap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        costs, "_timed", lambda runner, run, size, before: 9.0 if size == 4 else 0.001
    )
    table = measure_target(make_runner(folder), OPS)
    assert table.at(4) == 0.001


def test_ranks_of_a_group_run_the_same_passes_and_get_the_same_tables(folder: Path) -> None:
    def measured(group: ThreadGroup) -> object:
        runner = make_runner(folder, group=group)
        return measure_target(runner, OPS), measure_draft(runner, OPS)

    same_on_all(run_ranks(2, measured))


def test_measuring_leaves_nothing_behind(folder: Path) -> None:
    texts = []
    for is_measured in (False, True):
        runner = make_runner(folder)
        if is_measured:
            measure_step(runner, None, OPS)
        worker = LocalTarget(RowTable(32), runner, OPS, "shared")
        prompt = tuple(range(20))
        told = RowInit(0, 1, SampleId(0, 0), prompt, 20, SamplingParams(), seed=5)
        row = RowPlan(0, 1, 20, 0, 0, True, NO_PROPOSER, 0, tuple(range(6)), 0, (), 0)
        text = [worker.verify(StepPlan(1, 1, (row,), (told,)), Ticket(1)).rows[0].tokens]
        for step in (2, 3, 4):
            plan = StepPlan(1, step, (row._replace(num_tokens=1, target_blocks=()),))
            text.append(worker.verify(plan, Ticket(step)).rows[0].tokens)
        texts.append(text)
    assert texts[0] == texts[1]
