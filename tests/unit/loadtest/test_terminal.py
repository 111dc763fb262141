"""The table of a run in terminals of several widths."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from bench_runs import MadeArm, MadeRun, make_run
from rich.console import Console

from outrider.cli.bench.results import show_result
from outrider.loadtest.results.analysis import Analysis, analyse
from outrider.loadtest.results.measures import Slo
from outrider.loadtest.results.terminal import summary

MADE = MadeRun(
    arms=(MadeArm("off"), MadeArm("depth 2", 2), MadeArm("vllm-with-a-long-name", 4)),
    loads=(1, 4),
    blocks=1,
    shift_s=8,
    failing=0.1,
    has_samples=False,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyse(make_run(tmp_path_factory.mktemp("made"), MADE), Slo(ttft_ms=500))


def shown(analysis: Analysis, width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, soft_wrap=True)
    console.print(summary(analysis, console.width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_row_is_one_line_that_fits(made: Analysis, width: int) -> None:
    lines = shown(made, width)
    assert max(map(len, lines)) <= width
    assert sum("vllm-with-a-long-name" in line for line in lines) == 2
    assert len(lines) == 2 + 3 + 3
    assert "first token" in lines[0] and "p50 / p99 ms" in lines[1]


def test_a_wide_terminal_has_more_columns(made: Analysis) -> None:
    assert "sent" in shown(made, 80)[0] and "accepted" not in shown(made, 80)[1]
    assert "accepted" in "".join(shown(made, 130))
    assert "an update" in "".join(shown(made, 200))


def test_the_terminal_says_what_the_page_says_first(tmp_path: Path) -> None:
    note = "off: up to 4.2 requests a second meet the SLO."
    run = make_run(
        tmp_path,
        MadeRun((MadeArm("off"),), (1,), blocks=1, shift_s=2, has_samples=False, notes=(note,)),
    )
    out = io.StringIO()
    show_result(run, None, Console(file=out, width=100, soft_wrap=True))
    assert out.getvalue().count(note) == 1
    assert out.getvalue().index(note) < out.getvalue().index("“off” at 1 request a second")
    assert f"<h1>{note.removesuffix('.')}</h1>" in (tmp_path / "report.html").read_text("utf-8")
