"""Every arm beside the baseline: which helps, at what load, by how much, how surely.

Blocks of two arms that ran one after the other are paired, so a machine that slows down slows
both. Of one quantity, all arms and loads together are a family, whose chances Holm's method
corrects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.load.results.analysis import Analysis, pairs_of_blocks
from outrider.bench.load.results.measures import Measures
from outrider.bench.load.results.quantities import QUANTITIES, Quantity
from outrider.bench.load.results.statistics import Ratio, holm, paired_ratio
from outrider.bench.load.runs import CellFacts

COMPARED = ("tokens_s", "ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50", "e2e_p99")
BASELINE = "off"
SIGNIFICANT = 0.05
CLOSED_LOOP = "clients"

HELPS, COSTS, NO_DIFFERENCE, TOO_FEW = "helps", "costs", "no difference", "too few"


@dataclass(frozen=True, slots=True)
class Contrast:
    """One arm beside the baseline under one load, by one quantity: arm / baseline."""

    arm: str
    baseline: str
    cell: CellFacts
    quantity: Quantity
    ratio: Ratio
    p_family: float | None  # corrected
    is_decisive: bool  # the quantity that tells arms apart under this load

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
    """The arm that the others are held against: as the run says, or "off", or the first."""
    chosen = analysis.facts.options.get("baseline") if analysis.facts is not None else None
    if chosen in analysis.arms:
        return str(chosen)
    if BASELINE in analysis.arms:
        return BASELINE
    return analysis.arms[0] if analysis.arms else None


def decisive_quantity(cell: CellFacts, arm: Measures, baseline: Measures) -> str:
    """What tells two arms apart under a load.

    As long as both keep up with an open loop, arrivals set the tokens a second, so latency
    decides; beyond that, and in a closed loop, where a quicker server is asked more, tokens do.
    """
    if cell.kind != CLOSED_LOOP and arm.kept_up and baseline.kept_up:
        return "e2e_p50"
    return "tokens_s"


def contrasts(
    analysis: Analysis, baseline: str | None = None, names: Sequence[str] = COMPARED
) -> list[Contrast]:
    """Every arm but the baseline, under every load where both ran, by every named quantity."""
    against = baseline or baseline_of(analysis)
    found: list[Contrast] = []
    for name in names:
        quantity = QUANTITIES[name]
        asked = [
            (arm, cell)
            for cell in analysis.cells
            for arm in analysis.arms
            if against is not None and arm != against and _both_ran(analysis, arm, against, cell)
        ]
        ratios = [
            block_ratio(analysis, arm, str(against), cell.name, quantity) for arm, cell in asked
        ]
        corrected = holm([ratio.p for ratio in ratios])
        for (arm, cell), ratio, p in zip(asked, ratios, corrected, strict=True):
            decisive = decisive_quantity(
                cell, analysis.of(arm, cell.name), analysis.of(str(against), cell.name)
            )
            found.append(Contrast(arm, str(against), cell, quantity, ratio, p, name == decisive))
    return found


def winners(analysis: Analysis, decisive: Sequence[Contrast]) -> list[str]:
    """The best arm of one cell, and those that cannot be told from it; empty for no difference.

    `decisive` are the contrasts of that cell. The baseline wins where all others cost.
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
) -> Ratio:
    pairs = list(pairs_of_blocks(analysis, arm, baseline, cell))
    return paired_ratio(
        [quantity.of(mine) for mine, _ in pairs], [quantity.of(other) for _, other in pairs]
    )


def _both_ran(analysis: Analysis, arm: str, against: str, cell: CellFacts) -> bool:
    return bool(analysis.of(arm, cell.name).sent and analysis.of(against, cell.name).sent)
