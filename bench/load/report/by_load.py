"""Charts against the load: latency, throughput, and the ratio to the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.bench.load.report.given import Given, kind_suffix, load_label
from outrider.bench.load.report.numbers import with_interval
from outrider.bench.load.report.parts import (
    Block,
    Chart,
    Panel,
    Section,
    Table,
    folded,
    label,
    slug,
)
from outrider.bench.load.report.plots import Line, Point, against_load
from outrider.bench.load.results.settings import Setting
from outrider.bench.load.runs import CellFacts

_MOST_ROWS = 4  # settings in the picture for a README


@dataclass(frozen=True, slots=True)
class Shown:
    """One panel: a quantity by its name, and how it is called."""

    quantity: str
    title: str
    unit: str


LATENCIES = (
    Shown("ttft_p50", "Time to first token, p50", "ms"),
    Shown("tpot_p50", "Time per output token, p50", "ms"),
    Shown("e2e_p50", "Whole answer, p50", "ms"),
    Shown("ttft_p99", "Time to first token, p99", "ms"),
    Shown("tpot_p99", "Time per output token, p99", "ms"),
    Shown("e2e_p99", "Whole answer, p99", "ms"),
)
THROUGHPUT = (
    Shown("tokens_s", "Output tokens a second", "tokens/s"),
    Shown("requests_s", "Requests answered a second", "requests/s"),
)
GOODPUT = Shown("goodput_s", "Goodput: requests a second that met the SLO", "requests/s")


def latency_section(given: Given) -> Section | None:
    note = (
        "Counted from the moment a request should have been sent. Bands are 95 % intervals over "
        "blocks; where there is only one block there is none."
    )
    charts = load_charts(given, LATENCIES, "latency", "Latency of each arm against the load", note)
    return Section("latency", "Latency against load", _shown(given, charts)) if charts else None


def throughput_section(given: Given) -> Section | None:
    shown = THROUGHPUT if given.analysis.slo is None else (*THROUGHPUT, GOODPUT)
    note = "What arrived inside the measured window. Bands are 95 % intervals over blocks."
    if given.analysis.slo is not None:
        note += f" The SLO: {given.analysis.slo}."
    title = "Tokens and requests a second against the load"
    charts = load_charts(given, shown, "throughput", title, note)
    blocks = _shown(given, charts)
    return Section("throughput", "Throughput against load", blocks) if charts else None


def _shown(given: Given, charts: Sequence[Chart]) -> list[Block]:
    """One below the other, or folded where a run has charts for many settings."""
    return list(charts) if len(given.settings) < 2 else folded(charts)


def load_charts(
    given: Given, shown: Sequence[Shown], name: str, title: str, note: str
) -> list[Chart]:
    """One chart for each kind of load and each setting that has answers."""
    by_axis = given.cells_by_axis()
    kinds = list(dict.fromkeys(kind for kind, _ in by_axis))
    return [
        Chart(
            name=_chart_name(given, name, kind, setting),
            title=_titled(given, title, setting) + kind_suffix(kinds, kind),
            panels=[_panel(given, each, kind, cells) for each in shown],
            table=_table(given, shown, cells),
            note=note,
            key=given.key,
        )
        for (kind, setting), cells in by_axis.items()
    ]


def _chart_name(given: Given, name: str, kind: str, setting: Setting) -> str:
    if len(given.settings) < 2:
        return slug(f"{name}-{kind}")
    return slug(f"{name}-{kind}-{given.settings.index(setting)}-{given.label_of(setting)}")


def _titled(given: Given, title: str, setting: Setting) -> str:
    return f"{title}, {given.label_of(setting)}" if len(given.settings) > 1 else title


def _panel(given: Given, shown: Shown, kind: str, cells: Sequence[CellFacts]) -> Panel:
    lines = [Line(index, _points(given, arm, cells, shown.quantity)) for index, arm in given.key]
    drawn = [line for line in lines if line.points]
    return Panel(shown.title, against_load(drawn, load_label(kind), shown.unit))


def _points(given: Given, arm: str, cells: Sequence[CellFacts], quantity: str) -> list[Point]:
    found = []
    for cell in cells:
        known = given.interval(arm, cell.name, quantity)
        if known is not None:
            found.append(Point(cell.value, known.value, known.low, known.high))
    return found


def _table(given: Given, shown: Sequence[Shown], cells: Sequence[CellFacts]) -> Table:
    head = ["Load", "Arm", *(f"{each.title}, {each.unit}" for each in shown)]
    rows = [
        [
            cell.name,
            arm,
            *(with_interval(given.interval(arm, cell.name, each.quantity)) for each in shown),
        ]
        for cell in cells
        for arm in given.arms
    ]
    return Table(head, rows, first_number=2, is_wide=True)


def overview(given: Given) -> Chart | None:
    """The one picture for a README: latency and tokens a second, of the first kind of load."""
    shown = (
        Shown("e2e_p50", "Whole answer, p50 (lower is better)", "ms"),
        Shown("tokens_s", "Output tokens a second (higher is better)", "tokens/s"),
    )
    charts = load_charts(given, shown, "overview", "Latency and tokens a second", "")
    if not charts or len(given.settings) < 2:
        return charts[0] if charts else None
    axes = list(given.cells_by_axis())
    same = [
        (chart, setting)
        for chart, (kind, setting) in zip(charts, axes, strict=True)
        if kind == axes[0][0]
    ]
    panels = [
        replace(panel, title=f"{label(given.label_of(setting), 30)}: {title}")
        for chart, setting in same[:_MOST_ROWS]
        for panel, title in zip(chart.panels, ("answer, p50", "tokens a second"), strict=True)
    ]
    return replace(charts[0], panels=panels, columns=len(shown))
