"""The document model of a report, before HTML and pictures.

Sections contain plain text only. `page` escapes all of it, so no text of a server becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.loadtest.report.palette import Palette

if TYPE_CHECKING:
    Axes = Any  # of matplotlib, which has no types

_LABEL = 26  # characters of a name that a chart has room for


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; columns from `first_number` on are right-aligned numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    first_number: int = 1
    is_wide: bool = False  # its first columns stay visible while scrolling


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes, filled by `draw`, with its size and margins."""

    title: str
    draw: Callable[[Axes, Palette], None]
    width_in: float = 4.4
    height_in: float = 3.0
    left_in: float = 0.68
    bottom_in: float = 0.5


@dataclass(frozen=True, slots=True)
class Chart:
    """A group of panels and the table of their figures.

    `key` maps colour indices to the names of arms.
    """

    name: str  # of its picture; unique in the report
    title: str
    panels: Sequence[Panel]
    table: Table
    note: str = ""
    key: Sequence[tuple[int, str]] = ()
    columns: int = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """Name-value pairs."""

    rows: Sequence[tuple[str, str]]
    code: frozenset[str] = frozenset()  # names whose values are commands


@dataclass(frozen=True, slots=True)
class Points:
    """A list of sentences, styled by `tone`."""

    sentences: Sequence[str]
    tone: str = ""  # "caution" or nothing


@dataclass(frozen=True, slots=True)
class Fold:
    """A collapsible group of blocks."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False
    group: str = ""  # one fold per group is open at a time


Block = str | Table | Chart | Facts | Points | Fold


@dataclass(frozen=True, slots=True)
class ReportSection:
    id: str
    title: str
    blocks: Sequence[Block] = field(default_factory=list)


def clean(text: object) -> str:
    """A text on one line, without unprintable characters."""
    shown = "".join(char if char.isprintable() else " " for char in str(text))
    return re.sub(r" +", " ", shown).strip()


def label(text: object, limit: int = _LABEL) -> str:
    """A name short enough for a chart: a long one loses its middle."""
    name = clean(text)
    if len(name) <= limit:
        return name
    tail = limit // 3
    return f"{name[: limit - tail - 1]}…{name[-tail:]}"


def slug(text: object, limit: int = 40) -> str:
    """A name usable in file names and ids."""
    return re.sub(r"[^a-z0-9]+", "-", str(text).lower())[:limit].strip("-") or "x"


def folded(charts: Sequence[Chart]) -> list[Block]:
    """Charts in folds named by their titles, the first one open."""
    return [Fold(chart.title, [chart], place == 0) for place, chart in enumerate(charts)]


def charts_in(blocks: Sequence[Block]) -> list[Chart]:
    """All charts in the blocks, including folded ones."""
    found: list[Chart] = []
    for block in blocks:
        if isinstance(block, Chart):
            found.append(block)
        elif isinstance(block, Fold):
            found += charts_in(block.blocks)
    return found
