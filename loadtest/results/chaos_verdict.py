"""The cost of injected faults: lost requests, corrupted answers, and time to recover."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.loadtest.records import RequestOutcome, RequestRecord
from outrider.loadtest.servers.chaos import BACK, ChaosEvent

HORIZON_S = 120.0  # a silence within this time of an event is attributed to it
AT_ONCE_S = 0.1  # between signals to the ranks of a role
NOTICEABLE = 1.5  # times the longest silence before the first event
MAX_SHIFT_TOKENS = 64  # tokens that a few rounds could duplicate or drop
MIN_MATCHING_TOKENS = 4  # after the shift; fewer may match by chance


# Blocks of a run with chaos: the first, undisturbed one is the reference.
UNDISTURBED, DISTURBED = 0, 1


class AnswerMatch(StrEnum):
    SAME = "same"
    DUPLICATED = "duplicated"  # some tokens arrived twice
    MISSING = "missing"  # some tokens never arrived
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery from one event; times count from the event."""

    event: ChaosEvent
    silence_s: float | None  # longest time without a token for any request; None: to the end
    recovery_s: float | None  # until that silence ended; 0 if hardly longer than before the event
    back_s: float | None = None  # until the role was ready again; None if unknown or never
    back_error: str | None = None  # why the role did not come back

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
            return f"{event}: no token arrived afterwards{back}."
        if self.recovery_s == 0:
            return f"{event}: no effect on clients{back}."
        return (
            f"{event}: tokens resumed after {self.recovery_s:.1f} s "
            f"({self.silence_s:.1f} s without a token){back}."
        )


@dataclass(frozen=True, slots=True)
class ChaosVerdict:
    """Verdict of a disturbed shift; lists hold request ids."""

    requests: int
    failed_before: int  # failed before the first event, so not by chaos
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """No request was lost or answered wrongly, and every role came back."""
        is_whole = not (self.lost or self.duplicated or self.missing or self.wrong)
        return is_whole and all(
            each.recovery_s is not None and each.event.error is None and each.back_error is None
            for each in self.recoveries
        )

    @property
    def headline(self) -> str:
        """Whether chaos did harm, and the kinds of harm."""
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
            (len(self.duplicated), f"of {self.compared} answers with duplicated tokens"),
            (len(self.missing), f"of {self.compared} answers with missing tokens"),
            (len(self.wrong), f"of {self.compared} answers wrong"),
            (sum(each.recovery_s is None for each in self.recoveries), "silences without end"),
            (len(away), "roles that did not come back"),
            (len(undone), "events that could not be done"),
        ]
        counts = ", ".join(f"{num} {words}" for num, words in harm if num)
        return f"Chaos did harm: {counts}."

    @property
    def sentences(self) -> list[str]:
        counts = (
            f"Of {self.requests} requests {len(self.lost)} were lost; of {self.compared} answers "
            f"compared with an undisturbed run {len(self.duplicated)} had duplicated tokens, "
            f"{len(self.missing)} had missing tokens, {len(self.wrong)} were wrong."
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
    """`references` are records of the same requests without chaos. Comparing answers needs token
    ids, and greedy or seeded requests."""
    own = list(records)
    first_s = min((event.at_s for event in events), default=float("inf"))
    failed = [record for record in own if record.outcome is not RequestOutcome.OK]
    expected = {
        each.id: each.token_ids
        for each in references
        if each.token_ids is not None and each.outcome is RequestOutcome.OK
    }
    answers: dict[AnswerMatch, list[str]] = {kind: [] for kind in AnswerMatch}
    for record in own:
        if (
            record.outcome is RequestOutcome.OK
            and record.token_ids is not None
            and record.id in expected
        ):
            answers[compare_answer(record.token_ids, expected[record.id])].append(record.id)
    lost = [record.id for record in failed if record.end_s >= first_s]
    return ChaosVerdict(
        requests=len(own),
        failed_before=len(failed) - len(lost),
        lost=lost,
        duplicated=answers[AnswerMatch.DUPLICATED],
        missing=answers[AnswerMatch.MISSING],
        wrong=answers[AnswerMatch.WRONG],
        compared=sum(map(len, answers.values())),
        recoveries=recoveries_of(events, own),
    )


def compare_answer(got: Sequence[int], expected: Sequence[int]) -> AnswerMatch:
    """Classifies an answer. `max_tokens` may cut both, so lengths alone say nothing."""
    if list(got) == list(expected):
        return AnswerMatch.SAME
    pairs = zip(got, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    for shift in range(1, MAX_SHIFT_TOKENS + 1):
        if shift <= same and _is_alike(got[same:], expected[same - shift :]):
            return AnswerMatch.DUPLICATED
        if _is_alike(got[same:], expected[same + shift :]):
            return AnswerMatch.MISSING
    return AnswerMatch.MISSING if same == len(got) else AnswerMatch.WRONG


def _is_alike(got: Sequence[int], expected: Sequence[int]) -> bool:
    """Compares the common length."""
    length = min(len(got), len(expected))
    return length >= MIN_MATCHING_TOKENS and list(got[:length]) == list(expected[:length])


def recoveries_of(events: Sequence[ChaosEvent], records: Sequence[RequestRecord]) -> list[Recovery]:
    """One recovery per event; an event on several processes counts once."""
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
    overlapping = [pair for pair in silences if pair[1] > event.at_s and pair[0] < until_s]
    # A silence is attributed only up to the next event.
    start_s, end_s = max(
        overlapping,
        key=lambda pair: min(pair[1], until_s) - pair[0],
        default=(event.at_s, event.at_s),
    )
    if end_s == float("inf"):
        return Recovery(event, None, None, back_s, back_error)
    silence_s = end_s - start_s
    recovery_s = end_s - event.at_s if silence_s > NOTICEABLE * usual_s else 0.0
    return Recovery(event, silence_s, recovery_s, back_s, back_error)


def _one_each(events: Sequence[ChaosEvent]) -> list[ChaosEvent]:
    """Merges the events of ranks that were signalled together."""
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
    """Periods without an update of any request while at least one request was waiting.

    The last one ends at infinity if a request was still waiting.
    """
    updates = sorted(record.sent_s + at for record in records for at in record.update_s)
    waiting = sorted((record.sent_s, _waiting_until(record)) for record in records)
    sent = [start for start, _ in waiting]
    silences = []
    latest_end_s, taken = float("-inf"), 0
    bounds = [float("-inf"), *updates, float("inf")]
    for before_s, after_s in zip(bounds, bounds[1:], strict=False):
        while taken < len(waiting) and waiting[taken][0] <= before_s:
            latest_end_s = max(latest_end_s, waiting[taken][1])
            taken += 1
        start_s = before_s
        if latest_end_s <= before_s:  # no request is waiting yet
            place = bisect.bisect_right(sent, before_s)
            if place == len(sent) or sent[place] >= after_s:
                continue
            start_s = sent[place]
        silences.append((start_s, after_s))
    return silences


def _waiting_until(record: RequestRecord) -> float:
    """When a request stopped waiting for tokens; a completed one ends after its last update."""
    if record.outcome is RequestOutcome.OK and record.update_s:
        return record.sent_s + record.update_s[-1]
    return record.end_s
