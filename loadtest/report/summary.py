"""The summary table and the verdict chart: every arm against the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.loadtest.report.by_load import PanelSpec
from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.details import chosen_cells
from outrider.loadtest.report.numbers import NOTHING, count, number, share, with_interval
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
from outrider.loadtest.report.plots import ForestRow, forest
from outrider.loadtest.results.measures import Measures, Spread
from outrider.loadtest.results.settings import load_name, setting_of
from outrider.loadtest.results.verdicts import COMPARED, COSTS, HELPS, NO_DIFFERENCE, TOO_FEW
from outrider.loadtest.runs import CellFacts, ShiftRecord

_VERDICTS = (
    PanelSpec("tokens_s", "Output tokens a second, above 1 is better", ""),
    PanelSpec("tpot_p50", "Time per output token, below 1 is better", ""),
    PanelSpec("e2e_p50", "Whole answer, below 1 is better", ""),
)
_HEAD = (
    *("Load", "Arm", "Tokens/s (95 % interval)", "Tokens/s vs baseline"),
    *("E2E p50 vs baseline", "Requests/s"),
    *("Goodput/s", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "E2E p50, ms", "E2E p99, ms"),
    *("Gap p50, ms", "Gap p99, ms", "Tokens per update", "Accepted", "Tokens a round", "Depth"),
    *("Sent", "Failed", "Client loop delay p99, ms", "Client CPU, cores", "Server CPU, cores"),
)
WORDS = {
    HELPS: "better",
    COSTS: "worse",
    NO_DIFFERENCE: "no difference shown",
    TOO_FEW: "too few blocks to say",
}
_ROW_IN = 0.27  # height of a row of the forest plot
_LETTER_IN = 0.074


def summary_section(context: ReportContext) -> ReportSection:
    rows = [
        _row(context, arm, cell.name) for cell in context.analysis.cells for arm in context.arms
    ]
    blocks: list[Block] = [
        "TTFT is the time to the first token and E2E to the last, both from the time a request "
        "was due; TPOT is the time per output token after the first update. CPU is the average "
        "number of cores in use, by the client and by the server.",
        Table(_HEAD, rows, first_number=2, is_wide=True) if rows else "No load was run.",
    ]
    return ReportSection("summary", "Summary", blocks)


def _row(context: ReportContext, arm: str, cell: str) -> list[str]:
    all_of = context.of(arm, cell)
    if not all_of.sent:
        return [cell, arm, "no data", *(NOTHING for _ in _HEAD[3:])]
    speculation, shifts = all_of.speculation, context.shifts(arm, cell)
    return [
        cell,
        arm,
        with_interval(context.interval(arm, cell, "tokens_s")),
        _ratio_text(context, arm, cell, "tokens_s"),
        _ratio_text(context, arm, cell, "e2e_p50"),
        number(all_of.requests_s),
        number(all_of.goodput.requests_s if all_of.goodput else None),
        *(number(each) for each in _latencies(all_of)),
        number(all_of.tokens_per_update.mean if all_of.tokens_per_update else None),
        share(speculation.acceptance if speculation else None),
        number(speculation.tokens_a_round if speculation else None),
        number(speculation.depth if speculation else None),
        count(all_of.sent),
        count(all_of.failed + all_of.timed_out),
        number(max((shift.loop_delay_p99_ms for shift in shifts), default=None)),
        number(_cores(shifts, [shift.client_cpu_s for shift in shifts])),
        number(_cores(shifts, [shift.server_cpu_s for shift in shifts])),
    ]


def _latencies(all_of: Measures) -> Sequence[float | None]:
    def of(spread: Spread | None, percentile: str) -> float | None:
        return None if spread is None else getattr(spread, percentile)

    return (
        *(of(all_of.ttft, "p50"), of(all_of.ttft, "p99"), of(all_of.tpot, "p50")),
        *(of(all_of.e2e, "p50"), of(all_of.e2e, "p99")),
        *(of(all_of.gap, "p50"), of(all_of.gap, "p99")),
    )


def _cores(shifts: Sequence[ShiftRecord], used_s: Sequence[float | None]) -> float | None:
    """Average over whole shifts, the period their CPU time covers."""
    known = [each for each in used_s if each is not None]
    seconds = sum(shift.end_s - shift.start_s for shift in shifts)
    return sum(known) / seconds if known and len(known) == len(shifts) and seconds > 0 else None


def _ratio_text(context: ReportContext, arm: str, cell: str, quantity: str) -> str:
    if arm == context.baseline:
        return "baseline"
    found = context.contrast(arm, cell, quantity)
    return NOTHING if found is None else f"× {number(found.ratio.value)}, {WORDS[found.outcome]}"


def verdict_section(context: ReportContext) -> ReportSection | None:
    """A forest plot: the ratio to the baseline at each load, with its interval."""
    if len(context.settings) < 2:
        alone = _verdict_chart(
            context, "verdict", "", chosen_cells(context), context.answered_cells
        )
        return ReportSection("verdict", "Against the baseline", [alone]) if alone else None
    charts = []
    for place, setting in enumerate(context.settings):
        named = context.label_of(setting)
        cells = [cell for cell in context.answered_cells if setting_of(cell) == setting]
        chart = _verdict_chart(context, slug(f"verdict-{place}-{named}"), named, cells, cells)
        charts += [chart] if chart else []
    return ReportSection("verdict", "Against the baseline", folded(charts)) if charts else None


def _verdict_chart(
    context: ReportContext,
    name: str,
    named: str,
    drawn: Sequence[CellFacts],
    cells: Sequence[CellFacts],
) -> Chart | None:
    """`named` is the setting, if there are several; the table has all of `cells`."""
    baseline = label(context.baseline, 18)
    panels = [
        _forest_panel(spec.title, ratios, baseline)
        for spec in _VERDICTS
        if (ratios := _ratios(context, drawn, spec.quantity))
    ]
    if not panels:
        return None
    return Chart(
        name=name,
        title=f"Each arm against {label(context.baseline, 40)}, {named or 'load by load'}",
        panels=panels,
        table=_verdict_table(context, cells),
        note=(
            "A point is the ratio to the baseline in the same blocks, the bar its 95 % interval. "
            "Filled: the difference is significant, corrected for the number of comparisons. "
            "Hollow: it is not significant, or there are too few blocks to say."
        ),
        key=context.others,
    )


def _forest_panel(title: str, ratios: Sequence[ForestRow], baseline: str) -> Panel:
    longest = max(len(ratio.label) for ratio in ratios)
    return Panel(
        title,
        forest(ratios, f"times {baseline}"),
        width_in=4.6,
        height_in=1.0 + _ROW_IN * len(ratios),
        left_in=0.2 + _LETTER_IN * longest,
    )


def _ratios(context: ReportContext, cells: Sequence[CellFacts], quantity: str) -> list[ForestRow]:
    found = []
    for cell in cells:
        for index, arm in context.others:
            known = context.contrast(arm, cell.name, quantity)
            if known is not None and known.ratio.value is not None:
                name = f"{label(load_name(cell), 16)} · {label(arm, 16)}"
                ends = (known.ratio.low, known.ratio.high)
                found.append(ForestRow(index, name, known.ratio.value, *ends, known.is_significant))
    return found


def _verdict_table(context: ReportContext, cells: Sequence[CellFacts]) -> Table:
    rows = []
    for cell in cells:
        for _, arm in context.others:
            for name in COMPARED:
                found = context.contrast(arm, cell.name, name)
                if found is not None:
                    ratio = with_interval(found.ratio)
                    p = NOTHING if found.p_family is None else f"{found.p_family:.3f}"
                    word = WORDS[found.outcome]
                    rows.append([cell.name, arm, found.quantity.title, ratio, p, word])
    head = ["Load", "Arm", "Figure", "Ratio (95 % interval)", "p, corrected", "Verdict"]
    return Table(head, rows, 3, is_wide=True)
