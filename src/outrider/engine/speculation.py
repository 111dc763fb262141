"""The operator's side of speculation control: what is asked and changed between steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

from outrider.engine.explain import NUM_PARTS, account_of, calibration, step_number
from outrider.engine.payoff import PayoffWatch, gain_over_plain
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.links.gateway_messages import (
    ExplainSpeculation,
    SetSpeculation,
    SpeculationExplained,
    SpeculationSet,
)
from outrider.links.speculation import (
    MOST_STEPS,
    SpeculationChange,
    SpeculationSettings,
    SpeculationStatus,
)
from outrider.scheduler.control import StepRecord
from outrider.scheduler.policies import GOODPUT, OFF, POLICIES
from outrider.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_LATELY = 64  # steps
_DEEPEST = 32  # as for a request


class SpeculationDesk:
    """Answers for one engine; used by the thread that steps it."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        """`depth` is what requests draft unless they say otherwise."""
        self._scheduler = scheduler
        self._control = scheduler.control
        self._depth = depth
        self._first = (self._control.policy_name, self._control.max_depth)
        self._watch = PayoffWatch(self._control)

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
            arrivals_per_s=control.arrivals_per_s,
            calibration_error=next(iter(self._calibration(recent, num_parts=1)), None),
            steps_without=control.steps_without,
            warning=self._watch.warning,
        )

    def set(self, message: SetSpeculation) -> SpeculationSet:
        """Both or neither of policy and bound."""
        change, error = message.change, ""
        try:
            _check(change)
        except OutriderError as found:
            error = str(found)
        else:
            self._apply(change)
        return SpeculationSet(message.query, change, self.settings(), error)

    def explain(self, message: ExplainSpeculation) -> SpeculationExplained:
        remembered = self._control.records
        try:
            wanted, error = _steps(remembered, message), ""
        except OutriderError as found:
            wanted, error = (), str(found)
        return SpeculationExplained(
            message.query,
            tuple(map(account_of, wanted)),
            len(remembered),
            self._calibration(remembered),
            error,
        )

    def look(self, now_s: float) -> None:
        """After a step: log it if speculation has not paid for long."""
        warning = self._watch.look(now_s, self._scheduler.num_running, self._acceptance)
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
        """The last steps that decoded, the newest first."""
        decoded = (each for each in reversed(self._control.records) if each.num_rows)
        return list(islice(decoded, _LATELY))

    def _gain(self, recent: Sequence[StepRecord]) -> float | None:
        control = self._control
        if not control.is_measured or not recent or control.policy_name == OFF:
            return None
        if control.policy_name == GOODPUT and control.has_model:
            return control.gain
        return gain_over_plain(recent, control.costs.now)

    def _calibration(
        self, records: Iterable[StepRecord], num_parts: int = NUM_PARTS
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
    most = change.max_depth
    if change.sets_max_depth and most is not None and not 0 <= most <= _DEEPEST:
        raise ConfigError(
            f"the maximum depth is {most}; it must be from 0 to {_DEEPEST}, or none for each "
            "request's own."
        )


def _depths_of(records: Sequence[StepRecord]) -> tuple[float, float]:
    """The mean depth of rows that drafted, and their share of all that decoded."""
    num_rows = sum(each.num_rows for each in records)
    drafting = [depth for each in records for depth in each.choice.depths if depth]
    if not drafting:
        return 0.0, 0.0
    return sum(drafting) / len(drafting), len(drafting) / num_rows


def _steps(remembered: Sequence[StepRecord], message: ExplainSpeculation) -> Sequence[StepRecord]:
    if not 1 <= message.last <= MOST_STEPS:
        raise RequestError(f"last is {message.last}; it must be from 1 to {MOST_STEPS}.")
    if message.step is None:
        # Those planned for requests that had ended by then show nothing.
        shown = [e for e in remembered if e.committed or e.committed == 0 and e.num_prompt_tokens]
        return shown[-message.last :]
    found = [each for each in remembered if step_number(each) == message.step]
    if not found:
        known = "no step has been taken yet"
        if remembered:
            first, last = step_number(remembered[0]), step_number(remembered[-1])
            known = f"steps {first} to {last} are remembered; ask for one of these"
        raise RequestError(f"step is {message.step}, but {known}.")
    return found
