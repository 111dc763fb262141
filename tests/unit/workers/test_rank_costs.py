"""A rank times its passes once; after that it only makes sure of what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import run_ranks

from outrider.kernels.ops import select_ops
from outrider.links.rank_messages import RankSettings, Ready, Role
from outrider.scheduler.costs import CostTable
from outrider.workers.costs import DraftCosts, are_alike
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.ranks import costs
from outrider.workers.ranks.costs import RankCosts

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32)
SIZES = (1, 2, 4, 8)
SETTINGS = RankSettings(
    *("a model", None, "cpu", "auto", None, "auto", False, None, 16, "shared", 1, 4, 0.9, False),
    *("info", "text", 5.0),
)


class Passes:
    """Stands in for a model: what its passes take, and how many sizes were timed."""

    def __init__(self) -> None:
        self.pass_s = 0.01  # by tokens of a target's, or rows of a draft's
        self.first_pass_s = 0.02
        self.timed: list[int | None] = []

    def table(self, each_s: float, num_sizes: int | None) -> CostTable:
        sizes = SIZES[:num_sizes]
        return CostTable(sizes, tuple(each_s * size for size in sizes))

    def of_target(
        self, runner: Any, ops: Any, head: Any, num_sizes: int | None = None
    ) -> CostTable:
        self.timed.append(num_sizes)
        return self.table(self.pass_s, num_sizes)

    def of_drafting(
        self, runner: Any, ops: Any, num_sizes: int | None = None
    ) -> tuple[CostTable, CostTable]:
        self.timed.append(num_sizes)
        return self.table(self.first_pass_s, num_sizes), self.table(self.pass_s, num_sizes)

    def of_draft(self, runner: Any, ops: Any) -> DraftCosts:
        return DraftCosts(*self.of_drafting(runner, ops), 0.001)


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    passes = Passes()
    monkeypatch.setattr(costs, "measure_target", passes.of_target)
    monkeypatch.setattr(costs, "measure_draft", passes.of_draft)
    monkeypatch.setattr(costs, "measure_drafting", passes.of_drafting)
    yield passes


def _start(
    secret: str, role: str = Role.TARGET, group: Collective | None = None, num_rows: int = 8
) -> Ready:
    spec = SimpleNamespace(num_layers=2)
    runner: Any = SimpleNamespace(
        device=CPU, num_rows=num_rows, max_model_len=64, decoder=SimpleNamespace(spec=spec)
    )
    return RankCosts(role, group or SingleRankGroup(), runner, OPS, None).measure(secret, SETTINGS)


def _target(passes: Passes) -> Ready:
    return Ready(verify=passes.table(passes.pass_s, None))


def test_within_a_server_passes_are_timed_once(passes: Passes) -> None:
    assert _start("a server") == _start("a server") == _target(passes)
    assert passes.timed == [None]


def test_another_server_makes_sure_with_a_few_passes(passes: Passes) -> None:
    first = _target(passes)
    _start("a server")
    passes.pass_s *= 1.1
    assert _start("another") == first
    assert _start("another") == first, "which makes it its own"
    assert passes.timed == [None, 2]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_does_not_hold_any_more_is_timed_anew(passes: Passes, factor: float) -> None:
    _start("a server")
    passes.pass_s *= factor
    assert _start("another") == _target(passes)
    assert _start("another") == _target(passes)
    assert passes.timed == [None, 2, None]


def test_a_draft_makes_sure_of_both_kinds_of_its_passes(passes: Passes) -> None:
    first = _start("a server", Role.DRAFT)
    assert first == Ready(None, passes.table(0.02, None), passes.table(0.01, None), 0.001)
    assert _start("another", Role.DRAFT) == first
    passes.first_pass_s *= 2
    assert _start("a third", Role.DRAFT) != first
    assert passes.timed == [None, 1, 1, None]


def test_other_sizes_and_the_other_role_are_timed_for_themselves(passes: Passes) -> None:
    _start("a server")
    _start("a server", num_rows=4)
    _start("a server", Role.DRAFT)
    assert passes.timed == [None, None, None]


def test_all_ranks_run_the_same_passes_and_the_first_tells(passes: Passes) -> None:
    def start(secret: str) -> list[Ready]:
        return run_ranks(2, lambda group: _start(secret, group=group))

    assert start("a server") == [_target(passes), Ready()]
    assert start("another") == [_target(passes), Ready()]
    assert start("another") == [_target(passes), Ready()]
    passes.pass_s *= 2
    assert start("a third") == [_target(passes), Ready()]
    assert passes.timed == [None] * 2 + [2] * 2 + [2] * 2 + [None] * 2


def test_tables_are_alike_within_a_quarter() -> None:
    table = CostTable((1, 2), (0.01, 0.02))
    assert are_alike(table, CostTable((1, 2, 4), (0.012, 0.017, 1.0)))
    assert not are_alike(table, CostTable((1, 2), (0.013, 0.02)))
    assert not are_alike(table, CostTable((1, 2), (0.01, 0.015)))
    assert not are_alike(table, CostTable((), ()))
