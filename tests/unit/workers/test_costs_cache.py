"""What passes took, kept for those that come after."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.costs_cache import CachedCosts, CostsCache
from outrider.workers.proposers.base import NO_COST

VERIFY = CostTable((1, 2, 8), (0.1, 0.11, 0.3))
DRAFT = CostTable((1,), (0.01,), is_padded=True)
COSTS = StepCosts(VERIFY, DRAFT, DRAFT, prefill_s=0.002)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "costs"


def test_what_one_process_of_a_server_measured_the_next_one_reads() -> None:
    assert CostsCache("secret", "draft", 4).read() is None
    CostsCache("secret", "draft", 4).write(COSTS)
    assert CostsCache("secret", "draft", 4).read() == CachedCosts(COSTS, is_own=True)


def test_another_server_reads_it_as_anothers_until_it_writes_it_itself() -> None:
    CostsCache("secret", "draft", 4).write(COSTS)
    other = CostsCache("other", "draft", 4)
    assert other.read() == CachedCosts(COSTS, is_own=False)
    other.write(COSTS)
    assert other.read() == CachedCosts(COSTS, is_own=True)


@pytest.mark.parametrize("other", [("secret", "target", 4), ("secret", "draft", 2)])
def test_what_differs_in_anything_that_matters_measures_for_itself(
    other: tuple[str, str, int],
) -> None:
    CostsCache("secret", "draft", 4).write_tables(VERIFY, None, None, 0.0)
    assert CostsCache(*other).read() is None


def test_what_a_group_has_no_passes_for_costs_nothing() -> None:
    CostsCache("secret").write_tables(VERIFY, None, None, 0.0)
    found = CostsCache("secret").read()
    assert found is not None and found.costs == StepCosts(VERIFY, NO_COST, NO_COST)


def test_no_file_tells_of_the_secret(cache: Path) -> None:
    CostsCache("secret", "draft").write(COSTS)
    [file] = cache.iterdir()
    assert "secret" not in file.name + file.read_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verify": 1}'])
def test_a_damaged_file_is_as_good_as_none(cache: Path, text: str) -> None:
    kept = CostsCache("secret", "draft")
    kept.write(COSTS)
    next(cache.iterdir()).write_text(text)
    assert kept.read() is None


def test_a_folder_that_cannot_be_written_to_keeps_nothing(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    CostsCache("secret").write(COSTS)
    assert CostsCache("secret").read() is None


def test_neither_a_pipe_nor_a_link_in_the_way_is_waited_for_or_written_to(cache: Path) -> None:
    kept, other = CostsCache("secret"), cache.parent / "other"
    kept.write(COSTS)
    [file] = cache.iterdir()
    other.write_text("mine")
    file.unlink()
    file.symlink_to(other)
    file.with_suffix(f".{os.getpid()}").symlink_to(other)
    assert kept.read() is None
    kept.write(COSTS)
    assert other.read_text() == "mine" and kept.read() is not None
    file.unlink()
    os.mkfifo(file)
    assert kept.read() is None
