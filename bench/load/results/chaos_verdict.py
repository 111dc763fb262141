"""What chaos cost: requests lost, tokens doubled, missing or wrong, and how long it took."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.bench.load.records import Outcome, RequestRecord
from outrider.bench.load.servers.chaos import BACK, ChaosEvent

HORIZON_S = 120.0  # after an event, within which a silence is put down to it
AT_ONCE_S = 0.1  # between signals to the ranks of a role
NOTICED = 1.5  # times the longest silence before anything was done
MOST_SHIFTED = 64  # tokens that a round, or a few, could have doubled or left out
LEAST_ALIKE = 4  # tokens after the shift, fewer may agree by chance


# The blocks of a run with chaos: first the same requests are answered in peace.
UNDISTURBED, DISTURBED = 0, 1


class Answer(StrEnum):
    SAME = "same"
    DUPLICATED = "duplicated"  # some tokens came twice
    MISSING = "missing"  # some never came
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Recovery:
    """From one event on; times count from it."""

    event: ChaosEvent
    silence_s: float | None  # the longest time without a token for anybody; None: for good
    recovery_s: float | None  # to its end; 0 if it was hardly longer than in quiet times
    back_s: float | None = None  # until the role was ready again; None if not, or nobody watched
    back_error: str | None = None  # why it is not

    @property
    def sentence(self) -> str:
        event = f"{self.event.did} {self.event.what} at {self.event.at_s:.1f} s"
        if self.event.error is not None:
            return f"{event}: could not be done, {self.event.error}."
        back = ""
        if self.back_s is not None:
            back = f", the {_role(self.event)} was back after {self.back_s:.1f} s"
        elif self.back_error is not None:
            back = f", the {_role(self.event)} is {self.back_error}"
        if self.recovery_s is None:
            return f"{event}: no token came any more{back}."
        if self.recovery_s == 0:
            return f"{event}: no client noticed{back}."
        return (
            f"{event}: tokens came again after {self.recovery_s:.1f} s "
            f"({self.silence_s:.1f} s without any){back}."
        )


@dataclass(frozen=True, slots=True)
class ChaosVerdict:
    """Ids are those of asks."""

    requests: int
    failed_before: int  # not by chaos: they ended before the first event
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Nothing was lost, doubled, missing or wrong, and all came back each time."""
        is_whole = not (self.lost or self.duplicated or self.missing or self.wrong)
        return is_whole and all(
            each.recovery_s is not None and each.event.error is None and each.back_error is None
            for each in self.recoveries
        )

    @property
    def headline(self) -> str:
        """Whether it did harm, and which."""
        if self.is_sound:
            return (
                f"Chaos lost nothing: {self.requests} requests, {len(self.recoveries)} "
                f"{'event' if len(self.recoveries) == 1 else 'events'}, {self.compared} answers "
                "compared with an undisturbed run."
            )
        undone = [each for each in self.recoveries if each.event.error is not None]
        away = [each for each in self.recoveries if each.back_error is not None]
        harm = [
            (len(self.lost), f"of {self.requests} requests lost"),
            (len(self.duplicated), f"of {self.compared} answers with tokens twice"),
            (len(self.missing), f"of {self.compared} answers lacking some"),
            (len(self.wrong), f"of {self.compared} answers wrong"),
            (sum(each.recovery_s is None for each in self.recoveries), "silences without an end"),
            (len(away), "roles that did not come back"),
            (len(undone), "events that could not be done"),
        ]
        told = ", ".join(f"{num} {words}" for num, words in harm if num)
        return f"Chaos did harm: {told}."

    @property
    def sentences(self) -> list[str]:
        counts = (
            f"Of {self.requests} requests {len(self.lost)} were lost; of {self.compared} answers "
            f"compared with an undisturbed run {len(self.duplicated)} had tokens twice, "
            f"{len(self.missing)} lacked some, {len(self.wrong)} were wrong."
        )
        if not self.compared:
            counts = (
                f"Of {self.requests} requests {len(self.lost)} were lost; no answer could be "
                "compared with an undisturbed run."
            )
        before = f"{self.failed_before} requests had failed before the first event."
        return [
            counts,
            *([before] if self.failed_before else []),
            *(recovery.sentence for recovery in self.recoveries),
        ]


def chaos_verdict(
    events: Sequence[ChaosEvent],
    records: Iterable[RequestRecord],
    references: Iterable[RequestRecord],
) -> ChaosVerdict:
    """`references` are records of the same asks without chaos; token ids must have been kept, and
    the asks be greedy or seeded, for answers to be compared."""
    own = list(records)
    first_s = min((event.at_s for event in events), default=float("inf"))
    failed = [record for record in own if record.outcome is not Outcome.OK]
    expected = {
        each.id: each.token_ids
        for each in references
        if each.token_ids is not None and each.outcome is Outcome.OK
    }
    answers: dict[Answer, list[str]] = {kind: [] for kind in Answer}
    for record in own:
        if record.outcome is Outcome.OK and record.token_ids is not None and record.id in expected:
            answers[compare_answer(record.token_ids, expected[record.id])].append(record.id)
    lost = [record.id for record in failed if record.end_s >= first_s]
    return ChaosVerdict(
        requests=len(own),
        failed_before=len(failed) - len(lost),
        lost=lost,
        duplicated=answers[Answer.DUPLICATED],
        missing=answers[Answer.MISSING],
        wrong=answers[Answer.WRONG],
        compared=sum(map(len, answers.values())),
        recoveries=recoveries_of(events, own),
    )


