"""Speculation: acceptance by position, and tokens per update."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.details import chosen_cells
from outrider.loadtest.report.numbers import NOTHING, count, number, share
from outrider.loadtest.report.parts import Chart, Panel, ReportSection, Table
from outrider.loadtest.report.plots import Line, PlotPoint, grouped_bars, survival
from outrider.loadtest.runs import CellFacts

_PANELS = 3  # loads drawn; the tables have all of them


def acceptance_section(context: ReportContext) -> ReportSection | None:
    """Acceptance by position: the share of rounds that accepted at least j drafts."""
    by_cell = {
        (arm, cell.name): context.of(arm, cell.name).speculation
        for cell in context.analysis.cells
        for arm in context.arms
    }
    known = {key: each for key, each in by_cell.items() if each is not None and each.survival}
    if not known:
        return None
    cells = [
        cell for cell in chosen_cells(context, _PANELS) if any(key[1] == cell.name for key in known)
    ]
    deepest = max(len(each.survival) for each in known.values())

    def panel(cell: CellFacts) -> Panel:
        lines = [
            Line(
                index,
                [PlotPoint(j, 100 * y) for j, y in enumerate(known[arm, cell.name].survival, 1)],
            )
            for index, arm in context.key
            if (arm, cell.name) in known
        ]
        return Panel(f"At {cell.name}", survival(lines, deepest))

    rows = [
        [
            cell,
            arm,
            count(each.rounds),
            share(each.acceptance),
            *(
                share(each.survival[j]) if j < len(each.survival) else NOTHING
                for j in range(deepest)
            ),
        ]
        for (arm, cell), each in known.items()
    ]
    positions = [f"≥ {j}" for j in range(1, deepest + 1)]
    arms = {arm for arm, _ in known}
    chart = Chart(
        name="acceptance",
        title="How many drafts in a row the target accepted",
        panels=[panel(cell) for cell in cells],
        table=Table(["Load", "Arm", "Rounds", "Accepted", *positions], rows, 2, is_wide=True),
        note="Share of rounds that accepted at least that number of drafts.",
        key=[(index, arm) for index, arm in context.key if arm in arms],
    )
    return ReportSection("acceptance", "Acceptance by position", [chart])


def updates_section(context: ReportContext) -> ReportSection | None:
    """Tokens per update, and why the gap between updates is misleading."""
    cells = [
        cell
        for cell in chosen_cells(context, _PANELS)
        if any(context.of(arm, cell.name).updates_by_tokens for arm in context.arms)
    ]
    if not cells:
        return None
    why = (
        "With speculation one update carries several tokens. The time between updates, which "
        "other tools call inter-token latency, is then longer while each token arrives sooner: do "
        "not compare arms by it. Compare time per output token, which divides by the tokens; the "
        "gap shows how smooth the stream is."
    )
    return ReportSection(
        "updates", "Tokens per update", [why, _gap_table(context), _updates(context, cells)]
    )


def _gap_table(context: ReportContext) -> Table:
    rows = []
    for cell in context.analysis.cells:
        for arm in context.arms:
            all_of = context.of(arm, cell.name)
            if all_of.gap is None:
                continue
            spreads = (all_of.gap, all_of.itl, all_of.tpot)
            per_update = all_of.tokens_per_update
            rows.append(
                [
                    cell.name,
                    arm,
                    number(per_update.mean if per_update else None),
                    *(number(each.p50 if each else None) for each in spreads),
                    *(number(each.p99 if each else None) for each in spreads),
                ]
            )
    names = ("Gap between updates", "Share of a token in its gap", "Time per output token")
    head = ["Load", "Arm", "Tokens per update"]
    head += [f"{name}, {p}, ms" for p in ("p50", "p99") for name in names]
    return Table(head, rows, first_number=2, is_wide=True)


def _updates(context: ReportContext, cells: Sequence[CellFacts]) -> Chart:
    largest = max(
        max(context.of(arm, cell.name).updates_by_tokens, default=1)
        for cell in cells
        for arm in context.arms
    )
    edges = _edges(largest)

    def shares(arm: str, cell: CellFacts) -> list[float | None]:
        counted = context.of(arm, cell.name).updates_by_tokens
        total = sum(counted.values())
        return [
            100 * sum(n for size, n in counted.items() if low <= size <= high) / total
            if total
            else None
            for low, high in edges
        ]

    groups = [str(low) if low == high else f"{low}–{high}" for low, high in edges]

    def panel(cell: CellFacts) -> Panel:
        bars = [
            (index, [None if y is None else PlotPoint(0, y) for y in shares(arm, cell)])
            for index, arm in context.key
        ]
        draw = grouped_bars(groups, bars, "updates, %", x_label="tokens in the update")
        return Panel(f"At {cell.name}", draw)

    rows = [
        [cell.name, arm, *(NOTHING if y is None else f"{y:.1f} %" for y in shares(arm, cell))]
        for cell in cells
        for arm in context.arms
    ]
    return Chart(
        name="updates",
        title="How many tokens an update carried",
        panels=[panel(cell) for cell in cells],
        table=Table(["Load", "Arm", *groups], rows, first_number=2, is_wide=True),
        key=context.key,
    )


def _edges(largest: int) -> list[tuple[int, int]]:
    """Bins of update sizes: single sizes first, then growing ranges."""
    found: list[tuple[int, int]] = []
    low = 1
    while low <= largest:
        high = low if low <= 8 else 2 * low - 2
        found.append((low, min(high, max(largest, low))))
        low = high + 1
    return found
