"""A run's folder into its report: one page, the picture for a README, a picture of every chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider import __version__
from outrider.bench.load.report import drawing
from outrider.bench.load.report.by_load import latency_section, overview, throughput_section
from outrider.bench.load.report.details import spread_section, time_section
from outrider.bench.load.report.given import Given
from outrider.bench.load.report.groups import category_section, error_section, length_section
from outrider.bench.load.report.health import health_section
from outrider.bench.load.report.matrix import matrix_section
from outrider.bench.load.report.opening import (
    caution_section,
    finding_section,
    headline,
    run_section,
    speed_headline,
)
from outrider.bench.load.report.page import page
from outrider.bench.load.report.parts import Chart, Section, charts_in
from outrider.bench.load.report.speculation import acceptance_section, updates_section
from outrider.bench.load.report.summary import summary_section, verdict_section
from outrider.bench.load.report.verdicts import answer_section, chaos_section, soak_section
from outrider.bench.load.results.analysis import Analysis
from outrider.bench.load.results.findings import Findings
from outrider.bench.load.runs import Run

SectionMaker = Callable[[Given], Section | None]

# In the order of the page; one that has nothing to show returns None.
SECTIONS: tuple[SectionMaker, ...] = (
    chaos_section,
    soak_section,
    caution_section,
    run_section,
    matrix_section,
    summary_section,
    verdict_section,
    answer_section,
    latency_section,
    throughput_section,
    spread_section,
    time_section,
    acceptance_section,
    updates_section,
    category_section,
    length_section,
    error_section,
    health_section,
)


def write_report(
    run: Run, analysis: Analysis, *, png: bool = True, findings: Findings | None = None
) -> list[Path]:
    """Write report.html and, unless told not to, overview.png and pictures/ into the run's folder.

    `findings` are made here unless the caller has them. The same files give the same report, byte
    for byte.
    """
    given = Given(run, analysis, findings)
    opening = finding_section(given)
    made = [maker(given) for maker in SECTIONS]
    sections = [opening, *(section for section in made if section is not None)]
    target = run.folder / "report.html"
    footer = f"Made by outrider {__version__} from the files beside this page."
    kind = f"Load test, {given.facts.started}"
    target.write_text(page(headline(given), kind, sections, footer), encoding="utf-8")
    written = [target]
    if png:
        charts = [chart for section in sections for chart in charts_in(section.blocks)]
        written += _pictures(run.folder, given, charts)
    return written


def _pictures(folder: Path, given: Given, charts: Sequence[Chart]) -> list[Path]:
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    written = []
    seen = overview(given)
    if seen is not None:
        written.append(folder / "overview.png")
        drawing.save_png(seen, written[-1], title=speed_headline(given))
    for chart in charts:
        written.append(pictures / f"{chart.name}.png")
        drawing.save_png(chart, written[-1])
    return written
