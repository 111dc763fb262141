"""Renders charts: SVG for the page, PNG for everything else."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle

from outrider.loadtest.report import palette as palettes
from outrider.loadtest.report.palette import LIGHT, SENTINEL, Palette
from outrider.loadtest.report.parts import Chart, Panel, label

_PNG_DPI = 150
_RIGHT_IN, _TOP_IN = 0.14, 0.36
_LINE_IN, _KEY_ROW_IN, _KEY_ENTRY_IN = 0.24, 0.27, 2.6
_NO_METADATA: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
# Parts of an SVG that the page's style sheet sets or that are invisible.
_LEFT_OUT = (
    r"<!--.*?-->",
    r"<metadata>.*?</metadata>",
    r"<defs>\s*<style.*?</style>\s*</defs>",
    r'<g id="patch_1">.*?</g>',
    r" font-family: 'DejaVu Sans';",
    r' transform="rotate\(-0 [^"]*"',
)
_SENTINEL = r"#fe0[12][0-9a-f]{2}"
_VARIABLES = {colour: f"var({name})" for name, colour in palettes.variables(SENTINEL).items()}


@contextmanager
def _style(palette: Palette) -> Iterator[None]:
    rc_params: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "outrider",
        "text.parse_math": False,  # a name may contain dollar signs
        "font.family": ["DejaVu Sans"],  # ships with matplotlib: pictures are reproducible
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.titlecolor": palette.ink,
        "axes.titley": 1.0,
        "axes.labelsize": 9.5,
        "axes.labelcolor": palette.muted,
        "axes.facecolor": "none",
        "axes.edgecolor": palette.grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": palette.grid,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        **{f"{axis}.color": palette.grid for axis in ("xtick", "ytick")},
        **{f"{axis}.labelcolor": palette.muted for axis in ("xtick", "ytick")},
        **{f"{axis}.minor.size": 0 for axis in ("xtick", "ytick")},
    }
    with matplotlib.rc_context(rc_params), warnings.catch_warnings():
        # Glyphs the font lacks show as boxes in a PNG and correctly in the page.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def svg(chart: Chart, panel: Panel, number: int) -> str:
    """One panel as inline SVG, with the CSS variables of the page."""
    with _style(SENTINEL):
        figure = Figure(figsize=(panel.width_in, panel.height_in))
        figure.patch.set_alpha(0)
        _place(figure, panel, 0.0, 0.0, SENTINEL)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata=_NO_METADATA)
    return _for_page(drawn.getvalue(), f"{chart.name}-{number}-")


def save_png(chart: Chart, path: Path, *, title: str | None = None) -> None:
    """The whole chart as one light-theme PNG, with its title and its key."""
    columns = min(chart.columns, len(chart.panels))
    cell_width = max(panel.width_in for panel in chart.panels)
    cell_height = max(panel.height_in for panel in chart.panels)
    width = columns * cell_width
    heading = textwrap.wrap(
        title or chart.title, max(30, int(width * 9)), max_lines=4, placeholder=" …"
    )
    names = [(index, label(name, 30)) for index, name in chart.key]
    key_columns = max(1, int(width / _KEY_ENTRY_IN))
    key_in = _KEY_ROW_IN * math.ceil(len(names) / key_columns) + 0.1
    top_in = _LINE_IN * len(heading) + 0.25
    height = math.ceil(len(chart.panels) / columns) * cell_height + key_in + top_in
    with _style(LIGHT):
        figure = Figure(figsize=(width, height), facecolor=LIGHT.page)
        figure.text(
            0.15 / width,
            1 - 0.15 / height,
            "\n".join(heading),
            va="top",
            color=LIGHT.ink,
            fontsize=12,
            weight="bold",
        )
        for place, panel in enumerate(chart.panels):
            row, column = divmod(place, columns)
            bottom = height - top_in - row * cell_height - panel.height_in
            _place(figure, panel, column * cell_width, bottom, LIGHT)
        if names:
            figure.legend(
                handles=[_handle(index, name) for index, name in names],
                loc="lower left",
                bbox_to_anchor=(0.1 / width, 0),
                ncols=min(key_columns, len(names)),
                frameon=False,
                labelcolor=LIGHT.ink,
                handlelength=3.4,
            )
        # Without a version, equal figures give equal bytes.
        figure.savefig(path, format="png", dpi=_PNG_DPI, metadata={"Software": None})


def key_svg(index: int) -> str:
    """The line and marker of an arm as a small SVG, for a key in the page."""
    style = MarkerStyle(palettes.marker(index))
    shape: Any = style.get_path().transformed(style.get_transform())
    corners = [
        "M" + "L".join(f"{20 + 9 * x:.1f} {7 - 9 * y:.1f}" for x, y in polygon) + "Z"
        for polygon in shape.to_polygons()
    ]
    _, pattern = palettes.dash(index)
    dashes = " ".join(f"{length * 1.8:g}" for length in pattern) or "none"
    colour = f"var(--arm-{index % palettes.NUM_COLOURS})"
    return (
        '<svg viewBox="0 0 40 14" aria-hidden="true">'
        f'<path d="M1 7H39" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"/>'
        f'<path d="{"".join(corners)}" fill="{colour}"/></svg>'
    )


def _handle(index: int, name: str) -> Any:
    return Line2D(
        [],
        [],
        color=LIGHT.arm(index),
        marker=palettes.marker(index),
        linestyle=palettes.dash(index),
        label=name,
    )


def _place(figure: Any, panel: Panel, left: float, bottom: float, palette: Palette) -> None:
    """Draws a panel with its lower left corner at a position in inches.

    Margins are fixed, so that neighbouring axes line up; computing them from the labels would take
    as long as the drawing itself.
    """
    across, up = figure.get_size_inches()
    axes = figure.add_axes(
        (
            (left + panel.left_in) / across,
            (bottom + panel.bottom_in) / up,
            (panel.width_in - panel.left_in - _RIGHT_IN) / across,
            (panel.height_in - panel.bottom_in - _TOP_IN) / up,
        )
    )
    axes.set_title(panel.title, pad=8)
    panel.draw(axes, palette)


def _for_page(drawn: str, prefix: str) -> str:
    """Strips the header, shrinks the SVG, inserts CSS variables and makes ids unique."""
    body = drawn[drawn.index("<svg") :].strip()
    for left_out in _LEFT_OUT:
        body = re.sub(left_out, "", body, flags=re.DOTALL)
    body = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', body)
    body = body.replace("xlink:href=", "href=")
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(
        r' id="([^"]*)"',
        lambda found: f' id="{prefix}{found[1]}"' if found[1] in referred else "",
        body,
    )
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", body)
    body = re.sub(_SENTINEL, lambda found: _VARIABLES.get(found[0], found[0]), body)
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', _rounded, body)
    return re.sub(r">\s+<", "><", body)


def _rounded(attribute: re.Match[str]) -> str:
    """Rounds coordinates to a tenth of a unit: invisible, and it halves the page."""
    shown = re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}", attribute[0])
    return re.sub(r"\s*\n\s*", "", shown)
