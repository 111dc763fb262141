"""Draws the matrix of a simulation (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.bench.control.matrix import OF_BEST_FIXED, OF_PLAIN


def draw(results: dict[str, Any], path: Path) -> None:
    """Every cell's lower bounds, in order of size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    parts = (("of_best_fixed", OF_BEST_FIXED, "best fixed depth"), ("of_plain", OF_PLAIN, "off"))
    for axes, (key, goal, name) in zip(figure.subplots(1, 2), parts, strict=True):
        lows = sorted(cell[key]["low"] for cell in results["cells"])
        axes.plot(range(1, len(lows) + 1), lows, ".", markersize=3)
        axes.axhline(goal, color="tab:red", linewidth=1)
        axes.set_title(f"auto over {name}: lower bounds, goal {goal}")
        axes.set_xlabel("scenarios")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
