"""Compares two runs: `outrider bench compare A B`. Every ratio is B over A."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError
from outrider.loadtest.records import read_records
from outrider.loadtest.results.analysis import Analysis, analyse, shifts_of
from outrider.loadtest.results.quantities import QUANTITIES, Quantity
from outrider.loadtest.results.statistics import (
    RatioEstimate,
    holm,
    mean_of_rows,
    per_request_ratio,
    percentile_of_rows,
    unpaired_blocks_ratio,
    unpaired_ratio,
)
from outrider.loadtest.results.verdicts import COMPARED, SIGNIFICANT
from outrider.loadtest.runs import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

COMMON_REQUESTS = 0.5  # share of the smaller run needed to pair requests
TIME_CAVEAT = (
    "The runs were made at different times, so a change of the machine looks like a change of the "
    "server: run both as arms of one `outrider bench serve` to be sure."
)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One quantity under one load."""

    cell: str
    arm_a: str
    arm_b: str
    quantity: Quantity
    a: float | None
    b: float | None
    ratio: RatioEstimate
    p_family: float | None  # corrected for all rows together

    @property
    def is_significant(self) -> bool:
        return self.p_family is not None and self.p_family < SIGNIFICANT

    @property
    def outcome(self) -> str:
        if self.ratio.value is None or self.p_family is None:
            return self.ratio.remark or "cannot be said"
        if not self.is_significant:
            return "no difference"
        return "better" if self.quantity.is_gain(self.ratio.value) else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    a: str
    b: str
    rows: list[ComparisonRow]
    cautions: list[str]

    def finding(self) -> list[str]:
        """The significant differences, a sentence each."""
        sentences = [
            f"B has {row.quantity.change(row.ratio.value)} at {row.cell} ({row.outcome})."
            for row in self.rows
            if row.is_significant and row.ratio.value is not None
        ]
        return sentences or ["No significant difference."]

    def to_json(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "finding": self.finding(),
            "cautions": self.cautions,
            "rows": [
                {
                    "cell": row.cell,
                    "arm_a": row.arm_a,
                    "arm_b": row.arm_b,
                    "quantity": row.quantity.name,
                    "a_value": row.a,
                    "b_value": row.b,
                    **asdict(row.ratio),
                    "p_family": row.p_family,
                    "is_significant": row.is_significant,
                    "outcome": row.outcome,
                }
                for row in self.rows
            ],
        }


def compare(a: Path, b: Path, *, seed: int = 0) -> Comparison:
    """Compares two run folders or two files of requests.

    Arms are matched by name, or directly if each run has one. Latencies are paired by request id
    if the runs sent the same requests. Tails are not paired: the slowest requests of two runs
    differ.
    """
    first, second = opened(a), opened(b)
    arms = _arms(first, second, a, b)
    names = [cell.name for cell in first.cells if cell.name in {c.name for c in second.cells}]
    if not names:
        raise OutriderError(
            f"{a} has the loads {_listed(first)} and {b} has {_listed(second)}; compare runs with "
            "a load in common."
        )
    combinations = [
        (cell, *pair, QUANTITIES[name]) for cell in names for pair in arms for name in COMPARED
    ]
    ratios = [
        ratio_of(first, second, cell, arm_a, arm_b, quantity, seed)
        for cell, arm_a, arm_b, quantity in combinations
    ]
    rows = [
        ComparisonRow(
            cell,
            arm_a,
            arm_b,
            quantity,
            quantity.of(first.of(arm_a, cell)),
            quantity.of(second.of(arm_b, cell)),
            ratio,
            p,
        )
        for (cell, arm_a, arm_b, quantity), ratio, p in zip(
            combinations, ratios, holm([ratio.p for ratio in ratios]), strict=True
        )
    ]
    return Comparison(str(a), str(b), rows, [TIME_CAVEAT, *_left_out(first, second, rows)])


