"""Whether arms gave the same answers, token by token: greedy speculation must not change a text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.bench.load.records import Outcome, Phase, RequestRecord

NAMED = 3  # differing or missing asks that a sentence names


@dataclass(frozen=True, slots=True)
class Difference:
    ask: str
    at: int  # the first token, or character, that differs; from 0
    length: int  # of the arm's answer
    baseline_length: int
    unit: str  # "token" or "character"


@dataclass(slots=True)
class AnswersCompared:
    """One arm's answers beside the baseline's."""

    arm: str
    baseline: str
    same: int = 0
    by_text: int = 0  # of all that were compared, those without ids on either side
    different: list[Difference] = field(default_factory=list)
    only_in_arm: list[str] = field(default_factory=list)
    only_in_baseline: list[str] = field(default_factory=list)
    without_text: list[str] = field(default_factory=list)  # neither ids nor text were kept
    unsteady: list[str] = field(default_factory=list)  # asks that one arm answered in two ways

    @property
    def compared(self) -> int:
        return self.same + len(self.different)

    def sentences(self) -> list[str]:
        """What a report says of them."""
        if not self.compared:
            said = [f"No answer of “{self.arm}” can be compared with one of “{self.baseline}”."]
        else:
            said = [self._summary()]
        if self.only_in_arm:
            said.append(f"Only “{self.arm}” answered {_named(self.only_in_arm)}.")
        if self.only_in_baseline:
            said.append(f"Only “{self.baseline}” answered {_named(self.only_in_baseline)}.")
        if self.without_text:
            said.append(f"Nobody kept the answers to {_named(self.without_text)}.")
        if self.unsteady:
            said.append(
                f"One arm by itself gave different answers to {_named(self.unsteady)}; the first "
                "was compared."
            )
        return said

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
        earliest = min(self.different, key=lambda each: (each.at, each.ask))
        return (
            f"{self.same} of {self.compared} answers of “{self.arm}” and “{self.baseline}” are the "
            f"same {unit}{mixed}; {len(self.different)} differ, the earliest at {earliest.unit} "
            f"{earliest.at} (ask {earliest.ask})."
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: Sequence[int] | None
    text: str | None

    def difference(self, other: _Answer, ask: str) -> Difference | None:
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
        return Difference(ask, at, len(mine), len(theirs), unit)

    def can_be_held_against(self, other: _Answer) -> bool:
        has_ids = self.token_ids is not None and other.token_ids is not None
        return has_ids or (self.text is not None and other.text is not None)


def compare_answers(
    records: Iterable[RequestRecord], baseline: str | None = None
) -> list[AnswersCompared]:
    """Every arm beside the baseline ("off" or the first), by ask.

    Holds one answer for each arm and ask. Failed requests have none.
    """
    arms: dict[str, dict[str, _Answer]] = {}
    unsteady: dict[str, dict[str, None]] = {}
    for record in records:
        if record.outcome is not Outcome.OK or record.phase is Phase.DISCARDED:
            continue
        ids = None if record.token_ids is None else array("q", record.token_ids)
        answer = _Answer(ids, record.text)
        kept = arms.setdefault(record.arm, {}).setdefault(record.id, answer)
        if kept.can_be_held_against(answer) and kept.difference(answer, record.id) is not None:
            unsteady.setdefault(record.arm, {})[record.id] = None
    if not arms:
        return []
    against = baseline or ("off" if "off" in arms else next(iter(arms)))
    theirs = arms.get(against, {})
    return [
        _compared(
            arm, against, answers, theirs, [*unsteady.get(arm, {}), *unsteady.get(against, {})]
        )
        for arm, answers in arms.items()
        if arm != against
    ]


def _compared(
    arm: str,
    baseline: str,
    mine: dict[str, _Answer],
    theirs: dict[str, _Answer],
    unsteady: list[str],
) -> AnswersCompared:
    found = AnswersCompared(arm, baseline, unsteady=list(dict.fromkeys(unsteady)))
    found.only_in_arm = [ask for ask in mine if ask not in theirs]
    found.only_in_baseline = [ask for ask in theirs if ask not in mine]
    for ask, answer in mine.items():
        other = theirs.get(ask)
        if other is None:
            continue
        if not answer.can_be_held_against(other):
            found.without_text.append(ask)
            continue
        found.by_text += answer.token_ids is None or other.token_ids is None
        difference = answer.difference(other, ask)
        if difference is None:
            found.same += 1
        else:
            found.different.append(difference)
    return found


def _named(asks: list[str]) -> str:
    named = ", ".join(asks[:NAMED])
    more = f" and {len(asks) - NAMED} more" if len(asks) > NAMED else ""
    return f"{len(asks)} ask{'' if len(asks) == 1 else 's'} ({named}{more})"
