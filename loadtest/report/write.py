"""Writes the report of a run: the page, overview.png, and a picture of every chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider import __version__
from outrider.loadtest.report import drawing
from outrider.loadtest.report.by_load import latency_section, overview, throughput_section
from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.details import spread_section, time_section
from outrider.loadtest.report.groups import category_section, error_section, length_section
from outrider.loadtest.report.health import health_section
from outrider.loadtest.report.matrix import matrix_section
from outrider.loadtest.report.opening import (
    caution_section,
    finding_section,
    headline,
    run_section,
    speed_headline,
)
from outrider.loadtest.report.page import page
from outrider.loadtest.report.parts import Chart, ReportSection, charts_in
from outrider.loadtest.report.speculation import acceptance_section, updates_section
from outrider.loadtest.report.summary import summary_section, verdict_section
from outrider.loadtest.report.verdicts import answer_section, chaos_section, soak_section
from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.findings import Findings
from outrider.loadtest.runs import RunFolder

SectionMaker = Callable[[ReportContext], ReportSection | None]

# In page order; a section without content returns None.
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
    run: RunFolder, analysis: Analysis, *, png: bool = True, findings: Findings | None = None
) -> list[Path]:
    """Writes report.html and, with `png`, overview.png and pictures/ into the run's folder.

    `findings` are computed unless passed. Equal files give an equal report, byte for byte.
    """
    context = ReportContext(run, analysis, findings)
    opening = finding_section(context)
    made = [maker(context) for maker in SECTIONS]
    sections = [opening, *(section for section in made if section is not None)]
    target = run.folder / "report.html"
    footer = f"Made by outrider {__version__} from the files in this folder."
    kind = f"Load test, {context.facts.started}"
    target.write_text(page(headline(context), kind, sections, footer), encoding="utf-8")
    written = [target]
    if png:
        charts = [chart for section in sections for chart in charts_in(section.blocks)]
        written += _pictures(run.folder, context, charts)
    return written


def _pictures(folder: Path, context: ReportContext, charts: Sequence[Chart]) -> list[Path]:
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    written = []
    seen = overview(context)
    if seen is not None:
        written.append(folder / "overview.png")
        drawing.save_png(seen, written[-1], title=speed_headline(context))
    for chart in charts:
        written.append(pictures / f"{chart.name}.png")
        drawing.save_png(chart, written[-1])
    return written
