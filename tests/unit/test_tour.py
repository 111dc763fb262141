"""The tour names functions that are there, at lines within them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_tools import blocks
from tour import PAGE, ROOT, Stop, span_of, stops, with_lines

STOPS = stops(PAGE.read_text(encoding="utf-8"))
SOURCE = """X = 1


class Loop:
    def step(self) -> None:
        pass


def go() -> None:
    pass
"""


def test_the_tour_has_stops_from_the_request_to_the_kernel() -> None:
    files = {stop.file.split("/")[0] for stop in STOPS}
    assert len(STOPS) > 12 and {"gateway", "scheduler", "workers", "kernels", "src"} <= files


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: f"{stop.file}:{stop.symbol}")
def test_a_stop_is_in_its_file_at_its_line(stop: Stop) -> None:
    file, symbol, target, line = stop
    assert (PAGE.parent / target).resolve() == ROOT / file
    span = span_of((ROOT / file).read_text(encoding="utf-8"), symbol)
    assert span is not None, f"{file} has no {symbol}"
    assert span.first <= line <= span.last, "write the lines anew: python tests/tour.py"


@pytest.mark.parametrize(("symbol", "first"), [("Loop.step", 5), ("Loop", 4), ("go", 9)])
def test_a_symbol_is_found_where_it_is_defined(symbol: str, first: int) -> None:
    span = span_of(SOURCE, symbol)
    assert span is not None and span.first == first


@pytest.mark.parametrize("symbol", ["step", "Loop.go", "X"])
def test_a_symbol_that_is_not_defined_there_is_not_found(symbol: str) -> None:
    assert span_of(SOURCE, symbol) is None


def test_lines_are_written_anew() -> None:
    text = "see [`tests/tour.py:stops`](../tests/tour.py#L1)"
    span = span_of((ROOT / "tests" / "tour.py").read_text(encoding="utf-8"), "stops")
    assert span is not None and with_lines(text).endswith(f"#L{span.first})")


@pytest.mark.model
def test_the_script_on_the_page_shows_drafts_that_are_accepted(tmp_path: Path) -> None:
    [script] = [each.text for each in blocks(PAGE.read_text()) if each.language == "python"]
    (tmp_path / "watch.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "watch.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    accepted = 0
    for line in done.stdout.splitlines():
        drafted, _, rest = line.removeprefix("drafted ").partition(" accepted ")
        count, _, chosen = rest.partition(" of ")
        drafts, own = _ids(drafted), _ids(chosen)
        assert drafts[: int(count)] == own[: int(count)]
        assert int(count) == len(drafts) or drafts[int(count)] != own[int(count)]
        accepted += int(count)
    assert accepted > 0


def _ids(text: str) -> list[int]:
    return [int(each) for each in text.strip("[]").split(", ") if each]
