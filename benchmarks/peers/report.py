"""The results of a comparison: as JSON, as tables for the terminal, as Markdown for a document."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.benchmarks.checkout import commit
from outrider.benchmarks.peers.comparison import (
    SpeedRatio,
    Summary,
    TimedCall,
    speed_ratio,
    summarise,
)
from outrider.benchmarks.peers.protocol import PeerInfo

NOISY_FOREIGN_CPU = 0.05
MIN_WIDTH = 120  # a pipe counts as 80 columns, too few for a table


@dataclass(frozen=True, slots=True)
class ComparisonSection:
    """Comparable calls; ratios are taken to `reference`."""

    title: str
    reference: str
    variants: tuple[str, ...]
    samples: tuple[TimedCall, ...]

    def summaries(self) -> list[Summary]:
        return [summarise(self.samples, variant, self.reference) for variant in self.variants]

    def ratio(self, variant: str, base: str, group: str | None = None) -> SpeedRatio | None:
        chosen = [s for s in self.samples if group is None or s.group == group]
        return speed_ratio(chosen, variant, base)

    def groups(self) -> list[str]:
        return list(dict.fromkeys(sample.group for sample in self.samples))


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is rendered."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        align = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = [self.header, align, *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def overview(section: ComparisonSection) -> Grid:
    header = ("variant", "tokens/s", "median", f"vs {section.reference}", "tokens/round")
    rows = [
        (
            summary.variant,
            f"{summary.total_tokens_per_s:.1f}",
            f"{summary.median_tokens_per_s:.1f}",
            _ratio_text(section.ratio(summary.variant, section.reference)),
            _number(summary.tokens_per_round),
            _share(summary.acceptance),
            _share(summary.same_text),
            _share(summary.common_prefix),
        )
        for summary in section.summaries()
    ]
    return Grid(section.title, (*header, "accepted", "same text", "same start"), tuple(rows))


def against(section: ComparisonSection, ours: Sequence[str], bases: Sequence[str]) -> Grid:
    """The speed-up of each of `ours` over each of `bases`."""
    rows = [(name, *(_ratio_text(section.ratio(name, base)) for base in bases)) for name in ours]
    return Grid(f"{section.title}: times faster than", ("", *bases), tuple(rows))


def by_group(section: ComparisonSection, ours: Sequence[str]) -> Grid:
    """The speed-up over the reference for each kind of task."""
    groups = section.groups()
    rows = [
        (name, *(_ratio_text(section.ratio(name, section.reference, group)) for group in groups))
        for name in ours
    ]
    return Grid(f"{section.title}: vs {section.reference} by task", ("", *groups), tuple(rows))


def disturbance(samples: Sequence[TimedCall]) -> str:
    """A sentence on other CPU use, which makes figures unreliable."""
    foreign = [sample.foreign_cpu for sample in samples if sample.foreign_cpu is not None]
    idle = [sample.idle_cpu for sample in samples if sample.idle_cpu is not None]
    if not foreign or not idle:
        return "This system does not report other use of the processors."
    verdict = "quiet" if fmean(foreign) < NOISY_FOREIGN_CPU else "busy: figures are rough"
    return (
        f"Other processes used {fmean(foreign):.1%} of the processors on average and "
        f"{max(foreign):.1%} at most ({verdict}); waiting peers used {fmean(idle):.2%}."
    )


def show(grids: Sequence[Grid], remarks: Sequence[str], console: Console) -> None:
    console.width = max(console.width, MIN_WIDTH)
    for grid in grids:
        console.print(grid.as_rich())
    for remark in remarks:
        console.print(remark)
    console.print("\nAs Markdown:\n")
    for grid in grids:
        console.print(grid.as_markdown() + "\n", markup=False, soft_wrap=True)


def as_json(
    sections: Sequence[ComparisonSection],
    peers: Mapping[str, PeerInfo],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {name: dict(info.versions) for name, info in peers.items()},
        "peer_settings": {name: dict(info.settings) for name, info in peers.items()},
        "settings": dict(settings),
        "sections": [_section_json(section) for section in sections],
    }


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _processor_name() -> str:
    try:
        found = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
    return fields.get("Model name", platform.machine()).strip()


def _section_json(section: ComparisonSection) -> dict[str, Any]:
    return {
        "title": section.title,
        "reference": section.reference,
        "summaries": [dataclasses.asdict(summary) for summary in section.summaries()],
        "ratios": {
            ours: {base: _ratio_json(section.ratio(ours, base)) for base in section.variants}
            for ours in section.variants
        },
        "ratios_by_group": {
            group: {
                ours: _ratio_json(section.ratio(ours, section.reference, group))
                for ours in section.variants
            }
            for group in section.groups()
        },
        "samples": [dataclasses.asdict(sample) for sample in section.samples],
    }


def _ratio_json(ratio: SpeedRatio | None) -> dict[str, Any] | None:
    return None if ratio is None else dataclasses.asdict(ratio)


def _ratio_text(ratio: SpeedRatio | None) -> str:
    if ratio is None:
        return "–"
    if ratio.low == ratio.high:  # a single case, or a variant against itself
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
