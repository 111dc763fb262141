"""The verdict matrix of a run with several datasets or temperatures."""

from __future__ import annotations

from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.numbers import NOTHING, with_interval
from outrider.loadtest.report.parts import ReportSection, Table
from outrider.loadtest.report.summary import WORDS
from outrider.loadtest.results.settings import load_name
from outrider.loadtest.results.verdicts import winners
from outrider.loadtest.runs import CellFacts

_SHORT = {"tokens_s": "tokens/s", "e2e_p50": "answer time"}


def matrix_section(context: ReportContext) -> ReportSection | None:
    """One row per load, dataset and temperature, with its best arm."""
    if context.baseline is None or len(context.settings) < 2:
        return None
    others = [arm for _, arm in context.others]
    head = ["Load", "Text", "Temperature", *(f"{arm} / {context.baseline}" for arm in others)]
    rows = [
        [
            load_name(cell),
            cell.text or NOTHING,
            NOTHING if cell.temperature is None else f"{cell.temperature:g}",
            *(_ratio_text(context, arm, cell) for arm in others),
            _winner(context, cell),
        ]
        for cell in context.answered_cells
    ]
    why = (
        "Each arm against the baseline by the decisive quantity of the cell: the median time to "
        "the whole answer (below 1 is better) where both kept up with an open loop, else tokens/s "
        "(above 1 is better), with its 95 % interval. Significance is corrected for the number of "
        "comparisons. Several best arms do not differ significantly."
    )
    table = Table([*head, "Best"], rows, first_number=5 + len(others))
    return ReportSection("matrix", "Verdict matrix", [why, table])


def _ratio_text(context: ReportContext, arm: str, cell: CellFacts) -> str:
    found = context.decisive(arm, cell.name)
    if found is None:
        return NOTHING
    name = _SHORT.get(found.quantity.name, found.quantity.title)
    return f"{name} × {with_interval(found.ratio)}, {WORDS[found.outcome]}"


def _winner(context: ReportContext, cell: CellFacts) -> str:
    decisive = [each for _, arm in context.others if (each := context.decisive(arm, cell.name))]
    return " or ".join(winners(context.analysis, decisive)) or "no difference"
