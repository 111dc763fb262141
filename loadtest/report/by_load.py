"""Charts against the load: latency, throughput, and the ratio to the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.loadtest.report.context import ReportContext, kind_suffix, load_label
from outrider.loadtest.report.numbers import with_interval
from outrider.loadtest.report.parts import (
    Block,
    Chart,
    Panel,
    ReportSection,
    Table,
    folded,
    label,
    slug,
)
from outrider.loadtest.report.plots import Line, PlotPoint, against_load
from outrider.loadtest.results.settings import Setting
from outrider.loadtest.runs import CellFacts

_MAX_ROWS = 4  # settings in overview.png


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel: the name of a quantity, its title and unit."""

    quantity: str
    title: str
    unit: str


LATENCIES = (
    PanelSpec("ttft_p50", "Time to first token, p50", "ms"),
    PanelSpec("tpot_p50", "Time per output token, p50", "ms"),
    PanelSpec("e2e_p50", "Whole answer, p50", "ms"),
    PanelSpec("ttft_p99", "Time to first token, p99", "ms"),
    PanelSpec("tpot_p99", "Time per output token, p99", "ms"),
    PanelSpec("e2e_p99", "Whole answer, p99", "ms"),
)
THROUGHPUT = (
    PanelSpec("tokens_s", "Output tokens a second", "tokens/s"),
    PanelSpec("requests_s", "Requests answered a second", "requests/s"),
)
GOODPUT = PanelSpec("goodput_s", "Goodput: requests a second that met the SLO", "requests/s")


def latency_section(context: ReportContext) -> ReportSection | None:
    note = (
        "Measured from the time a request was due. Bands are 95 % intervals over blocks; a single "
        "block has none."
    )
    charts = load_charts(
        context, LATENCIES, "latency", "Latency of each arm against the load", note
    )
    return (
        ReportSection("latency", "Latency against load", _blocks(context, charts))
        if charts
        else None
    )


def throughput_section(context: ReportContext) -> ReportSection | None:
    panels = THROUGHPUT if context.analysis.slo is None else (*THROUGHPUT, GOODPUT)
    note = "Counts what arrived in the measured window. Bands are 95 % intervals over blocks."
    if context.analysis.slo is not None:
        note += f" The SLO: {context.analysis.slo}."
    title = "Tokens and requests a second against the load"
    charts = load_charts(context, panels, "throughput", title, note)
    blocks = _blocks(context, charts)
    return ReportSection("throughput", "Throughput against load", blocks) if charts else None


def _blocks(context: ReportContext, charts: Sequence[Chart]) -> list[Block]:
    """The charts in order; folded if the run has several settings."""
    return list(charts) if len(context.settings) < 2 else folded(charts)


def load_charts(
    context: ReportContext, panels: Sequence[PanelSpec], name: str, title: str, note: str
) -> list[Chart]:
    """One chart per kind of load and setting with completed requests."""
    by_axis = context.cells_by_axis()
    kinds = list(dict.fromkeys(kind for kind, _ in by_axis))
    return [
        Chart(
            name=_chart_name(context, name, kind, setting),
            title=_titled(context, title, setting) + kind_suffix(kinds, kind),
            panels=[_panel(context, each, kind, cells) for each in panels],
            table=_table(context, panels, cells),
            note=note,
            key=context.key,
        )
        for (kind, setting), cells in by_axis.items()
    ]


def _chart_name(context: ReportContext, name: str, kind: str, setting: Setting) -> str:
    if len(context.settings) < 2:
        return slug(f"{name}-{kind}")
    return slug(f"{name}-{kind}-{context.settings.index(setting)}-{context.label_of(setting)}")


def _titled(context: ReportContext, title: str, setting: Setting) -> str:
    return f"{title}, {context.label_of(setting)}" if len(context.settings) > 1 else title


def _panel(context: ReportContext, spec: PanelSpec, kind: str, cells: Sequence[CellFacts]) -> Panel:
    lines = [Line(index, _points(context, arm, cells, spec.quantity)) for index, arm in context.key]
    drawn = [line for line in lines if line.points]
    return Panel(spec.title, against_load(drawn, load_label(kind), spec.unit))


def _points(
    context: ReportContext, arm: str, cells: Sequence[CellFacts], quantity: str
) -> list[PlotPoint]:
    found = []
    for cell in cells:
        known = context.interval(arm, cell.name, quantity)
        if known is not None:
            found.append(PlotPoint(cell.value, known.value, known.low, known.high))
    return found


def _table(context: ReportContext, spec: Sequence[PanelSpec], cells: Sequence[CellFacts]) -> Table:
    head = ["Load", "Arm", *(f"{each.title}, {each.unit}" for each in spec)]
    rows = [
        [
            cell.name,
            arm,
            *(with_interval(context.interval(arm, cell.name, each.quantity)) for each in spec),
        ]
        for cell in cells
        for arm in context.arms
    ]
    return Table(head, rows, first_number=2, is_wide=True)


def overview(context: ReportContext) -> Chart | None:
    """overview.png: latency and throughput of the first kind of load."""
    specs = (
        PanelSpec("e2e_p50", "Whole answer, p50 (lower is better)", "ms"),
        PanelSpec("tokens_s", "Output tokens a second (higher is better)", "tokens/s"),
    )
    charts = load_charts(context, specs, "overview", "Latency and tokens a second", "")
    if not charts or len(context.settings) < 2:
        return charts[0] if charts else None
    axes = list(context.cells_by_axis())
    same = [
        (chart, setting)
        for chart, (kind, setting) in zip(charts, axes, strict=True)
        if kind == axes[0][0]
    ]
    panels = [
        replace(panel, title=f"{label(context.label_of(setting), 30)}: {title}")
        for chart, setting in same[:_MAX_ROWS]
        for panel, title in zip(chart.panels, ("answer, p50", "tokens a second"), strict=True)
    ]
    return replace(charts[0], panels=panels, columns=len(specs))
