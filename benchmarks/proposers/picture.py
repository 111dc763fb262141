"""Draws tokens a round and times a token (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.benchmarks.proposers.prompts import ALL_GROUPS
from outrider.benchmarks.proposers.report import name_of
from outrider.errors import ConfigError

_PARTS = {"enlarged_short": "short prompts", "enlarged_long": "long prompts"}


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Tokens per round by category, and the time per token of the enlarged target."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install outrider[bench].") from None
    panels = [
        panel
        for panel, parts in ((_tokens_a_round, ["rounds"]), (_ms_per_token, list(_PARTS)))
        if any(figures.get(part, {}).get("records") for part in parts)
    ]
    if not panels:
        raise ConfigError("nothing to draw; measure rounds, or --enlarged.")
    figure = Figure(figsize=(9, 3.8 * len(panels)), layout="constrained")
    for axes, panel in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        panel(axes, figures)
    figure.savefig(path, dpi=120)


def _tokens_a_round(axes: Any, figures: Mapping[str, Any]) -> None:
    records = [each for each in figures["rounds"]["records"] if each["depth"]]
    found = {name for each in records for name in each["greedy"]["by_category"]}
    groups = [name for name in ALL_GROUPS if name in found]
    width = 0.8 / max(len(records), 1)
    for place, record in enumerate(records):
        own = record["greedy"]["by_category"]
        heights = [own[name]["tokens_a_round"] for name in groups]
        at = [number - 0.4 + (place + 0.5) * width for number in range(len(groups))]
        axes.bar(at, heights, width, label=name_of(record))
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(ylabel="tokens a round", title="Greedy tokens a round by category; plain decoding: 1")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.legend(fontsize="small", loc="upper left", ncols=3)


def _ms_per_token(axes: Any, figures: Mapping[str, Any]) -> None:
    found = {part: figures[part]["records"] for part in _PARTS if part in figures}
    names = list(dict.fromkeys(name_of(each) for own in found.values() for each in own))
    height = 0.8 / len(found)
    for place, (part, records) in enumerate(found.items()):
        times = {name_of(each): each["greedy"]["ms_per_token"] for each in records}
        known = [name for name in names if name in times]
        at = [names.index(name) - 0.4 + (place + 0.5) * height for name in known]
        bars = axes.barh(at, [times[name] for name in known], height, label=_PARTS[part])
        axes.bar_label(bars, fmt="%.2f", fontsize="small", padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="ms a token", title="One request, target of the 8B shape, greedy")
    axes.legend(fontsize="small")
