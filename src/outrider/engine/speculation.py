"""Speculation for operators: status, explanations and changes, applied between steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.links.gateway_messages import (
    ExplainSpeculation,
    ExplainSpeculationResult,
    SetSpeculation,
    SetSpeculationResult,
)
from outrider.links.speculation import (
    MAX_STEP_ACCOUNTS,
    CandidateAccount,
    SpeculationChange,
    SpeculationSettings,
    SpeculationStatus,
    StepAccount,
)
from outrider.scheduler.control import StepRecord
from outrider.scheduler.depths import Candidate
from outrider.scheduler.policies import GOODPUT, OFF, POLICIES
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.speculation_monitor import SpeculationMonitor, speedup_over_plain

logger = logging.getLogger(__name__)

_NUM_RECENT = 64  # steps
_NUM_PARTS = 4  # of the recorded steps, to show calibration over time
_MAX_DEPTH = 32  # the same bound as a request's


class SpeculationService:
    """Answers for one engine; used by the thread that steps it."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        """`depth` is the maximum depth of requests that set none."""
        self._scheduler = scheduler
        self._control = scheduler.control
        self._depth = depth
        self._first = (self._control.policy_name, self._control.max_depth)
        self._monitor = SpeculationMonitor(self._control)

    def settings(self) -> SpeculationSettings:
        control = self._control
        return SpeculationSettings(
            control.policy_name,
            control.max_depth,
            *self._first,
            self._depth,
            control.is_measured,
        )

    def status(self) -> SpeculationStatus:
        control = self._control
        recent = self._recent()
        mean_depth, drafting_share = _depths_of(recent)
        return SpeculationStatus(
            settings=self.settings(),
            mean_depth=mean_depth,
            drafting_share=drafting_share,
            acceptance=self._acceptance,
            agreement=control.agreement,
            gain=self._gain(recent),
            draft_cost=self._draft_cost(),
            arrivals_per_s=control.load.arrivals_per_s,
            calibration_error=next(iter(self._calibration(recent, num_parts=1)), None),
            steps_without=control.steps_without,
            warning=self._monitor.warning,
        )

    def set(self, message: SetSpeculation) -> SetSpeculationResult:
        """Changes policy and bound, both or neither."""
        change, error = message.change, ""
        try:
            _check(change)
        except OutriderError as found:
            error = str(found)
        else:
            self._apply(change)
        return SetSpeculationResult(message.query, change, self.settings(), error)

    def explain(self, message: ExplainSpeculation) -> ExplainSpeculationResult:
        remembered = self._control.records
        try:
            selected, error = _steps(remembered, message), ""
        except OutriderError as found:
            selected, error = (), str(found)
        return ExplainSpeculationResult(
            message.query,
            tuple(map(_account_of, selected)),
            len(remembered),
            self._calibration(remembered),
            error,
        )

    def look(self, now_s: float) -> None:
        """Call after a step: logs a warning if speculation has not paid off for a while."""
        warning = self._monitor.look(now_s, self._scheduler.num_running, self._acceptance)
        if warning:
            logger.warning("%s", warning)

    @property
    def _acceptance(self) -> float | None:
        return self._control.acceptance if self._scheduler.stats.verified_tokens else None

    def _apply(self, change: SpeculationChange) -> None:
        control = self._control
        before = self.settings()
        if change.policy is not None and change.policy != control.policy_name:
            control.set_policy(change.policy)
        if change.sets_max_depth:
            control.max_depth = change.max_depth
        if self.settings() != before:
            bound = "its own" if control.max_depth is None else str(control.max_depth)
            logger.info(
                "speculation is set: policy %s, most drafts of a request: %s",
                control.policy_name,
                bound,
            )

    def _recent(self) -> Sequence[StepRecord]:
        """The last decoding steps, newest first."""
        decoded = (each for each in reversed(self._control.records) if each.num_rows)
        return list(islice(decoded, _NUM_RECENT))

    def _gain(self, recent: Sequence[StepRecord]) -> float | None:
        control = self._control
        if not control.is_measured or not recent or control.policy_name == OFF:
            return None
        if control.policy_name == GOODPUT and control.has_model:
            return control.gain
        return speedup_over_plain(recent, control.costs.now)

    def _calibration(
        self, records: Iterable[StepRecord], num_parts: int = _NUM_PARTS
    ) -> tuple[float, ...]:
        return calibration(records, num_parts) if self._control.is_measured else ()

    def _draft_cost(self) -> float | None:
        costs = self._control.costs.now
        if not self._control.is_measured or not costs.verify.at(1):
            return None
        return costs.first_draft.at(1) / costs.verify.at(1) or None


def _check(change: SpeculationChange) -> None:
    if change.policy is not None and change.policy not in POLICIES:
        raise ConfigError(
            f"the policy is {change.policy!r:.80}; it must be one of {', '.join(POLICIES)}."
        )
    depth = change.max_depth
    if change.sets_max_depth and depth is not None and not 0 <= depth <= _MAX_DEPTH:
        raise ConfigError(
            f"the maximum depth is {depth}; it must be from 0 to {_MAX_DEPTH}, or none for each "
            "request's own."
        )


def _depths_of(records: Sequence[StepRecord]) -> tuple[float, float]:
    """The mean depth of drafting rows, and their share of all decode rows."""
    num_rows = sum(each.num_rows for each in records)
    drafting = [depth for each in records for depth in each.choice.depths if depth]
    if not drafting:
        return 0.0, 0.0
    return sum(drafting) / len(drafting), len(drafting) / num_rows


def _steps(remembered: Sequence[StepRecord], message: ExplainSpeculation) -> Sequence[StepRecord]:
    if not 1 <= message.last <= MAX_STEP_ACCOUNTS:
        raise RequestError(f"last is {message.last}; it must be from 1 to {MAX_STEP_ACCOUNTS}.")
    if message.step is None:
        # Steps planned for requests that have ended since show nothing.
        shown = [e for e in remembered if e.committed or e.committed == 0 and e.num_prompt_tokens]
        return shown[-message.last :]
    found = [each for each in remembered if _step_number(each) == message.step]
    if not found:
        known = "no step has been taken yet"
        if remembered:
            first, last = _step_number(remembered[0]), _step_number(remembered[-1])
            known = f"steps {first} to {last} are remembered; ask for one of these"
        raise RequestError(f"step is {message.step}, but {known}.")
    return found


def _account_of(record: StepRecord) -> StepAccount:
    choice = record.choice
    return StepAccount(
        step=_step_number(record),
        policy=record.policy,
        num_rows=record.num_rows,
        num_waiting=record.num_waiting,
        num_prompt_tokens=record.num_prompt_tokens,
        num_drafting=sum(depth > 0 for depth in choice.depths),
        num_drafts=record.num_drafts,
        num_caught_up=record.num_caught_up,
        candidates=tuple(CandidateAccount(*each) for each in dict.fromkeys(choice.candidates)),
        chosen=None if choice.chosen is None else CandidateAccount(*choice.chosen),
        reason=_reason(record),
        committed=record.committed,
        draft_s=record.draft_s,
        verify_s=record.verify_s,
    )


def _step_number(record: StepRecord) -> int:
    """The number in plans and verdicts, from 1."""
    return record.step + 1


def calibration(records: Iterable[StepRecord], num_parts: int) -> tuple[float, ...]:
    """The relative error of predicted tokens per second, over `num_parts` runs of steps in order.
    Single steps are noisy; only sums over many of them mean something."""
    pairs = [pair for each in records if (pair := _predicted_and_done(each)) is not None]
    size = -(-len(pairs) // num_parts)
    parts = (pairs[start : start + size] for start in range(0, len(pairs), size or 1))
    return tuple(map(_error, parts))


def _predicted_and_done(record: StepRecord) -> tuple[Candidate, StepRecord] | None:
    """None if nothing was predicted, or the plan differed from the prediction."""
    chosen = record.choice.chosen
    if chosen is None or chosen.num_drafts != record.num_drafts or not chosen.seconds:
        return None
    if not record.committed or record.draft_s + record.verify_s <= 0:
        return None
    return chosen, record


def _error(pairs: Sequence[tuple[Candidate, StepRecord]]) -> float:
    predicted = sum(each.tokens for each, _ in pairs) / sum(each.seconds for each, _ in pairs)
    committed = sum(each.committed or 0 for _, each in pairs)
    spent_s = sum(each.draft_s + each.verify_s for _, each in pairs)
    return abs(predicted * spent_s / committed - 1)


def _reason(record: StepRecord) -> str:
    choice = record.choice
    if not record.num_rows:
        return "Only prompts were computed."
    num_chosen = sum(choice.depths)
    if not num_chosen:
        return _plain_reason(record)
    drafting = sum(depth > 0 for depth in choice.depths)
    text = (
        f"{_count(num_chosen, 'draft')} for {drafting} of {_count(record.num_rows, 'row')}, "
        f"at most {max(choice.depths)} each"
    )
    if choice.num_selected is not None:
        text += f", of which the {choice.num_selected} likeliest are verified"
    ratio = _ratio(choice.chosen, choice.candidates)
    if ratio is not None:
        text += f": it promised {ratio:.2f} times the rate of plain decoding"
    elif record.policy:
        text += f", as the policy {record.policy} says"
    if record.num_drafts < num_chosen:
        text += (
            f"; {record.num_drafts} were planned in the end, as the draft had to catch up or "
            "memory was short"
        )
    return f"{text}."


def _plain_reason(record: StepRecord) -> str:
    choice = record.choice
    if record.policy == OFF:
        return "Plain decoding, as the policy off says."
    best = max(choice.candidates[1:], key=lambda each: each.tokens_per_s, default=None)
    ratio = _ratio(best, choice.candidates)
    if best is None or ratio is None:
        return "Plain decoding: no row was to be drafted for."
    found = f"the best drafting found ({_count(best.num_drafts, 'draft')}) promised"
    if ratio < 1:
        return f"Plain decoding: {found} {ratio:.2f} times its rate."
    return f"Plain decoding: {found} {ratio:.2f} times its rate, too little to change for."


def _ratio(candidate: Candidate | None, candidates: Sequence[Candidate]) -> float | None:
    """Its rate over that of plain decoding."""
    if candidate is None or not candidates or not candidates[0].tokens_per_s:
        return None
    return candidate.tokens_per_s / candidates[0].tokens_per_s


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
