"""Summary table of a run for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.measures import Measures, Spread

WIDTH = 80
_GAP = 2  # between columns
_WIDEST_NAME = 22  # of a load or an arm in a narrow terminal; longer ones wrap
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str  # on two lines at most, with the unit
    of: Callable[[Measures], str]
    rank: int = 0  # the highest is dropped first if there is no room; 0 never is


def summary(analysis: Analysis, width: int = WIDTH) -> Table:
    """A row per arm and load, with as many columns as fit into `width`."""
    ran = [
        (cell.name, arm, figures)
        for cell in analysis.cells
        for arm in analysis.arms
        if (figures := analysis.of(arm, cell.name)).sent
    ]
    widest = max(_WIDEST_NAME, width // 4)
    loads, arms = ([row[0] for row in ran], [row[1] for row in ran])
    names = sum(_GAP + min(widest, max(map(len, each), default=0)) for each in (loads, arms))
    columns = _that_fit([figures for _, _, figures in ran], max(0, width - names))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name in ("load", "arm"):
        table.add_column(f"\n{name}", max_width=widest, overflow="fold")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    before = None
    for cell, arm, figures in ran:
        if before not in (None, cell):
            table.add_section()
        shown = "" if cell == before else cell
        table.add_row(Text(shown), Text(arm), *(Text(column.of(figures)) for column in columns))
        before = cell
    return table


def _that_fit(ran: list[Measures], room: int) -> list[_Column]:
    """The columns that fit; optional columns without any value are dropped too."""
    columns = [
        column
        for column in _COLUMNS
        if not column.rank or any(column.of(each) != _NOTHING for each in ran)
    ]
    while columns and sum(_width(column, ran) for column in columns) > room + _GAP:
        least = max(columns, key=lambda column: column.rank)
        if not least.rank:
            break
        columns.remove(least)
    return columns


def _width(column: _Column, ran: list[Measures]) -> int:
    texts = [*column.heading.splitlines(), *(column.of(each) for each in ran)]
    return _GAP + max(map(len, texts))


def _tokens_a_round(figures: Measures) -> str:
    return _number(figures.speculation.tokens_a_round if figures.speculation else None, 2)


def _acceptance(figures: Measures) -> str:
    acceptance = figures.speculation.acceptance if figures.speculation else None
    return _NOTHING if acceptance is None else f"{acceptance:.0%}"


def _tokens_per_update(figures: Measures) -> str:
    return _number(figures.tokens_per_update.mean if figures.tokens_per_update else None, 2)


def _goodput(figures: Measures) -> str:
    share = figures.goodput.share if figures.goodput else None
    return _NOTHING if share is None else f"{share:.0%}"


def _number(value: float | None, decimals: int = 1) -> str:
    return _NOTHING if value is None else f"{value:,.{decimals}f}"


def _two(spread: Spread | None) -> str:
    return _NOTHING if spread is None else f"{spread.p50:,.0f} / {spread.p99:,.0f}"


_COLUMNS = (
    _Column("sent\n/ failed", lambda each: f"{each.sent} / {each.failed + each.timed_out}"),
    _Column("tokens\n/s", lambda each: _number(each.output_tokens_s)),
    _Column("first token\np50 / p99 ms", lambda each: _two(each.ttft)),
    _Column("a token\np50 ms", lambda each: _number(each.tpot.p50 if each.tpot else None), 1),
    _Column("answer\np50 / p99 ms", lambda each: _two(each.e2e)),
    _Column("within\nthe SLO", _goodput, 2),
    _Column("drafts\naccepted", _acceptance, 3),
    _Column("tokens\na round", _tokens_a_round, 4),
    _Column("tokens\nan update", _tokens_per_update, 5),
)
