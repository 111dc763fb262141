"""Memory, handles and threads of the servers over the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.numbers import count, number
from outrider.loadtest.report.parts import Chart, Panel, ReportSection, Table
from outrider.loadtest.report.plots import Floats, over_time
from outrider.loadtest.runs import ServerSample

_SHOWN = (
    ("memory_mb", "Memory of the server's processes", "MB"),
    ("handles", "Open handles", "handles"),
    ("threads", "Threads", "threads"),
)


def health_section(context: ReportContext) -> ReportSection | None:
    by_server: dict[str, list[ServerSample]] = {}
    for sample in context.analysis.samples:
        by_server.setdefault(sample.server, []).append(sample)
    start_s = min((sample.at_s for sample in context.analysis.samples), default=0.0)
    panels = []
    for field, title, unit in _SHOWN:
        lines = [
            (index, *_line(samples, field, start_s))
            for index, samples in enumerate(by_server.values())
        ]
        lines = [each for each in lines if np.isfinite(each[2]).any()]
        if lines:
            draw = over_time(lines, unit, x_label="minutes of the run")
            panels.append(Panel(title, draw))
    if not panels:
        return None
    chart = Chart(
        name="servers",
        title="Memory, handles and threads of the servers",
        panels=panels,
        table=_table(by_server),
        note="Colours are servers here: several arms may share one.",
        key=list(enumerate(by_server)),
    )
    return ReportSection("servers", "The servers over the run", [chart])


def _line(samples: Sequence[ServerSample], field: str, start_s: float) -> tuple[Floats, Floats]:
    values = [getattr(sample, field) for sample in samples]
    at = np.array([(sample.at_s - start_s) / 60 for sample in samples])
    return at, np.array([math.nan if each is None else float(each) for each in values])


def _table(by_server: dict[str, list[ServerSample]]) -> Table:
    rows = []
    for server, samples in by_server.items():
        for field, title, unit in _SHOWN:
            known = [each for each in (getattr(s, field) for s in samples) if each is not None]
            if known:
                figures = (known[0], min(known), max(known), known[-1])
                shown = (number(each, 4) if unit == "MB" else count(each) for each in figures)
                rows.append([server, f"{title}, {unit}", *shown])
    return Table(["Server", "Figure", "First", "Least", "Most", "Last"], rows, first_number=2)