def opened(path: Path) -> Analysis:
    """Analyses a run's folder, its requests file, or a requests file alone."""
    folder = path if path.is_dir() else path.parent
    if (folder / "run.json").exists() and path in (folder, RunFolder(folder).requests_path):
        return analyse(RunFolder(folder))
    file = path / "requests.jsonl" if path.is_dir() else path
    if not file.exists():
        raise OutriderError(
            f"{file} does not exist; give a requests.jsonl of `outrider bench serve` or a folder."
        )
    return Analysis(read_records(file), shifts_of(read_records(file)))


def ratio_of(
    first: Analysis,
    second: Analysis,
    cell: str,
    arm_a: str,
    arm_b: str,
    quantity: Quantity,
    seed: int,
) -> RatioEstimate:
    """B over A, paired if both sent the same requests."""
    if quantity.latency is None:
        return unpaired_blocks_ratio(
            [quantity.of(block) for block in second.blocks(arm_b, cell)],
            [quantity.of(block) for block in first.blocks(arm_a, cell)],
        )
    is_middle = quantity.percent in (None, 50)
    mine = second.latencies_by_request(arm_b, cell, quantity.latency)
    others = first.latencies_by_request(arm_a, cell, quantity.latency)
    common = len(mine.keys() & others.keys())
    if is_middle and common and common >= COMMON_REQUESTS * min(len(mine), len(others)):
        return per_request_ratio(mine, others, seed=seed)
    statistic = mean_of_rows if quantity.percent is None else percentile_of_rows(quantity.percent)
    return unpaired_ratio(
        second.values(arm_b, cell, quantity.latency),
        first.values(arm_a, cell, quantity.latency),
        statistic,
        seed=seed,
    )


def table(comparison: Comparison) -> Table:
    """The comparison as a terminal table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"A {comparison.a}   B {comparison.b}", title_justify="left")
    for heading in ("load", "arm", "measure", "A", "B", "B / A", "95 % interval", "p", ""):
        table.add_column(
            heading, justify="right" if heading in ("A", "B", "B / A", "p") else "left"
        )
    colours = {"better": "green", "worse": "red"}
    for row in comparison.rows:
        arm = row.arm_a if row.arm_a == row.arm_b else f"{row.arm_a} → {row.arm_b}"
        low, high = row.ratio.low, row.ratio.high
        table.add_row(
            *(Text(row.cell), Text(arm), Text(row.quantity.name)),
            *(_shown(row.a, row.quantity.unit), _shown(row.b, row.quantity.unit)),
            _shown(row.ratio.value),
            "" if low is None or high is None else f"{low:.3f} to {high:.3f}",
            "" if row.p_family is None else f"{row.p_family:.3f}",
            Text(row.outcome, style=colours.get(row.outcome, "")),
        )
    return table


def _arms(first: Analysis, second: Analysis, a: Path, b: Path) -> list[tuple[str, str]]:
    if len(first.arms) == len(second.arms) == 1:
        return [(first.arms[0], second.arms[0])]
    common = [(arm, arm) for arm in first.arms if arm in second.arms]
    if not common:
        raise OutriderError(
            f"{a} has the arms {', '.join(first.arms) or 'none'} and {b} has "
            f"{', '.join(second.arms) or 'none'}; compare runs with an arm in common, or with one "
            "arm each."
        )
    return common


def _left_out(first: Analysis, second: Analysis, rows: list[ComparisonRow]) -> Iterator[str]:
    for name, run, other in (("A", first, second), ("B", second, first)):
        theirs = {cell.name for cell in other.cells}
        alone = [cell.name for cell in run.cells if cell.name not in theirs]
        if alone:
            yield f"Only {name} has {', '.join(alone)}."
    if any(row.ratio.kind == "unpaired" and row.quantity.percent == 50 for row in rows):
        yield "The runs sent different requests, so they are not paired and precision is lower."


def _listed(analysis: Analysis) -> str:
    return ", ".join(cell.name for cell in analysis.cells) or "none"


def _shown(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:.1f} ms" if unit == "ms" else f"{value:.3f}" if value < 10 else f"{value:.1f}"
