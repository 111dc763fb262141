"""By category and by prompt length; and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from outrider.bench.load.report.given import Given
from outrider.bench.load.report.numbers import NOTHING, count, number, share
from outrider.bench.load.report.parts import (
    Block,
    Chart,
    Panel,
    Section,
    Table,
    label,
)
from outrider.bench.load.report.plots import Point, bars_bottom_in, grouped_bars
from outrider.bench.load.results.measures import Measures
from outrider.bench.load.runs import CellFacts

_MOST_GROUPS = 10
Split = Callable[[str, str], Mapping[str, Measures]]


def category_section(given: Given) -> Section | None:
    chart = _split_chart(given, given.analysis.by_category, "category", "Category")
    return Section("categories", "By category", [chart]) if chart else None


def length_section(given: Given) -> Section | None:
    chart = _split_chart(given, given.analysis.by_length, "length", "Prompt tokens")
    return Section("lengths", "By length of the prompt", [chart]) if chart else None


def _split_chart(given: Given, split: Split, name: str, head: str) -> Chart | None:
    """Time per output token beside the baseline's, and acceptance, of each group of prompts."""
    cell = _middle_cell(given)
    if cell is None:
        return None
    by_arm = {arm: split(arm, cell.name) for arm in given.arms}
    groups = list(dict.fromkeys(group for parts in by_arm.values() for group in parts))
    if len(groups) < 2:
        return None
    drawn = groups[:_MOST_GROUPS]
    told = [label(group, 14) for group in drawn]
    note = f"At {cell.name}, the middle one of the loads; the table has all. Groups are small, so "
    note += "take this as a hint and not as a verdict."
    if len(drawn) < len(groups):
        note += f" The first {len(drawn)} of {len(groups)} are drawn."
    panels = []
    baseline = given.baseline
    if baseline is not None:
        ratios = [
            (index, [_ratio(by_arm[arm].get(g), by_arm[baseline].get(g)) for g in drawn])
            for index, arm in given.others
        ]
        title = f"Time per output token, times that of {label(baseline, 18)}"
        panels.append(_panel(title, told, ratios, "ratio, below 1 is faster", 1.0))
    else:
        times = [(i, [_point(_tpot(by_arm[arm].get(g))) for g in drawn]) for i, arm in given.key]
        panels.append(_panel("Time per output token, p50", told, times, "ms"))
    accepted = [
        (index, [_point(_acceptance(by_arm[arm].get(g)), 100) for g in drawn])
        for index, arm in given.key
    ]
    accepted = [each for each in accepted if any(each[1])]
    if accepted:
        panels.append(_panel("Drafts accepted", told, accepted, "%"))
    return Chart(
        name=name,
        title=f"Speed and acceptance by {'category' if name == 'category' else 'prompt length'}",
        panels=panels,
        table=_split_table(given, split, head),
        note=note,
        key=given.key,
        columns=2,
    )


def _panel(
    title: str,
    groups: Sequence[str],
    bars: Sequence[tuple[int, Sequence[Point | None]]],
    unit: str,
    line_at: float | None = None,
) -> Panel:
    draw = grouped_bars(groups, bars, unit, line_at=line_at)
    return Panel(title, draw, bottom_in=bars_bottom_in(groups))


def _middle_cell(given: Given) -> CellFacts | None:
    answered = [cell for cell in given.analysis.cells if given.has_answers(cell.name)]
    return answered[(len(answered) - 1) // 2] if answered else None


def _tpot(measures: Measures | None) -> float | None:
    return measures.tpot.p50 if measures is not None and measures.tpot is not None else None


def _acceptance(measures: Measures | None) -> float | None:
    told = measures.speculation if measures is not None else None
    return told.acceptance if told is not None else None


def _ratio(arm: Measures | None, baseline: Measures | None) -> Point | None:
    mine, its = _tpot(arm), _tpot(baseline)
    return Point(0, mine / its) if mine is not None and its else None


def _point(value: float | None, scale: float = 1.0) -> Point | None:
    return None if value is None else Point(0, scale * value)


def _split_table(given: Given, split: Split, head: str) -> Table:
    rows = []
    for cell in given.analysis.cells:
        parts = {arm: split(arm, cell.name) for arm in given.arms}
        for group in dict.fromkeys(group for each in parts.values() for group in each):
            for arm in given.arms:
                found = parts[arm].get(group)
                if found is None or not found.sent:
                    continue
                beside = _ratio(found, parts.get(given.baseline or arm, {}).get(group))
                rows.append(
                    [
                        cell.name,
                        group,
                        arm,
                        count(found.sent),
                        number(found.ttft.p50 if found.ttft else None),
                        number(_tpot(found)),
                        number(beside.y if beside else None),
                        number(found.e2e.p50 if found.e2e else None),
                        share(_acceptance(found)),
                    ]
                )
    names = ["Load", head, "Arm", "Sent", "TTFT p50, ms", "TPOT p50, ms", "TPOT, times baseline"]
    return Table([*names, "E2E p50, ms", "Accepted"], rows, first_number=3, is_wide=True)


def error_section(given: Given) -> Section | None:
    """What failed, by kind; and the books."""
    kinds = _errors(given)
    books = _books(given)
    if not books.rows:
        return None
    blocks: list[Block] = []
    if kinds:
        blocks += [
            "Requests that failed, by kind. They count as sent, never as answered, and have no "
            "part in a latency.",
            _error_table(given, kinds),
        ]
    else:
        blocks.append("No request failed.")
    blocks.append("Every request that was sent ended in exactly one way:")
    return Section("errors", "Errors", [*blocks, books])


def _errors(given: Given) -> Sequence[str]:
    counted: Counter[str] = Counter()
    for cell in given.analysis.cells:
        for arm in given.arms:
            counted.update(given.of(arm, cell.name).errors)
    return [kind for kind, _ in counted.most_common()]


def _error_table(given: Given, kinds: Sequence[str]) -> Table:
    rows = []
    for kind in kinds:
        for arm in given.arms:
            counts = [given.of(arm, cell.name).errors.get(kind, 0) for cell in given.analysis.cells]
            if any(counts):
                rows.append([kind, arm, *(count(each) if each else NOTHING for each in counts)])
    head = ["Kind", "Arm", *(cell.name for cell in given.analysis.cells)]
    return Table(head, rows, first_number=2, is_wide=True)


def _books(given: Given) -> Table:
    rows = []
    for cell in given.analysis.cells:
        for arm in given.arms:
            found = given.of(arm, cell.name)
            ended = (found.sent, found.ok, found.failed, found.timed_out, found.retries)
            rows.append([cell.name, arm, *(count(each) for each in ended)])
    head = ["Load", "Arm", "Sent", "Answered", "Errors", "Timed out", "Retries"]
    return Table(head, rows, first_number=2, is_wide=True)
