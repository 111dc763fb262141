"""The input of every report section: the run, its analysis, and shared queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.findings import Findings, findings_of
from outrider.loadtest.results.measures import Measures
from outrider.loadtest.results.quantities import QUANTITIES
from outrider.loadtest.results.settings import (
    Setting,
    setting_label,
    setting_of,
    settings_of,
)
from outrider.loadtest.results.statistics import (
    Interval,
    block_interval,
    bootstrap_interval,
    mean_of_rows,
    percentile_of_rows,
)
from outrider.loadtest.results.verdicts import COMPARED, Contrast, baseline_of, contrasts
from outrider.loadtest.runs import CellFacts, RunFacts, RunFolder, ShiftRecord

_LOAD_LABELS = {
    "rate": "requests offered a second",
    "clients": "clients at once",
    "trace": "speed of the trace, times the original",
}
_RESAMPLES = 200  # enough for a band in a chart


@dataclass(frozen=True)
class ReportContext:
    run: RunFolder
    analysis: Analysis
    found: Findings | None = None  # if computed already

    @property
    def facts(self) -> RunFacts:
        return self.run.facts

    @property
    def arms(self) -> list[str]:
        return self.analysis.arms

    @cached_property
    def baseline(self) -> str | None:
        """None if there is nothing to compare."""
        return baseline_of(self.analysis) if len(self.arms) > 1 else None

    @cached_property
    def findings(self) -> Findings:
        return self.found or findings_of(self.run, self.analysis)

    @property
    def key(self) -> list[tuple[int, str]]:
        """The arms with their colour indices."""
        return list(enumerate(self.arms))

    @property
    def others(self) -> list[tuple[int, str]]:
        """The key without the baseline."""
        return [(index, arm) for index, arm in self.key if arm != self.baseline]

    def of(self, arm: str, cell: str) -> Measures:
        return self.analysis.of(arm, cell)

    def has_answers(self, cell: str) -> bool:
        return any(self.of(arm, cell).ok for arm in self.arms)

    @cached_property
    def answered_cells(self) -> list[CellFacts]:
        return [cell for cell in self.analysis.cells if self.has_answers(cell.name)]

    @cached_property
    def settings(self) -> list[Setting]:
        """Datasets with temperatures; with more than one the run is a matrix."""
        return settings_of(self.answered_cells)

    def label_of(self, setting: Setting) -> str:
        return setting_label(setting, self.settings)

    def cells_by_axis(self) -> dict[tuple[str, Setting], list[CellFacts]]:
        """Loads with completed requests, ascending, by chart: one per kind and setting."""
        found: dict[tuple[str, Setting], list[CellFacts]] = {}
        for cell in self.answered_cells:
            found.setdefault((cell.kind, setting_of(cell)), []).append(cell)
        return {axis: sorted(cells, key=lambda each: each.value) for axis, cells in found.items()}

    def shifts(self, arm: str, cell: str) -> list[ShiftRecord]:
        return [each for each in self.analysis.shifts if (each.arm, each.cell) == (arm, cell)]

    @cached_property
    def _contrasts(self) -> dict[tuple[str, str, str], Contrast]:
        if self.baseline is None:
            return {}
        found = contrasts(self.analysis, self.baseline, COMPARED)
        return {(each.arm, each.cell.name, each.quantity.name): each for each in found}

    def contrast(self, arm: str, cell: str, quantity: str) -> Contrast | None:
        """An arm against the baseline; None for the baseline and for unknown ratios."""
        found = self._contrasts.get((arm, cell, quantity))
        return None if found is None or found.ratio.value is None else found

    def decisive(self, arm: str, cell: str) -> Contrast | None:
        """The contrast by the decisive quantity of this load."""
        found = (self.contrast(arm, cell, quantity) for quantity in COMPARED)
        return next((each for each in found if each is not None and each.is_decisive), None)

    @cached_property
    def _intervals(self) -> dict[tuple[str, str, str], Interval | None]:
        return {}

    def interval(self, arm: str, cell: str, quantity: str) -> Interval | None:
        """A figure with its interval over blocks; cached."""
        key = (arm, cell, quantity)
        if key not in self._intervals:
            self._intervals[key] = self._interval(arm, cell, quantity)
        return self._intervals[key]

    def _interval(self, arm: str, cell: str, name: str) -> Interval | None:
        quantity, seed = QUANTITIES[name], self.facts.seed
        value = quantity.of(self.of(arm, cell))
        if value is None:
            return None
        blocks = self.analysis.blocks(arm, cell)
        if quantity.latency is None:
            drawn = [found for each in blocks if (found := quantity.of(each)) is not None]
            around = bootstrap_interval(drawn, seed=seed)
        else:
            percent = quantity.percent
            around = block_interval(
                [self.analysis.values(arm, cell, quantity.latency, each.block) for each in blocks],
                mean_of_rows if percent is None else percentile_of_rows(percent),
                seed=seed,
                resamples=_RESAMPLES,
            )
        if around is None or around.low is None or around.high is None:
            return Interval(value, None, None)
        return Interval(value, min(around.low, value), max(around.high, value), around.level)


def load_label(kind: str) -> str:
    """Axis label of a kind of load."""
    return _LOAD_LABELS.get(kind, kind)


def kind_suffix(kinds: Sequence[str], kind: str) -> str:
    """Title suffix if the run has several kinds of load."""
    return f", by {load_label(kind)}" if len(kinds) > 1 else ""
