"""What speculation did: drafts accepted by position, tokens in an update."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bench.load.report.details import chosen_cells
from outrider.bench.load.report.given import Given
from outrider.bench.load.report.numbers import NOTHING, count, number, share
from outrider.bench.load.report.parts import Chart, Panel, Section, Table
from outrider.bench.load.report.plots import Line, Point, grouped_bars, survival
from outrider.bench.load.runs import CellFacts

_PANELS = 3  # loads drawn; the tables have all


def acceptance_section(given: Given) -> Section | None:
    """By position: how often at least j drafts of a round were accepted."""
    told = {
        (arm, cell.name): given.of(arm, cell.name).speculation
        for cell in given.analysis.cells
        for arm in given.arms
    }
    known = {key: each for key, each in told.items() if each is not None and each.survival}
    if not known:
        return None
    cells = [
        cell for cell in chosen_cells(given, _PANELS) if any(key[1] == cell.name for key in known)
    ]
    deepest = max(len(each.survival) for each in known.values())

    def panel(cell: CellFacts) -> Panel:
        lines = [
            Line(
                index, [Point(j, 100 * y) for j, y in enumerate(known[arm, cell.name].survival, 1)]
            )
            for index, arm in given.key
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
        note="Share of rounds that accepted at least so many drafts.",
        key=[(index, arm) for index, arm in given.key if arm in arms],
    )
    return Section("acceptance", "Acceptance by position", [chart])


def updates_section(given: Given) -> Section | None:
    """Tokens per update, and why the gap between updates misleads."""
    cells = [
        cell
        for cell in chosen_cells(given, _PANELS)
        if any(given.of(arm, cell.name).updates_by_tokens for arm in given.arms)
    ]
    if not cells:
        return None
    why = (
        "Under speculation one update carries several tokens. The time between updates, which "
        "other tools call inter-token latency, is then longer while each token comes sooner: two "
        "arms must not be compared by it. Time per output token divides by the tokens and is the "
        "figure to compare; the gap says how smooth the text looks."
    )
    return Section("updates", "Tokens per update", [why, _gap_table(given), _updates(given, cells)])


def _gap_table(given: Given) -> Table:
    rows = []
    for cell in given.analysis.cells:
        for arm in given.arms:
            all_of = given.of(arm, cell.name)
            if all_of.gap is None:
                continue
            told = (all_of.gap, all_of.itl, all_of.tpot)
            per_update = all_of.tokens_per_update
            rows.append(
                [
                    cell.name,
                    arm,
                    number(per_update.mean if per_update else None),
                    *(number(each.p50 if each else None) for each in told),
                    *(number(each.p99 if each else None) for each in told),
                ]
            )
    names = ("Gap between updates", "Share of a token in its gap", "Time per output token")
    head = ["Load", "Arm", "Tokens per update"]
    head += [f"{name}, {p}, ms" for p in ("p50", "p99") for name in names]
    return Table(head, rows, first_number=2, is_wide=True)


def _updates(given: Given, cells: Sequence[CellFacts]) -> Chart:
    most = max(
        max(given.of(arm, cell.name).updates_by_tokens, default=1)
        for cell in cells
        for arm in given.arms
    )
    edges = _edges(most)

    def shares(arm: str, cell: CellFacts) -> list[float | None]:
        counted = given.of(arm, cell.name).updates_by_tokens
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
            (index, [None if y is None else Point(0, y) for y in shares(arm, cell)])
            for index, arm in given.key
        ]
        draw = grouped_bars(groups, bars, "updates, %", x_label="tokens in the update")
        return Panel(f"At {cell.name}", draw)

    rows = [
        [cell.name, arm, *(NOTHING if y is None else f"{y:.1f} %" for y in shares(arm, cell))]
        for cell in cells
        for arm in given.arms
    ]
    return Chart(
        name="updates",
        title="How many tokens an update carried",
        panels=[panel(cell) for cell in cells],
        table=Table(["Load", "Arm", *groups], rows, first_number=2, is_wide=True),
        key=given.key,
    )


def _edges(most: int) -> list[tuple[int, int]]:
    """Sizes of updates, single ones first and then in growing groups: at most about ten."""
    found: list[tuple[int, int]] = []
    low = 1
    while low <= most:
        high = low if low <= 8 else 2 * low - 2
        found.append((low, min(high, max(most, low))))
        low = high + 1
    return found
