"""What was found besides speed: under chaos, over a long run, and in the answers themselves."""

from __future__ import annotations

from outrider.bench.load.report.given import Given
from outrider.bench.load.report.parts import Block, Points, Section, Table
from outrider.bench.load.servers.chaos import read_events

_MOST_DIFFERENCES = 10  # of an arm that are listed


def chaos_section(given: Given) -> Section | None:
    """The verdict, and what was done to the servers on purpose."""
    path = given.run.chaos_path
    if not path.exists():
        return None
    rows = [
        [f"{event.at_s:.1f}", event.did, event.what, event.error or "done"]
        for event in sorted(read_events(path), key=lambda event: event.at_s)
    ]
    found = given.findings
    blocks: list[Block] = []
    if found.chaos:
        is_sound = all(each.is_sound for each in found.chaos.values())
        blocks += [
            "Every load was given twice, undisturbed and then disturbed, and the answers held "
            "against each other.",
            Points(found.chaos_sentences, "" if is_sound else "caution"),
        ]
    head = ["Second of the run", "Done", "To", "Result"]
    return Section("chaos", "Under chaos", [*blocks, Table(head, rows, first_number=4)])


def soak_section(given: Given) -> Section | None:
    """Whether anything grew; only of runs that are long enough to tell."""
    found = given.findings
    if found.soak is None:
        return None
    why = (
        "Growth is the median slope between all pairs of moments after warm-up, with its 99 % "
        "interval; the chart of the servers below has every moment."
    )
    tone = "" if found.soak.is_flat else "caution"
    return Section("soak", "Over the long run", [why, Points(found.soak_sentences, tone)])


def answer_section(given: Given) -> Section | None:
    """Whether arms answered the same."""
    found = given.findings
    if not found.answers:
        return None
    blocks: list[Block] = [Points(found.answer_sentences)]
    rows = [
        [each.arm, difference.ask, f"{difference.unit} {difference.at}", *map(str, lengths)]
        for each in found.answers
        for difference in each.different[:_MOST_DIFFERENCES]
        for lengths in [(difference.length, difference.baseline_length)]
    ]
    if rows:
        head = ["Arm", "Ask", "Differs from", "Length", "Length of the baseline's"]
        blocks.append(Table(head, rows, first_number=3, is_wide=True))
    return Section("answers", "The answers", blocks)
