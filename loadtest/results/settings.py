"""Settings of a run: loads with the same dataset and temperature."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.loadtest.runs import CellFacts

Setting = tuple[str, float | None]  # dataset and temperature


def setting_of(cell: CellFacts) -> Setting:
    return cell.text, cell.temperature


def settings_of(cells: Iterable[CellFacts]) -> list[Setting]:
    """The distinct settings, in order; a run with more than one is a matrix."""
    return list(dict.fromkeys(setting_of(cell) for cell in cells))


def setting_label(setting: Setting, among: list[Setting]) -> str:
    """ "spec-bench:qa, T 0.7": only what differs among the settings of a run."""
    text, temperature = setting
    parts = []
    if len({each[0] for each in among}) > 1:
        parts.append(text or "unnamed dataset")
    if len({each[1] for each in among}) > 1:
        parts.append("T unknown" if temperature is None else f"T {temperature:g}")
    return ", ".join(parts)


def load_name(cell: CellFacts) -> str:
    """A cell's load alone: "rate 2" of "rate 2, spec-bench:qa, T 0.7"."""
    name = cell.name
    if cell.temperature is not None:
        name = name.removesuffix(f", T {cell.temperature:g}")
    return name.removesuffix(f", {cell.text}") if cell.text else name
