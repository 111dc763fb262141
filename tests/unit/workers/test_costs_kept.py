"""What passes took, kept for the life of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.costs_kept import KeptCosts

VERIFY = CostTable((1, 2, 8), (0.1, 0.11, 0.3))
DRAFT = CostTable((1,), (0.01,), is_padded=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "costs"


def test_what_one_process_of_a_server_measured_the_next_one_reads() -> None:
    assert KeptCosts("secret", "draft", 4).read() is None
    KeptCosts("secret", "draft", 4).write(VERIFY, DRAFT, DRAFT, 0.002)
    expected = StepCosts(VERIFY, DRAFT, DRAFT, prefill_s=0.002)
    assert KeptCosts("secret", "draft", 4).read() == expected


@pytest.mark.parametrize(
    "other", [("other", "draft", 4), ("secret", "target", 4), ("secret", "draft", 2)]
)
def test_another_server_or_anything_else_that_matters_measures_for_itself(
    other: tuple[str, str, int],
) -> None:
    KeptCosts("secret", "draft", 4).write(VERIFY, None, None, 0.0)
    assert KeptCosts(*other).read() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verify": 1}'])
def test_a_damaged_file_is_as_good_as_none(cache: Path, text: str) -> None:
    kept = KeptCosts("secret", "draft")
    kept.write(VERIFY, DRAFT, DRAFT, 0.0)
    next(cache.iterdir()).write_text(text)
    assert kept.read() is None


def test_a_folder_that_cannot_be_written_to_keeps_nothing(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    KeptCosts("secret").write(VERIFY, DRAFT, DRAFT, 0.0)
    assert KeptCosts("secret").read() is None
