"""Latency distributions of each load, and the run over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.numbers import count, number, share
from outrider.loadtest.report.parts import (
    Block,
    Chart,
    Fold,
    Panel,
    ReportSection,
    Table,
    label,
    slug,
)
from outrider.loadtest.report.plots import cumulative, over_time
from outrider.loadtest.results.measures import Floats, Series
from outrider.loadtest.runs import CellFacts

_SPREADS = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token"),
    ("e2e", "Whole answer"),
)
_TOKENS = ("tokens_s", "Output tokens a second", "tokens/s", 1.0, None)
_OVER_TIME = (
    ("ttft_p50_ms", "Time to first token, p50 of each second", "ms", 1.0, None),
    ("acceptance", "Drafts accepted", "%", 100.0, 105.0),
    ("depth", "Depth: drafts a round", "drafts", 1.0, None),
)
_TURN_S = 1.5  # gap in an arm's seconds that means another arm ran in between
_MAX_MARKS = 14
_MAX_ROWS = 400  # of a table whose length grows with the run
_MAX_LOADS = 8  # with their own charts; a sweep may have dozens
_QUANTILES = (10, 25, 50, 75, 90, 95, 99)


def spread_section(context: ReportContext) -> ReportSection | None:
    """Cumulative distributions, one fold per load."""
    cells = chosen_cells(context)
    folds: list[Block] = [
        Fold(
            summary=cell.name,
            blocks=[_spread_chart(context, cell)],
            is_open=place == 0,
            group="spread",
        )
        for place, cell in enumerate(cells)
    ]
    if not folds:
        return None
    opening = _left_out(context, cells)
    return ReportSection("spread", "How latencies are spread", [*opening, *folds])


def chosen_cells(context: ReportContext, limit: int = _MAX_LOADS) -> list[CellFacts]:
    """Loads with completed requests, evenly thinned to `limit`, first and last included."""
    answered = context.answered_cells
    if len(answered) <= limit:
        return answered
    places = np.linspace(0, len(answered) - 1, limit).round().astype(int)
    return [answered[place] for place in places]


def _left_out(context: ReportContext, shown: Sequence[CellFacts]) -> list[Block]:
    answered = len(context.answered_cells)
    if answered == len(shown):
        return []
    return [f"{len(shown)} of {answered} loads are drawn; requests.jsonl has all of them."]


def _spread_chart(context: ReportContext, cell: CellFacts) -> Chart:
    def panel(measure: str, title: str) -> Panel:
        values = [
            (index, context.analysis.values(arm, cell.name, measure)) for index, arm in context.key
        ]
        return Panel(title, cumulative(values, "ms"))

    rows = []
    for measure, title in _SPREADS:
        for arm in context.arms:
            values = context.analysis.values(arm, cell.name, measure)
            known = np.percentile(values, _QUANTILES) if values.size else [None] * len(_QUANTILES)
            rows.append([title, arm, count(values.size), *(number(each) for each in known)])
    head = ["Measure, ms", "Arm", "Requests", *(f"p{each}" for each in _QUANTILES)]
    return Chart(
        name=slug(f"spread-{context.analysis.cells.index(cell)}-{cell.name}"),
        title=f"Share of requests answered within a time, at {cell.name}",
        panels=[panel(measure, title) for measure, title in _SPREADS],
        table=Table(head, rows, first_number=2, is_wide=True),
        key=context.key,
    )


def time_section(context: ReportContext) -> ReportSection | None:
    """The whole run second by second; each arm's line shows when it ran."""
    series = {
        arm: [context.analysis.series(arm, cell.name) for cell in context.analysis.cells]
        for arm in context.arms
    }
    starts = [each.at_s[0] for of_arm in series.values() for each in of_arm if each.at_s.size]
    if not starts:
        return None
    start_s = float(min(starts))
    running = ("running", "Requests running, from the server", "requests", 1.0, None)
    if not _is_known(series, "running"):
        running = ("in_flight", "Requests in flight, from the clients", "requests", 1.0, None)
    shown = (_TOKENS, running, *_OVER_TIME)
    loads = _load_starts(context, start_s)
    panels = []
    for field, title, unit, scale, top in shown:
        lines = [
            (index, *_joined(series[arm], field, start_s, scale)) for index, arm in context.key
        ]
        lines = [line for line in lines if np.isfinite(line[2]).any()]
        if lines:
            draw = over_time(lines, unit, top=top, x_label="minutes of the run", marks=loads)
            panels.append(Panel(title, draw, 13.4, 2.2))
    chart = Chart(
        name="time",
        title="The run second by second",
        panels=panels,
        table=_block_table(context),
        note=(
            "Arms took turns: each line shows when its arm was measured, warm-up included. "
            "Vertical lines mark changes of load. The table has each block."
        ),
        key=context.key,
        columns=1,
    )
    return ReportSection("time", "Over time", [chart])


def _joined(
    pieces: Sequence[Series], field: str, start_s: float, scale: float
) -> tuple[Floats, Floats]:
    """Minutes and values of an arm under all loads, with a gap wherever another arm ran."""
    at_s = np.concatenate([each.at_s for each in pieces])
    values = scale * np.concatenate([getattr(each, field) for each in pieces])
    order = np.argsort(at_s, kind="stable")
    at_s, values = at_s[order], values[order]
    breaks = np.flatnonzero(np.diff(at_s) > _TURN_S) + 1
    return (np.insert(at_s, breaks, np.nan) - start_s) / 60, np.insert(values, breaks, np.nan)


def _load_starts(context: ReportContext, start_s: float) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    before = None
    for shift in sorted(context.analysis.shifts, key=lambda each: each.start_s):
        if shift.cell != before:
            found.append(((shift.start_s - start_s) / 60, label(shift.cell, 16)))
        before = shift.cell
    return found if len(found) <= _MAX_MARKS else []


def _is_known(series: dict[str, list[Series]], field: str) -> bool:
    every = (each for of_arm in series.values() for each in of_arm)
    return any(np.isfinite(getattr(each, field)).any() for each in every)


def _block_table(context: ReportContext) -> Table:
    rows = []
    for cell in context.answered_cells:
        for arm in context.arms:
            for block in context.analysis.blocks(arm, cell.name):
                speculation = block.speculation
                figures = (
                    block.output_tokens_s,
                    block.ttft.p50 if block.ttft else None,
                    block.e2e.p50 if block.e2e else None,
                    speculation.depth if speculation else None,
                )
                accepted = share(speculation.acceptance if speculation else None)
                shown = (count(block.sent), *(number(each) for each in figures), accepted)
                rows.append([cell.name, arm, str(block.block), *shown])
    head = ["Load", "Arm", "Block", "Sent", "Tokens/s", "TTFT p50, ms", "E2E p50, ms", "Depth"]
    return Table([*head, "Accepted"], rows[:_MAX_ROWS], first_number=2, is_wide=True)
