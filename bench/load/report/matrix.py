"""The verdict matrix of a run with several texts or temperatures."""

from __future__ import annotations

from outrider.bench.load.report.given import Given
from outrider.bench.load.report.numbers import NOTHING, with_interval
from outrider.bench.load.report.parts import Section, Table
from outrider.bench.load.report.summary import WORDS
from outrider.bench.load.results.settings import load_name
from outrider.bench.load.results.verdicts import winners
from outrider.bench.load.runs import CellFacts

_SHORT = {"tokens_s": "tokens/s", "e2e_p50": "answer time"}


def matrix_section(given: Given) -> Section | None:
    """A row for every load with every text and temperature, and who wins there."""
    if given.baseline is None or len(given.settings) < 2:
        return None
    others = [arm for _, arm in given.others]
    head = ["Load", "Text", "Temperature", *(f"{arm} / {given.baseline}" for arm in others)]
    rows = [
        [
            load_name(cell),
            cell.text or NOTHING,
            NOTHING if cell.temperature is None else f"{cell.temperature:g}",
            *(_beside(given, arm, cell) for arm in others),
            _winner(given, cell),
        ]
        for cell in given.answered_cells
    ]
    why = (
        "Each arm beside the baseline by what decides in that cell: the median time to the whole "
        "answer (below 1 is better) where both kept up with an open loop, else tokens/s (above 1 "
        "is better), with its 95 % interval. The words say whether the difference is significant, "
        "corrected for the number of comparisons. Several winners cannot be told apart."
    )
    table = Table([*head, "Best"], rows, first_number=5 + len(others))
    return Section("matrix", "Verdict matrix", [why, table])


def _beside(given: Given, arm: str, cell: CellFacts) -> str:
    found = given.decisive(arm, cell.name)
    if found is None:
        return NOTHING
    name = _SHORT.get(found.quantity.name, found.quantity.title)
    return f"{name} × {with_interval(found.ratio)}, {WORDS[found.outcome]}"


def _winner(given: Given, cell: CellFacts) -> str:
    decisive = [each for _, arm in given.others if (each := given.decisive(arm, cell.name))]
    return " or ".join(winners(given.analysis, decisive)) or "no difference"
