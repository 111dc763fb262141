"""Under one load: how latencies are spread, and what happened over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.bench.load.report.given import Given
from outrider.bench.load.report.numbers import count, number, share
from outrider.bench.load.report.parts import Block, Chart, Fold, Panel, Section, Table, label, slug
from outrider.bench.load.report.plots import cumulative, over_time
from outrider.bench.load.results.measures import Floats, Series
from outrider.bench.load.runs import CellFacts

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
_TURN_S = 1.5  # between two seconds of an arm, from which on another had its turn
_MOST_MARKS = 14
_MOST_ROWS = 400  # of a table that grows with the run
_MOST_LOADS = 8  # with charts of their own; a sweep may have dozens
_QUANTILES = (10, 25, 50, 75, 90, 95, 99)


def spread_section(given: Given) -> Section | None:
    """The cumulative distributions, a fold for each load."""
    cells = chosen_cells(given)
    folds: list[Block] = [
        Fold(
            summary=cell.name,
            blocks=[_spread_chart(given, cell)],
            is_open=place == 0,
            group="spread",
        )
        for place, cell in enumerate(cells)
    ]
    if not folds:
        return None
    opening = _left_out(given, cells)
    return Section("spread", "How latencies are spread", [*opening, *folds])


def chosen_cells(given: Given, most: int = _MOST_LOADS) -> list[CellFacts]:
    """Loads with answers; of many, some, the first and the last among them."""
    answered = given.answered_cells
    if len(answered) <= most:
        return answered
    places = np.linspace(0, len(answered) - 1, most).round().astype(int)
    return [answered[place] for place in places]


def _left_out(given: Given, shown: Sequence[CellFacts]) -> list[Block]:
    answered = len(given.answered_cells)
    if answered == len(shown):
        return []
    return [f"{len(shown)} of {answered} loads are drawn; requests.jsonl has all of them."]


def _spread_chart(given: Given, cell: CellFacts) -> Chart:
    def panel(measure: str, title: str) -> Panel:
        values = [
            (index, given.analysis.values(arm, cell.name, measure)) for index, arm in given.key
        ]
        return Panel(title, cumulative(values, "ms"))

    rows = []
    for measure, title in _SPREADS:
        for arm in given.arms:
            values = given.analysis.values(arm, cell.name, measure)
            known = np.percentile(values, _QUANTILES) if values.size else [None] * len(_QUANTILES)
            rows.append([title, arm, count(values.size), *(number(each) for each in known)])
    head = ["Measure, ms", "Arm", "Requests", *(f"p{each}" for each in _QUANTILES)]
    return Chart(
        name=slug(f"spread-{given.analysis.cells.index(cell)}-{cell.name}"),
        title=f"Share of requests answered within a time, at {cell.name}",
        panels=[panel(measure, title) for measure, title in _SPREADS],
        table=Table(head, rows, first_number=2, is_wide=True),
        key=given.key,
    )


def time_section(given: Given) -> Section | None:
    """The whole run second by second: arms take turns, so each shows where it ran."""
    series = {
        arm: [given.analysis.series(arm, cell.name) for cell in given.analysis.cells]
        for arm in given.arms
    }
    starts = [each.at_s[0] for of_arm in series.values() for each in of_arm if each.at_s.size]
    if not starts:
        return None
    start_s = float(min(starts))
    running = ("running", "Requests running, as the server tells", "requests", 1.0, None)
    if not _is_known(series, "running"):
        running = ("in_flight", "Requests under way, as clients saw it", "requests", 1.0, None)
    shown = (_TOKENS, running, *_OVER_TIME)
    loads = _load_starts(given, start_s)
    panels = []
    for field, title, unit, scale, top in shown:
        lines = [(index, *_joined(series[arm], field, start_s, scale)) for index, arm in given.key]
        lines = [line for line in lines if np.isfinite(line[2]).any()]
        if lines:
            draw = over_time(lines, unit, top=top, x_label="minutes of the run", marks=loads)
            panels.append(Panel(title, draw, 13.4, 2.2))
    chart = Chart(
        name="time",
        title="The run second by second",
        panels=panels,
        table=_block_table(given),
        note=(
            "Arms took turns, so each line shows where its arm was being measured, warm-up "
            "included. Upright lines are where the load changes. The table has each block."
        ),
        key=given.key,
        columns=1,
    )
    return Section("time", "Over time", [chart])


def _joined(
    pieces: Sequence[Series], field: str, start_s: float, scale: float
) -> tuple[Floats, Floats]:
    """Minutes and values of an arm under all loads, with a gap wherever another had its turn."""
    at_s = np.concatenate([each.at_s for each in pieces])
    values = scale * np.concatenate([getattr(each, field) for each in pieces])
    order = np.argsort(at_s, kind="stable")
    at_s, values = at_s[order], values[order]
    breaks = np.flatnonzero(np.diff(at_s) > _TURN_S) + 1
    return (np.insert(at_s, breaks, np.nan) - start_s) / 60, np.insert(values, breaks, np.nan)


def _load_starts(given: Given, start_s: float) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    before = None
    for shift in sorted(given.analysis.shifts, key=lambda each: each.start_s):
        if shift.cell != before:
            found.append(((shift.start_s - start_s) / 60, label(shift.cell, 16)))
        before = shift.cell
    return found if len(found) <= _MOST_MARKS else []


def _is_known(series: dict[str, list[Series]], field: str) -> bool:
    every = (each for of_arm in series.values() for each in of_arm)
    return any(np.isfinite(getattr(each, field)).any() for each in every)


def _block_table(given: Given) -> Table:
    rows = []
    for cell in given.answered_cells:
        for arm in given.arms:
            for block in given.analysis.blocks(arm, cell.name):
                told = block.speculation
                figures = (
                    block.output_tokens_s,
                    block.ttft.p50 if block.ttft else None,
                    block.e2e.p50 if block.e2e else None,
                    told.depth if told else None,
                )
                accepted = share(told.acceptance if told else None)
                shown = (count(block.sent), *(number(each) for each in figures), accepted)
                rows.append([cell.name, arm, str(block.block), *shown])
    head = ["Load", "Arm", "Block", "Sent", "Tokens/s", "TTFT p50, ms", "E2E p50, ms", "Depth"]
    return Table([*head, "Accepted"], rows[:_MOST_ROWS], first_number=2, is_wide=True)
