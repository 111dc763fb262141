"""Sections besides speed: chaos, soak, and comparison of answers."""

from __future__ import annotations

from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.parts import Block, Points, ReportSection, Table
from outrider.loadtest.servers.chaos import read_events

_MAX_DIFFERENCES = 10  # listed per arm


def chaos_section(context: ReportContext) -> ReportSection | None:
    """The chaos verdict, and the injected faults."""
    path = context.run.chaos_path
    if not path.exists():
        return None
    rows = [
        [f"{event.at_s:.1f}", event.did, event.what, event.error or "done"]
        for event in sorted(read_events(path), key=lambda event: event.at_s)
    ]
    found = context.findings
    blocks: list[Block] = []
    if found.chaos:
        is_sound = all(each.is_sound for each in found.chaos.values())
        blocks += [
            "Every load ran twice, undisturbed and then disturbed, and the answers were compared.",
            Points(found.chaos_sentences, "" if is_sound else "caution"),
        ]
    head = ["Second of the run", "Done", "To", "Result"]
    return ReportSection("chaos", "Under chaos", [*blocks, Table(head, rows, first_number=4)])


def soak_section(context: ReportContext) -> ReportSection | None:
    """Growth of resources, for runs long enough to detect it."""
    found = context.findings
    if found.soak is None:
        return None
    why = (
        "Growth is the median slope between all pairs of samples after warm-up, with its 99 % "
        "interval; the chart of the servers below has every sample."
    )
    tone = "" if found.soak.is_flat else "caution"
    return ReportSection("soak", "Over the long run", [why, Points(found.soak_sentences, tone)])


def answer_section(context: ReportContext) -> ReportSection | None:
    """Whether the arms' answers are equal."""
    found = context.findings
    if not found.answers:
        return None
    blocks: list[Block] = [Points(found.answer_sentences)]
    rows = [
        [each.arm, difference.request_id, f"{difference.unit} {difference.at}", *map(str, lengths)]
        for each in found.answers
        for difference in each.different[:_MAX_DIFFERENCES]
        for lengths in [(difference.length, difference.baseline_length)]
    ]
    if rows:
        head = ["Arm", "Request", "Differs from", "Length", "Baseline's length"]
        blocks.append(Table(head, rows, first_number=3, is_wide=True))
    return ReportSection("answers", "The answers", blocks)
