"""Renders a report as one HTML file. All text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from outrider import __version__
from outrider.loadtest.report import drawing
from outrider.loadtest.report.parts import (
    Block,
    Chart,
    Facts,
    Fold,
    Points,
    ReportSection,
    Table,
    clean,
)
from outrider.loadtest.report.style import SCRIPT, style_sheet

_TONES = ("better", "worse")
_LONG_CELL = 24  # letters; longer cells are wider
_LONG_TITLE = 90  # letters; longer titles are smaller


def page(title: str, kind: str, sections: Sequence[ReportSection], footer: str) -> str:
    """The whole file; the first section, the finding, follows the title."""
    opening, *others = sections
    long = ' class="long"' if len(title) > _LONG_TITLE else ""
    links = "".join(f'<a href="#{_e(each.id)}">{_e(each.title)}</a>' for each in others)
    body = "".join(
        f'<section id="{_e(each.id)}"><h2>{_e(each.title)}</h2>{blocks(each.blocks)}</section>'
        for each in others
    )
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="generator" content="outrider {_e(__version__)}">'
        f"<title>{_e(title)}</title><style>{style_sheet()}</style></head>\n"
        '<body><div class="sheet"><header class="top"><div>'
        f'<p class="kind">{_e(kind)}</p><h1{long}>{_e(title)}</h1></div>'
        '<button class="theme" type="button">Light / dark</button></header>'
        f'<section id="{_e(opening.id)}">{blocks(opening.blocks)}</section>'
        f"<nav>{links}</nav>\n{body}\n"
        f"<footer>{_e(footer)}</footer></div><script>{SCRIPT}</script></body></html>\n"
    )


def blocks(content: Sequence[Block]) -> str:
    return "\n".join(_block(each) for each in content)


def _block(block: Block) -> str:
    match block:
        case str():
            return f"<p>{_e(block)}</p>"
        case Table():
            return _table(block)
        case Chart():
            return _chart(block)
        case Facts():
            return _facts(block)
        case Points():
            items = "".join(f"<li>{_e(each)}</li>" for each in block.sentences)
            return f'<ul class="points {_e(block.tone)}">{items}</ul>'
        case Fold():
            return _fold(block)


def _fold(fold: Fold) -> str:
    opened = " open" if fold.is_open else ""
    group = f' name="{_e(fold.group)}"' if fold.group else ""
    return (
        f'<details class="part"{group}{opened}><summary>{_e(fold.summary)}</summary>'
        f"{blocks(fold.blocks)}</details>"
    )


def _facts(facts: Facts) -> str:
    rows = []
    for name, value in facts.rows:
        shown = f"<code>{_e(value)}</code>" if name in facts.code else _e(value)
        rows.append(f"<dt>{_e(name)}</dt><dd>{shown}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _table(table: Table) -> str:
    head = "".join(
        f"<th{_number_class(column, table)}>{_e(name)}</th>"
        for column, name in enumerate(table.head)
    )
    rows, before = [], None
    for row in table.rows:
        # In a wide table the first column groups rows; a rule marks each change.
        first = ' class="first"' if table.is_wide and before not in (None, row[0]) else ""
        before = row[0]
        cells = "".join(_cell(value, column, table) for column, value in enumerate(row))
        rows.append(f"<tr{first}>{cells}</tr>")
    wide = " wide" if table.is_wide else ""
    return (
        f'<div class="scroll{wide}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: str, column: int, table: Table) -> str:
    # Words state significance; the colour only repeats it.
    tone = next((tone for tone in _TONES if value.endswith(tone)), None)
    is_number = column >= table.first_number
    long = "long" if not is_number and len(value) > _LONG_CELL else ""
    classes = " ".join(filter(None, ("n" if is_number else "", long, tone)))
    return f'<td class="{classes}">{_e(value)}</td>' if classes else f"<td>{_e(value)}</td>"


def _number_class(column: int, table: Table) -> str:
    return ' class="n"' if column >= table.first_number else ""


def _chart(chart: Chart) -> str:
    drawn = "".join(
        f'<div role="img" aria-label="{_e(chart.title)}: {_e(panel.title)}">'
        f"{drawing.svg(chart, panel, number)}</div>"
        for number, panel in enumerate(chart.panels)
    )
    note = f'<p class="note">{_e(chart.note)}</p>' if chart.note else ""
    shape = " few" if len(chart.panels) < 3 else ""
    if chart.columns == 1:
        shape = " long"
    return (
        f'<figure style="margin:0" id="chart-{_e(chart.name)}"><h3>{_e(chart.title)}</h3>{note}'
        f'{_key(chart)}<div class="panels{shape}">{drawn}</div></figure>'
        f"<details><summary>The figures as a table</summary>{_table(chart.table)}</details>"
    )


def _key(chart: Chart) -> str:
    if not chart.key:
        return ""
    items = "".join(
        f"<li>{drawing.key_svg(index)}<span>{_e(name)}</span></li>" for index, name in chart.key
    )
    return f'<ul class="key">{items}</ul>'


def _e(text: object) -> str:
    return escape(clean(text), quote=True)
