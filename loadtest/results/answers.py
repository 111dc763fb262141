"""Compares the arms' answers token by token: greedy speculation must not change a text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.loadtest.records import RequestOutcome, RequestRecord, ShiftPhase

NAMED = 3  # request ids that a sentence lists


@dataclass(frozen=True, slots=True)
class Difference:
    request_id: str
    at: int  # the first token, or character, that differs; from 0
    length: int  # of the arm's answer
    baseline_length: int
    unit: str  # "token" or "character"


@dataclass(slots=True)
class AnswerComparison:
    """One arm's answers compared with the baseline's."""

    arm: str
    baseline: str
    same: int = 0
    by_text: int = 0  # of those compared, by text because a side has no token ids
    different: list[Difference] = field(default_factory=list)
    only_in_arm: list[str] = field(default_factory=list)
    only_in_baseline: list[str] = field(default_factory=list)
    not_kept: list[str] = field(default_factory=list)  # neither ids nor text were kept
    inconsistent: list[str] = field(
        default_factory=list
    )  # requests that one arm answered differently

    @property
    def compared(self) -> int:
        return self.same + len(self.different)

    def sentences(self) -> list[str]:
        """The comparison in sentences, for the report."""
        if not self.compared:
            sentences = [
                f"No answer of “{self.arm}” can be compared with one of “{self.baseline}”."
            ]
        else:
            sentences = [self._summary()]
        if self.only_in_arm:
            sentences.append(f"Only “{self.arm}” answered {_listed(self.only_in_arm)}.")
        if self.only_in_baseline:
            sentences.append(f"Only “{self.baseline}” answered {_listed(self.only_in_baseline)}.")
        if self.not_kept:
            sentences.append(f"No answers were kept of {_listed(self.not_kept)}.")
        if self.inconsistent:
            sentences.append(
                f"One arm gave different answers to {_listed(self.inconsistent)}; the first was "
                "compared."
            )
        return sentences

    def _summary(self) -> str:
        unit = "character by character" if self.by_text == self.compared else "token by token"
        mixed = (
            f" ({self.by_text} of them by their text)" if 0 < self.by_text < self.compared else ""
        )
        if not self.different:
            return (
                f"All {self.compared} answers of “{self.arm}” and “{self.baseline}” are the same "
                f"{unit}{mixed}."
            )
        earliest = min(self.different, key=lambda each: (each.at, each.request_id))
        return (
            f"{self.same} of {self.compared} answers of “{self.arm}” and “{self.baseline}” are the "
            f"same {unit}{mixed}; {len(self.different)} differ, the earliest at {earliest.unit} "
            f"{earliest.at} (request {earliest.request_id})."
        )


@dataclass(frozen=True, slots=True)
class _KeptAnswer:
    token_ids: Sequence[int] | None
    text: str | None

    def difference(self, other: _KeptAnswer, request_id: str) -> Difference | None:
        mine: Sequence[int] | str
        theirs: Sequence[int] | str
        if self.token_ids is not None and other.token_ids is not None:
            mine, theirs, unit = self.token_ids, other.token_ids, "token"
        else:
            mine, theirs, unit = self.text or "", other.text or "", "character"
        if mine == theirs:
            return None
        shared = min(len(mine), len(theirs))
        at = next((index for index in range(shared) if mine[index] != theirs[index]), shared)
        return Difference(request_id, at, len(mine), len(theirs), unit)

    def is_comparable(self, other: _KeptAnswer) -> bool:
        has_ids = self.token_ids is not None and other.token_ids is not None
        return has_ids or (self.text is not None and other.text is not None)


def compare_answers(
    records: Iterable[RequestRecord], baseline: str | None = None
) -> list[AnswerComparison]:
    """Compares every arm with the baseline ("off" or the first), by request id.

    Keeps one answer per arm and request; failed requests have none.
    """
    arms: dict[str, dict[str, _KeptAnswer]] = {}
    inconsistent: dict[str, dict[str, None]] = {}
    for record in records:
        if record.outcome is not RequestOutcome.OK or record.phase is ShiftPhase.DISCARDED:
            continue
        ids = None if record.token_ids is None else array("q", record.token_ids)
        answer = _KeptAnswer(ids, record.text)
        kept = arms.setdefault(record.arm, {}).setdefault(record.id, answer)
        if kept.is_comparable(answer) and kept.difference(answer, record.id) is not None:
            inconsistent.setdefault(record.arm, {})[record.id] = None
    if not arms:
        return []
    against = baseline or ("off" if "off" in arms else next(iter(arms)))
    theirs = arms.get(against, {})
    return [
        _compared(
            arm,
            against,
            answers,
            theirs,
            [*inconsistent.get(arm, {}), *inconsistent.get(against, {})],
        )
        for arm, answers in arms.items()
        if arm != against
    ]


def _compared(
    arm: str,
    baseline: str,
    mine: dict[str, _KeptAnswer],
    theirs: dict[str, _KeptAnswer],
    inconsistent: list[str],
) -> AnswerComparison:
    found = AnswerComparison(arm, baseline, inconsistent=list(dict.fromkeys(inconsistent)))
    found.only_in_arm = [request_id for request_id in mine if request_id not in theirs]
    found.only_in_baseline = [request_id for request_id in theirs if request_id not in mine]
    for request_id, answer in mine.items():
        other = theirs.get(request_id)
        if other is None:
            continue
        if not answer.is_comparable(other):
            found.not_kept.append(request_id)
            continue
        found.by_text += answer.token_ids is None or other.token_ids is None
        difference = answer.difference(other, request_id)
        if difference is None:
            found.same += 1
        else:
            found.different.append(difference)
    return found


def _listed(request_ids: list[str]) -> str:
    named = ", ".join(request_ids[:NAMED])
    more = f" and {len(request_ids) - NAMED} more" if len(request_ids) > NAMED else ""
    return f"{len(request_ids)} request{'' if len(request_ids) == 1 else 's'} ({named}{more})"
