"""The top of the page: findings, the run's settings, and cautions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.loadtest.records import CountedBy
from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.numbers import number
from outrider.loadtest.report.parts import Block, Facts, Fold, Points, ReportSection, Table
from outrider.loadtest.results.cautions import cautions
from outrider.loadtest.results.settings import load_name, setting_label, settings_of

_MAX_SENTENCES = 7
_COUNTED = {
    CountedBy.IDS: "token ids the server sent",
    CountedBy.USAGE: "usage reported by the server",
    CountedBy.TOKENISER: "tokenising the received text",
    CountedBy.UNKNOWN: "nothing: token counts are unknown",
}


def headline(context: ReportContext) -> str:
    """One sentence for the whole run; alarms take precedence."""
    return context.findings.headline.removesuffix(".")


def speed_headline(context: ReportContext) -> str:
    """One sentence about speed, for overview.png."""
    found = context.findings.finding
    return headline(context) if found is None else found.headline.removesuffix(".")


def finding_section(context: ReportContext) -> ReportSection:
    found = context.findings
    others = [sentence for sentence in found.top if sentence != found.headline]
    return ReportSection("finding", "Finding", _finding_blocks(others))


def _finding_blocks(sentences: Sequence[str]) -> list[Block]:
    """The first sentences, and a fold with the rest."""
    blocks: list[Block] = [Points(sentences[:_MAX_SENTENCES], "finding")]
    if len(sentences) > _MAX_SENTENCES:
        others = Points(sentences[_MAX_SENTENCES:])
        blocks.append(Fold(f"{len(others.sentences)} more sentences", [others]))
    return blocks


def run_section(context: ReportContext) -> ReportSection:
    """Everything needed to repeat the run."""
    facts = context.facts
    rows = [
        ("Repeat with", facts.command),
        ("Started", facts.started),
        ("Prompts", facts.prompts or "unknown"),
        ("Loads", ", ".join(dict.fromkeys(load_name(cell) for cell in facts.cells)) or "none"),
        *_settings(context),
        ("Blocks", _blocks(context)),
        ("Machine", _pairs(facts.machine) or "unknown"),
        ("Seed", str(facts.seed)),
    ]
    if context.analysis.slo is not None:
        rows.append(("SLO", str(context.analysis.slo)))
    rows += [("Note", note) for note in facts.notes]
    blocks: list[Block] = [Facts(rows, frozenset({"Repeat with"})), _arms(context)]
    if facts.options:
        options = [(name, _text(value)) for name, value in facts.options.items()]
        blocks.append(Fold("All options", [Facts(options)]))
    return ReportSection("run", "What was run", blocks)


def _settings(context: ReportContext) -> list[tuple[str, str]]:
    """The settings of a matrix."""
    settings = settings_of(context.facts.cells)
    if len(settings) < 2:
        return []
    return [("Each with", "; ".join(setting_label(each, settings) for each in settings))]


def _blocks(context: ReportContext) -> str:
    shifts = context.analysis.shifts
    if not shifts:
        return "none"
    num = len({shift.block for shift in shifts})
    seconds = sum(shift.seconds for shift in shifts) / len(shifts)
    turns = ", arms taking turns" if len(context.arms) > 1 else ""
    several = "block" if num == 1 else "blocks"
    return f"{num} {several} of {number(seconds)} s measured for each arm and load{turns}"


def _arms(context: ReportContext) -> Table:
    described = {arm.name: arm for arm in context.facts.arms}
    rows = []
    for name in context.arms:
        arm = described.get(name)
        role = " (baseline)" if name == context.baseline else ""
        rows.append(
            [
                name + role,
                arm.url if arm else "unknown",
                _pairs(arm.extras) if arm else "",
                (arm.command or "was already running") if arm else "unknown",
                _counted(context, name),
            ]
        )
    head = ["Arm", "Address", "In every request", "Started by", "Tokens counted by"]
    return Table(head, rows, first_number=len(head))


def _counted(context: ReportContext, arm: str) -> str:
    ways: dict[str, int] = {}
    for cell in context.analysis.cells:
        for way, num in context.of(arm, cell.name).counted_by.items():
            ways[way] = ways.get(way, 0) + num
    if not ways:
        return "no completed requests"
    names = {str(way): sentence for way, sentence in _COUNTED.items()}
    if len(ways) == 1:
        return names.get(next(iter(ways)), next(iter(ways)))
    return ", ".join(f"{names.get(way, way)} ({num:,} requests)" for way, num in ways.items())


def caution_section(context: ReportContext) -> ReportSection | None:
    """Reasons to doubt the figures."""
    sentences = cautions(context.analysis)
    if not sentences:
        return None
    return ReportSection("cautions", "Cautions", [Points(sentences, "caution")])


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_text(value)}" for name, value in values.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
