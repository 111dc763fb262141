"""All findings of a run, for its page and the terminal; alarms come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from outrider.loadtest.records import RequestRecord, ShiftPhase
from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.answers import AnswerComparison, compare_answers
from outrider.loadtest.results.chaos_verdict import (
    DISTURBED,
    UNDISTURBED,
    ChaosVerdict,
    chaos_verdict,
)
from outrider.loadtest.results.sentences import SpeedFinding, finding
from outrider.loadtest.results.settings import setting_label, setting_of, settings_of
from outrider.loadtest.results.soak import SoakVerdict, TrendKind, soak_verdict
from outrider.loadtest.results.verdicts import baseline_of
from outrider.loadtest.runs import RunFolder
from outrider.loadtest.servers.chaos import read_events

SOAK_S = 1500.0  # shorter runs cannot show growth: caches fill during the first minutes
NOTHING_SAID = "No request was answered, so there are no findings."


@dataclass(frozen=True)
class Findings:
    searched: list[str] = field(default_factory=list)  # results of `--find`, one per arm
    finding: SpeedFinding | None = None
    chaos: dict[str, ChaosVerdict] = field(default_factory=dict)  # by arm and load
    soak: SoakVerdict | None = None
    answers: list[AnswerComparison] = field(default_factory=list)

    @cached_property
    def alarms(self) -> list[str]:
        """Harm done by chaos, and growing resources."""
        broken = [
            self._of_chaos(name, each.headline)
            for name, each in self.chaos.items()
            if not each.is_sound
        ]
        trends = self.soak.trends if self.soak is not None else ()
        return broken + [each.sentence for each in trends if each.course is TrendKind.GROWS]

    @property
    def headline(self) -> str:
        """The most important sentence."""
        first = [*self.alarms, *self.searched]
        if first:
            return first[0]
        return self.finding.headline if self.finding is not None else NOTHING_SAID

    @property
    def top(self) -> list[str]:
        """Sentences at the top of a report."""
        return [*self.alarms, *self.searched, *(self.finding.sentences if self.finding else [])]

    @property
    def chaos_sentences(self) -> list[str]:
        return [
            self._of_chaos(name, sentence)
            for name, each in self.chaos.items()
            for sentence in (each.headline, *each.sentences)
        ]

    @property
    def soak_sentences(self) -> list[str]:
        if self.soak is None:
            return []
        growing = sum(each.course is TrendKind.GROWS for each in self.soak.trends)
        verdict = (
            "Nothing grew over the run, to its precision."
            if self.soak.is_flat
            else f"{growing} of {len(self.soak.trends)} measures grow."
        )
        return [verdict, *self.soak.sentences]

    @property
    def answer_sentences(self) -> list[str]:
        return [sentence for each in self.answers for sentence in each.sentences()]

    @property
    def sentences(self) -> list[str]:
        """All sentences, without duplicates."""
        more = (*self.chaos_sentences, *self.soak_sentences, *self.answer_sentences)
        return list(dict.fromkeys([*self.top, *more])) or [NOTHING_SAID]

    def _of_chaos(self, name: str, sentence: str) -> str:
        return f"{name}: {sentence}" if len(self.chaos) > 1 else sentence


def findings_of(run: RunFolder, analysis: Analysis) -> Findings:
    return Findings(
        searched=_searched(run, analysis),
        finding=finding(analysis),
        chaos=_chaos(run, analysis),
        soak=_soak(analysis),
        answers=_answers(run, analysis),
    )


def _searched(run: RunFolder, analysis: Analysis) -> list[str]:
    """Notes of a search start with an arm's name; other notes are about prompts."""
    starts = tuple(f"{arm}: " for arm in analysis.arms)
    return [note for note in run.facts.notes if note.startswith(starts)]


def _soak(analysis: Analysis) -> SoakVerdict | None:
    moments = [sample.at_s for sample in analysis.samples]
    if not moments or max(moments) - min(moments) < SOAK_S:
        return None
    return soak_verdict(analysis.samples)


def _answers(run: RunFolder, analysis: Analysis) -> list[AnswerComparison]:
    """Empty unless two arms have kept answers."""
    if len(analysis.arms) < 2:
        return []
    found = compare_answers(_kept(run, analysis), baseline_of(analysis))
    return found if any(each.compared for each in found) else []


def _kept(run: RunFolder, analysis: Analysis) -> Iterator[RequestRecord]:
    """Records with kept answers, with ids unique across settings."""
    settings = settings_of(analysis.cells)
    names = {cell.name: setting_label(setting_of(cell), settings) for cell in analysis.cells}
    for record in run.requests():
        if record.token_ids is None and record.text is None:
            continue
        if names.get(record.cell):
            record.id = f"{names[record.cell]}: {record.id}"
        yield record


def _chaos(run: RunFolder, analysis: Analysis) -> dict[str, ChaosVerdict]:
    """Verdict per arm and load: the disturbed block against the undisturbed one."""
    if not run.chaos_path.exists():
        return {}
    events = read_events(run.chaos_path)
    records: dict[tuple[str, str, int], list[RequestRecord]] = {}
    for record in run.requests():
        if record.phase is not ShiftPhase.DISCARDED:
            records.setdefault((record.arm, record.cell, record.block), []).append(record)
    found = {}
    starts = sorted(shift.start_s for shift in analysis.all_shifts)
    for shift in analysis.shifts:
        if shift.block != DISTURBED:
            continue
        # Events may be due before the first request, and a role may return after the last.
        before = [each.end_s for each in analysis.all_shifts if each.end_s <= shift.start_s]
        from_s = max(before, default=float("-inf"))
        until_s = next((each for each in starts if each >= shift.end_s), float("inf"))
        found[f"{shift.arm} at {shift.cell}"] = chaos_verdict(
            [event for event in events if from_s <= event.at_s < until_s],
            records.get((shift.arm, shift.cell, DISTURBED), []),
            records.get((shift.arm, shift.cell, UNDISTURBED), []),
        )
    return found