def compare_answer(got: Sequence[int], expected: Sequence[int]) -> Answer:
    """Answers may be cut at a number of tokens, so one with tokens twice need not be longer."""
    if list(got) == list(expected):
        return Answer.SAME
    pairs = zip(got, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    for shift in range(1, MOST_SHIFTED + 1):
        if shift <= same and _is_alike(got[same:], expected[same - shift :]):
            return Answer.DUPLICATED
        if _is_alike(got[same:], expected[same + shift :]):
            return Answer.MISSING
    return Answer.MISSING if same == len(got) else Answer.WRONG


def _is_alike(got: Sequence[int], expected: Sequence[int]) -> bool:
    """As far as both go."""
    length = min(len(got), len(expected))
    return length >= LEAST_ALIKE and list(got[:length]) == list(expected[:length])


def recoveries_of(events: Sequence[ChaosEvent], records: Sequence[RequestRecord]) -> list[Recovery]:
    """One for each event; those done to several processes at once count as one."""
    done = _one_each([event for event in events if event.did not in (BACK, "continue")])
    if not done:
        return []
    silences = _silences(records)
    first_s = done[0].at_s
    usual_s = max((end - start for start, end in silences if end < first_s), default=0.0)
    nexts = [event.at_s for event in done[1:]] + [float("inf")]
    return [
        _recovery(event, min(next_s, event.at_s + HORIZON_S), silences, usual_s, events)
        for event, next_s in zip(done, nexts, strict=True)
    ]


def _recovery(
    event: ChaosEvent,
    until_s: float,
    silences: Sequence[tuple[float, float]],
    usual_s: float,
    events: Sequence[ChaosEvent],
) -> Recovery:
    returns = [
        each
        for each in events
        if each.did == BACK and each.of_s is not None and _role(each) == _role(event)
        if abs(each.of_s - event.at_s) < AT_ONCE_S
    ]
    back_s = min((each.at_s - event.at_s for each in returns if each.error is None), default=None)
    back_error = next((each.error for each in returns if each.error is not None), None)
    around = [pair for pair in silences if pair[1] > event.at_s and pair[0] < until_s]
    # What a later event makes longer counts only as far as that.
    start_s, end_s = max(
        around,
        key=lambda pair: min(pair[1], until_s) - pair[0],
        default=(event.at_s, event.at_s),
    )
    if end_s == float("inf"):
        return Recovery(event, None, None, back_s, back_error)
    silence_s = end_s - start_s
    recovery_s = end_s - event.at_s if silence_s > NOTICED * usual_s else 0.0
    return Recovery(event, silence_s, recovery_s, back_s, back_error)


def _one_each(events: Sequence[ChaosEvent]) -> list[ChaosEvent]:
    """Ranks of a role that were signalled in one go have events within a moment."""
    kept: list[ChaosEvent] = []
    for event in sorted(events, key=lambda each: each.at_s):
        is_same = (
            bool(kept)
            and (kept[-1].did, _role(kept[-1])) == (event.did, _role(event))
            and event.at_s - kept[-1].at_s < AT_ONCE_S
        )
        if not is_same:
            kept.append(event)
    return kept


def _role(event: ChaosEvent) -> str:
    return event.what.partition(" ")[0]


def _silences(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """The times between updates, of whatever requests, in which somebody waited for one.

    The last one has no end if somebody then waited in vain.
    """
    updates = sorted(record.sent_s + at for record in records for at in record.update_s)
    waiting = sorted((record.sent_s, _waited_until(record)) for record in records)
    sent = [start for start, _ in waiting]
    silences = []
    latest_end_s, taken = float("-inf"), 0
    bounds = [float("-inf"), *updates, float("inf")]
    for before_s, after_s in zip(bounds, bounds[1:], strict=False):
        while taken < len(waiting) and waiting[taken][0] <= before_s:
            latest_end_s = max(latest_end_s, waiting[taken][1])
            taken += 1
        start_s = before_s
        if latest_end_s <= before_s:  # nobody waits yet
            place = bisect.bisect_right(sent, before_s)
            if place == len(sent) or sent[place] >= after_s:
                continue
            start_s = sent[place]
        silences.append((start_s, after_s))
    return silences


def _waited_until(record: RequestRecord) -> float:
    """For tokens; one that is complete ends a little after its last."""
    if record.outcome is Outcome.OK and record.update_s:
        return record.sent_s + record.update_s[-1]
    return record.end_s
