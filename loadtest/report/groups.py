"""Sections by category and by prompt length, and the error section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.numbers import NOTHING, count, number, share
from outrider.loadtest.report.parts import (
    Block,
    Chart,
    Panel,
    ReportSection,
    Table,
    label,
)
from outrider.loadtest.report.plots import PlotPoint, bars_bottom_in, grouped_bars
from outrider.loadtest.results.measures import Measures
from outrider.loadtest.runs import CellFacts

_MAX_GROUPS = 10
Split = Callable[[str, str], Mapping[str, Measures]]


def category_section(context: ReportContext) -> ReportSection | None:
    chart = _split_chart(context, context.analysis.by_category, "category", "Category")
    return ReportSection("categories", "By category", [chart]) if chart else None


def length_section(context: ReportContext) -> ReportSection | None:
    chart = _split_chart(context, context.analysis.by_length, "length", "Prompt tokens")
    return ReportSection("lengths", "By length of the prompt", [chart]) if chart else None


def _split_chart(context: ReportContext, split: Split, name: str, head: str) -> Chart | None:
    """Time per output token against the baseline, and acceptance, by group of prompts."""
    cell = _middle_cell(context)
    if cell is None:
        return None
    by_arm = {arm: split(arm, cell.name) for arm in context.arms}
    groups = list(dict.fromkeys(group for parts in by_arm.values() for group in parts))
    if len(groups) < 2:
        return None
    drawn = groups[:_MAX_GROUPS]
    labels = [label(group, 14) for group in drawn]
    note = f"At {cell.name}, the middle load; the table has all loads. Groups are small, so this "
    note += "is a hint and not a verdict."
    if len(drawn) < len(groups):
        note += f" The first {len(drawn)} of {len(groups)} are drawn."
    panels = []
    baseline = context.baseline
    if baseline is not None:
        ratios = [
            (index, [_ratio(by_arm[arm].get(g), by_arm[baseline].get(g)) for g in drawn])
            for index, arm in context.others
        ]
        title = f"Time per output token, times that of {label(baseline, 18)}"
        panels.append(_panel(title, labels, ratios, "ratio, below 1 is faster", 1.0))
    else:
        times = [(i, [_point(_tpot(by_arm[arm].get(g))) for g in drawn]) for i, arm in context.key]
        panels.append(_panel("Time per output token, p50", labels, times, "ms"))
    accepted = [
        (index, [_point(_acceptance(by_arm[arm].get(g)), 100) for g in drawn])
        for index, arm in context.key
    ]
    accepted = [each for each in accepted if any(each[1])]
    if accepted:
        panels.append(_panel("Drafts accepted", labels, accepted, "%"))
    return Chart(
        name=name,
        title=f"Speed and acceptance by {'category' if name == 'category' else 'prompt length'}",
        panels=panels,
        table=_split_table(context, split, head),
        note=note,
        key=context.key,
        columns=2,
    )


def _panel(
    title: str,
    groups: Sequence[str],
    bars: Sequence[tuple[int, Sequence[PlotPoint | None]]],
    unit: str,
    line_at: float | None = None,
) -> Panel:
    draw = grouped_bars(groups, bars, unit, line_at=line_at)
    return Panel(title, draw, bottom_in=bars_bottom_in(groups))


def _middle_cell(context: ReportContext) -> CellFacts | None:
    answered = [cell for cell in context.analysis.cells if context.has_answers(cell.name)]
    return answered[(len(answered) - 1) // 2] if answered else None


def _tpot(measures: Measures | None) -> float | None:
    return measures.tpot.p50 if measures is not None and measures.tpot is not None else None


def _acceptance(measures: Measures | None) -> float | None:
    speculation = measures.speculation if measures is not None else None
    return speculation.acceptance if speculation is not None else None


def _ratio(arm: Measures | None, baseline: Measures | None) -> PlotPoint | None:
    mine, its = _tpot(arm), _tpot(baseline)
    return PlotPoint(0, mine / its) if mine is not None and its else None


def _point(value: float | None, scale: float = 1.0) -> PlotPoint | None:
    return None if value is None else PlotPoint(0, scale * value)


def _split_table(context: ReportContext, split: Split, head: str) -> Table:
    rows = []
    for cell in context.analysis.cells:
        parts = {arm: split(arm, cell.name) for arm in context.arms}
        for group in dict.fromkeys(group for each in parts.values() for group in each):
            for arm in context.arms:
                found = parts[arm].get(group)
                if found is None or not found.sent:
                    continue
                ratio = _ratio(found, parts.get(context.baseline or arm, {}).get(group))
                rows.append(
                    [
                        cell.name,
                        group,
                        arm,
                        count(found.sent),
                        number(found.ttft.p50 if found.ttft else None),
                        number(_tpot(found)),
                        number(ratio.y if ratio else None),
                        number(found.e2e.p50 if found.e2e else None),
                        share(_acceptance(found)),
                    ]
                )
    names = ["Load", head, "Arm", "Sent", "TTFT p50, ms", "TPOT p50, ms", "TPOT, times baseline"]
    return Table([*names, "E2E p50, ms", "Accepted"], rows, first_number=3, is_wide=True)


def error_section(context: ReportContext) -> ReportSection | None:
    """Failed requests by kind, and the outcome counts."""
    kinds = _errors(context)
    counts = _outcome_table(context)
    if not counts.rows:
        return None
    blocks: list[Block] = []
    if kinds:
        blocks += [
            "Failed requests by kind. They count as sent, not as completed, and no latency "
            "includes them.",
            _error_table(context, kinds),
        ]
    else:
        blocks.append("No request failed.")
    blocks.append("Every request sent has exactly one outcome:")
    return ReportSection("errors", "Errors", [*blocks, counts])


def _errors(context: ReportContext) -> Sequence[str]:
    counted: Counter[str] = Counter()
    for cell in context.analysis.cells:
        for arm in context.arms:
            counted.update(context.of(arm, cell.name).errors)
    return [kind for kind, _ in counted.most_common()]


def _error_table(context: ReportContext, kinds: Sequence[str]) -> Table:
    rows = []
    for kind in kinds:
        for arm in context.arms:
            counts = [
                context.of(arm, cell.name).errors.get(kind, 0) for cell in context.analysis.cells
            ]
            if any(counts):
                rows.append([kind, arm, *(count(each) if each else NOTHING for each in counts)])
    head = ["Kind", "Arm", *(cell.name for cell in context.analysis.cells)]
    return Table(head, rows, first_number=2, is_wide=True)


def _outcome_table(context: ReportContext) -> Table:
    rows = []
    for cell in context.analysis.cells:
        for arm in context.arms:
            found = context.of(arm, cell.name)
            ended = (found.sent, found.ok, found.failed, found.timed_out, found.retries)
            rows.append([cell.name, arm, *(count(each) for each in ended)])
    head = ["Load", "Arm", "Sent", "Answered", "Errors", "Timed out", "Retries"]
    return Table(head, rows, first_number=2, is_wide=True)
