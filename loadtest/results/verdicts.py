"""Compares every arm with the baseline: which helps, at what load, by how much.

Blocks of two arms that ran consecutively are paired, so that drift of the machine affects both.
All arms and loads of one quantity are a family of tests, corrected by Holm's method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.loadtest.results.analysis import Analysis, pairs_of_blocks
from outrider.loadtest.results.measures import Measures
from outrider.loadtest.results.quantities import QUANTITIES, Quantity
from outrider.loadtest.results.statistics import RatioEstimate, holm, paired_ratio
from outrider.loadtest.runs import CellFacts

COMPARED = ("tokens_s", "ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50", "e2e_p99")
BASELINE = "off"
SIGNIFICANT = 0.05
CLOSED_LOOP = "clients"

HELPS, COSTS, NO_DIFFERENCE, TOO_FEW = "helps", "costs", "no difference", "too few"


@dataclass(frozen=True, slots=True)
class Contrast:
    """Ratio of one arm to the baseline under one load, by one quantity."""

    arm: str
    baseline: str
    cell: CellFacts
    quantity: Quantity
    ratio: RatioEstimate
    p_family: float | None  # corrected
    is_decisive: bool  # whether the quantity decides between arms under this load

    @property
    def is_significant(self) -> bool:
        return self.p_family is not None and self.p_family < SIGNIFICANT

    @property
    def outcome(self) -> str:
        if self.ratio.value is None or self.p_family is None:
            return TOO_FEW
        if not self.is_significant:
            return NO_DIFFERENCE
        return HELPS if self.quantity.is_gain(self.ratio.value) else COSTS


def baseline_of(analysis: Analysis) -> str | None:
    """The baseline: the run's option, else "off", else the first arm."""
    chosen = analysis.facts.options.get("baseline") if analysis.facts is not None else None
    if chosen in analysis.arms:
        return str(chosen)
    if BASELINE in analysis.arms:
        return BASELINE
    return analysis.arms[0] if analysis.arms else None


def decisive_quantity(cell: CellFacts, arm: Measures, baseline: Measures) -> str:
    """The quantity that decides between two arms under a load.

    Latency, as long as both keep up with an open loop, since arrivals then set the tokens a
    second. Otherwise, and in a closed loop, where a faster server gets more requests, tokens/s.
    """
    if cell.kind != CLOSED_LOOP and arm.kept_up and baseline.kept_up:
        return "e2e_p50"
    return "tokens_s"


def contrasts(
    analysis: Analysis, baseline: str | None = None, names: Sequence[str] = COMPARED
) -> list[Contrast]:
    """Contrasts of every arm with the baseline, per load where both ran and per quantity."""
    against = baseline or baseline_of(analysis)
    found: list[Contrast] = []
    for name in names:
        quantity = QUANTITIES[name]
        pairs = [
            (arm, cell)
            for cell in analysis.cells
            for arm in analysis.arms
            if against is not None and arm != against and _both_ran(analysis, arm, against, cell)
        ]
        ratios = [
            block_ratio(analysis, arm, str(against), cell.name, quantity) for arm, cell in pairs
        ]
        corrected = holm([ratio.p for ratio in ratios])
        for (arm, cell), ratio, p in zip(pairs, ratios, corrected, strict=True):
            decisive = decisive_quantity(
                cell, analysis.of(arm, cell.name), analysis.of(str(against), cell.name)
            )
            found.append(Contrast(arm, str(against), cell, quantity, ratio, p, name == decisive))
    return found


def winners(analysis: Analysis, decisive: Sequence[Contrast]) -> list[str]:
    """The best arm of one cell, and those that do not differ significantly from it.

    `decisive` are the contrasts of the cell. Empty without a difference; the baseline if all other
    arms cost.
    """
    helping = [each for each in decisive if each.outcome == HELPS]
    if not helping:
        is_lost = bool(decisive) and all(each.outcome == COSTS for each in decisive)
        return [decisive[0].baseline] if is_lost else []
    cell = helping[0].cell
    best = helping[0].arm
    for each in helping[1:]:
        if _beats(analysis, each.arm, best, cell):
            best = each.arm
    return [
        best,
        *(
            each.arm
            for each in helping
            if each.arm != best and not _beats(analysis, best, each.arm, cell)
        ),
    ]


def _beats(analysis: Analysis, arm: str, other: str, cell: CellFacts) -> bool:
    name = decisive_quantity(cell, analysis.of(arm, cell.name), analysis.of(other, cell.name))
    ratio = block_ratio(analysis, arm, other, cell.name, QUANTITIES[name])
    if ratio.value is None or ratio.p is None or ratio.p >= SIGNIFICANT:
        return False
    return QUANTITIES[name].is_gain(ratio.value)


def block_ratio(
    analysis: Analysis, arm: str, baseline: str, cell: str, quantity: Quantity
) -> RatioEstimate:
    pairs = list(pairs_of_blocks(analysis, arm, baseline, cell))
    return paired_ratio(
        [quantity.of(mine) for mine, _ in pairs], [quantity.of(other) for _, other in pairs]
    )


def _both_ran(analysis: Analysis, arm: str, against: str, cell: CellFacts) -> bool:
    return bool(analysis.of(arm, cell.name).sent and analysis.of(against, cell.name).sent)
