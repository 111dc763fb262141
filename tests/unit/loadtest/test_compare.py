"""Two runs side by side."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from load_records import answered, shift, write_run
from rich.console import Console

from outrider.errors import OutriderError
from outrider.loadtest.records import RequestRecord, write_records
from outrider.loadtest.results.compare import compare, table


def records(slowness: float, *, seed: int, arm: str = "off", ids: str = "a") -> list[RequestRecord]:
    """The same 30 asks of very different lengths, in three blocks."""
    rng = random.Random(seed)
    made = []
    for number in range(30):
        step = (1 + number) / 100 * slowness * rng.uniform(0.97, 1.03)
        made.append(
            answered(
                f"{ids}/{number}",
                arm=arm,
                block=number % 3,
                intended_s=10 * (number % 3) + number / 10,
                update_s=(step, 2 * step, 3 * step),
            )
        )
    return made


def write(path: Path, made: list[RequestRecord]) -> Path:
    path.parent.mkdir(exist_ok=True)
    write_records(path, made)
    return path


def test_runs_that_asked_the_same_are_paired(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", records(1.0, seed=1))
    b = write(tmp_path / "b.jsonl", records(1.1, seed=2))
    found = compare(a, b)
    row = next(row for row in found.rows if row.quantity.name == "e2e_p50")
    assert (row.ratio.kind, row.ratio.n, row.outcome) == ("asks", 30, "worse")
    assert row.ratio.value == pytest.approx(1.1, rel=0.02)
    tail = next(row for row in found.rows if row.quantity.name == "e2e_p99")
    assert (tail.ratio.kind, tail.outcome) == ("unpaired", "no difference")
    assert "different times" in found.cautions[0]
    assert any(
        "longer median time to the whole answer at rate 2 (worse)" in s for s in found.finding()
    )


def test_other_asks_are_not_paired_and_tell_less(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", records(1.0, seed=1))
    b = write(tmp_path / "b.jsonl", records(1.1, seed=2, ids="b"))
    found = compare(a, b)
    assert {row.ratio.kind for row in found.rows} == {"unpaired", "unpaired blocks"}
    assert found.finding() == ["No significant difference."]
    assert "sent different requests" in found.cautions[-1]


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", records(1.0, seed=1))
    found = compare(a, a)
    assert found.finding() == ["No significant difference."]
    assert {row.ratio.value for row in found.rows} == {1.0}


def test_folders_and_files_of_them_are_read_alike(tmp_path: Path) -> None:
    shifts = [
        shift(block=block, measured_from_s=10 * block, measured_to_s=10 * block + 10)
        for block in range(3)
    ]
    run = write_run(tmp_path / "run", records(1.0, seed=1), shifts)
    by_folder, by_file = (compare(path, run.folder) for path in (run.folder, run.requests_path))
    assert by_folder.rows == by_file.rows
    tokens = next(row for row in by_folder.rows if row.quantity.name == "tokens_s")
    assert tokens.a == pytest.approx(3.0)  # 90 tokens in 30 s


def test_a_comparison_can_be_printed_and_kept(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", records(1.0, seed=1))
    b = write(tmp_path / "b.jsonl", records(1.1, seed=2, arm="new"))
    found = compare(a, b)
    kept = json.loads(json.dumps(found.to_json()))
    assert kept["rows"][0]["arm_b"] == "new"
    assert {row["quantity"] for row in kept["rows"]} >= {"tokens_s", "e2e_p99"}
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"))
    console.print(table(found))
    shown = console.export_text()
    assert "off → new" in shown and "worse" in shown and "e2e_p50" in shown


def test_runs_without_anything_in_common_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", records(1.0, seed=1))
    b = write(tmp_path / "b.jsonl", [answered(cell="rate 9")])
    with pytest.raises(OutriderError, match="loads rate 2 and .* has rate 9"):
        compare(a, b)
    c = write(tmp_path / "c.jsonl", [answered(arm="x"), answered(arm="y")])
    with pytest.raises(OutriderError, match="arms off and .* has x, y"):
        compare(a, c)
    with pytest.raises(OutriderError, match="does not exist"):
        compare(a, tmp_path / "none.jsonl")
