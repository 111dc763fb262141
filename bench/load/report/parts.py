"""What a report is made of, before it is HTML or pictures.

Sections hold plain text only; `page` escapes all of it, so nothing a server said can become
markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.load.report.palette import Palette

if TYPE_CHECKING:
    Axes = Any  # of matplotlib, which has no types

_LABEL = 26  # characters of a name that a chart has room for


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows; columns from `first_number` on are figures, aligned to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    first_number: int = 1
    is_wide: bool = False  # its first columns stay in sight while it is scrolled


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: `draw` fills them, and their labels need this much room in the page."""

    title: str
    draw: Callable[[Axes, Palette], None]
    width_in: float = 4.4
    height_in: float = 3.0
    left_in: float = 0.68
    bottom_in: float = 0.5


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels that belong together, with the figures they show.

    `key` names the arms by the index of their colour.
    """

    name: str  # of its picture, and unique in the report
    title: str
    panels: Sequence[Panel]
    table: Table
    note: str = ""
    key: Sequence[tuple[int, str]] = ()
    columns: int = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with what belongs to each."""

    rows: Sequence[tuple[str, str]]
    code: frozenset[str] = frozenset()  # names whose values are commands


@dataclass(frozen=True, slots=True)
class Points:
    """Sentences as a list; of a `tone` that says how they are meant."""

    sentences: Sequence[str]
    tone: str = ""  # "caution" or nothing


@dataclass(frozen=True, slots=True)
class Fold:
    """Something that can be opened and closed."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False
    group: str = ""  # of the folds of one group, one is open at a time


Block = str | Table | Chart | Facts | Points | Fold


@dataclass(frozen=True, slots=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Block] = field(default_factory=list)


def clean(text: object) -> str:
    """A text on one line, without characters that are not for printing."""
    shown = "".join(char if char.isprintable() else " " for char in str(text))
    return re.sub(r" +", " ", shown).strip()


def label(text: object, limit: int = _LABEL) -> str:
    """A name that fits into a chart: the middle of a long one is left out."""
    name = clean(text)
    if len(name) <= limit:
        return name
    tail = limit // 3
    return f"{name[: limit - tail - 1]}…{name[-tail:]}"


def slug(text: object, limit: int = 40) -> str:
    """A name for files and ids."""
    return re.sub(r"[^a-z0-9]+", "-", str(text).lower())[:limit].strip("-") or "x"


def folded(charts: Sequence[Chart]) -> list[Block]:
    """Charts behind their titles, the first one open."""
    return [Fold(chart.title, [chart], place == 0) for place, chart in enumerate(charts)]


def charts_in(blocks: Sequence[Block]) -> list[Chart]:
    """Every chart of some blocks, folded ones too."""
    found: list[Chart] = []
    for block in blocks:
        if isinstance(block, Chart):
            found.append(block)
        elif isinstance(block, Fold):
            found += charts_in(block.blocks)
    return found
