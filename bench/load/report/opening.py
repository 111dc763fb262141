"""The top of the page: what was found, what was run, and what to keep in mind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.load.records import CountedBy
from outrider.bench.load.report.given import Given
from outrider.bench.load.report.numbers import number
from outrider.bench.load.report.parts import Block, Facts, Fold, Points, Section, Table
from outrider.bench.load.results.cautions import cautions
from outrider.bench.load.results.settings import load_name, setting_label, settings_of

_MOST_SENTENCES = 7
_COUNTED = {
    CountedBy.IDS: "token ids the server sent",
    CountedBy.USAGE: "the usage the server told",
    CountedBy.TOKENISER: "tokenising the text that came",
    CountedBy.NOBODY: "nobody, so its tokens are unknown",
}


def headline(given: Given) -> str:
    """One sentence for the whole run; harm before anything else."""
    return given.findings.headline.removesuffix(".")


def speed_headline(given: Given) -> str:
    """One sentence for a picture of speed, which shows nothing else."""
    found = given.findings.finding
    return headline(given) if found is None else found.headline.removesuffix(".")


def finding_section(given: Given) -> Section:
    found = given.findings
    others = [sentence for sentence in found.top if sentence != found.headline]
    return Section("finding", "Finding", _finding_blocks(others))


def _finding_blocks(sentences: Sequence[str]) -> list[Block]:
    """The first sentences, and the others folded away."""
    blocks: list[Block] = [Points(sentences[:_MOST_SENTENCES], "finding")]
    if len(sentences) > _MOST_SENTENCES:
        others = Points(sentences[_MOST_SENTENCES:])
        blocks.append(Fold(f"{len(others.sentences)} more sentences", [others]))
    return blocks


def run_section(given: Given) -> Section:
    """Everything needed to do it again."""
    facts = given.facts
    rows = [
        ("Repeat with", facts.command),
        ("Begun", facts.started),
        ("Prompts", facts.prompts or "not told"),
        ("Loads", ", ".join(dict.fromkeys(load_name(cell) for cell in facts.cells)) or "none"),
        *_settings(given),
        ("Blocks", _blocks(given)),
        ("Machine", _pairs(facts.machine) or "not told"),
        ("Seed", str(facts.seed)),
    ]
    if given.analysis.slo is not None:
        rows.append(("SLO", str(given.analysis.slo)))
    rows += [("Note", note) for note in facts.notes]
    blocks: list[Block] = [Facts(rows, frozenset({"Repeat with"})), _arms(given)]
    if facts.options:
        options = [(name, _text(value)) for name, value in facts.options.items()]
        blocks.append(Fold("All options", [Facts(options)]))
    return Section("run", "What was run", blocks)


def _settings(given: Given) -> list[tuple[str, str]]:
    """Of a matrix, what every load was run with."""
    settings = settings_of(given.facts.cells)
    if len(settings) < 2:
        return []
    return [("Each with", "; ".join(setting_label(each, settings) for each in settings))]


def _blocks(given: Given) -> str:
    shifts = given.analysis.shifts
    if not shifts:
        return "none"
    num = len({shift.block for shift in shifts})
    seconds = sum(shift.seconds for shift in shifts) / len(shifts)
    turns = ", arms taking turns" if len(given.arms) > 1 else ""
    several = "block" if num == 1 else "blocks"
    return f"{num} {several} of {number(seconds)} s measured for each arm and load{turns}"


def _arms(given: Given) -> Table:
    told = {arm.name: arm for arm in given.facts.arms}
    rows = []
    for name in given.arms:
        arm = told.get(name)
        role = " (baseline)" if name == given.baseline else ""
        rows.append(
            [
                name + role,
                arm.url if arm else "not told",
                _pairs(arm.extras) if arm else "",
                (arm.command or "was running already") if arm else "not told",
                _counted(given, name),
            ]
        )
    head = ["Arm", "Address", "In every request", "Started by", "Tokens counted by"]
    return Table(head, rows, first_number=len(head))


def _counted(given: Given, arm: str) -> str:
    ways: dict[str, int] = {}
    for cell in given.analysis.cells:
        for way, num in given.of(arm, cell.name).counted_by.items():
            ways[way] = ways.get(way, 0) + num
    if not ways:
        return "no answers"
    names = {str(way): sentence for way, sentence in _COUNTED.items()}
    if len(ways) == 1:
        return names.get(next(iter(ways)), next(iter(ways)))
    return ", ".join(f"{names.get(way, way)} ({num:,} requests)" for way, num in ways.items())


def caution_section(given: Given) -> Section | None:
    """What a reader should hold against the figures."""
    sentences = cautions(given.analysis)
    if not sentences:
        return None
    return Section("cautions", "Cautions", [Points(sentences, "caution")])


def _pairs(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_text(value)}" for name, value in given.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
