"""Whether the draft drafts ahead of outcomes: chosen by what steps of both kinds take.

Drafting ahead hides the draft behind the target's pass as often as the outcome is among its
branches. It costs where both share cores or memory, and where a branch delays the next round. Both
are measured, not modelled: a step's time over what its passes take by their cost tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.scheduler.costs import StepCosts
from outrider.scheduler.policies import AHEAD_AUTO, AHEAD_OFF, AHEAD_ON

_FIRST_TRIAL, _TRIAL = 384, 192  # steps, of both kinds in turns: disturbances meet both
_TURN = 8  # steps of one kind
_UNSETTLED = 2  # of these, that count for nothing: the step before them was of the other kind
_REST = 4096  # steps between two trials
_ENOUGH_STEPS, _CLEARLY = 24, 1.15  # after which a trial ends if one takes longer by this factor
_WEIGHT = 0.01  # of a step, after the first
_OUTLIER = 3.0  # a step counts at most for this much of the average
_TOLERANCE = 1.01  # ahead may seem to take longer by this factor: the difference may be chance


class AheadPlan(NamedTuple):
    """For one step."""

    num_branches: int = 0
    wait: float = 1.0  # the share of a round's drafting that is expected to be waited for
    is_settled: bool = True  # the step before it was of its kind

    def costs(self, costs: StepCosts) -> StepCosts:
        """With what drafting is expected to delay."""
        if self.wait == 1.0:
            return costs
        first, following = (each.times(self.wait) for each in (costs.first_draft, costs.next_draft))
        return replace(costs, first_draft=first, next_draft=following)


SEQUENTIAL = AheadPlan()


class PassTimes(NamedTuple):
    seconds: float
    expected_s: float


class AheadControl:
    """Plans steps; learns a few steps later what they took."""

    def __init__(self, mode: str = AHEAD_OFF) -> None:
        self.mode = mode
        self.max_branches = 0  # of the present draft
        self._choices: dict[int, _Choice] = {}

    def set_max_branches(self, count: int) -> None:
        """Of another draft."""
        self.max_branches = count
        self._choices.clear()

    def plan(self, num_rows: int) -> AheadPlan:
        """For the next step; tell `count_step` if it drafts."""
        if self.mode == AHEAD_OFF or not self.max_branches or not num_rows:
            return SEQUENTIAL
        choice = self._of(num_rows)
        if self.mode == AHEAD_ON:
            return AheadPlan(self.max_branches, choice.wait.value)
        return choice.plan(self.max_branches)

    def count_step(self, num_rows: int) -> None:
        """The next step drafts, by the last plan for so many rows."""
        if self.mode == AHEAD_AUTO and self.max_branches and num_rows:
            self._of(num_rows).count_step()

    def observe(
        self, num_rows: int, plan: AheadPlan, drafting: PassTimes, verifying: PassTimes
    ) -> None:
        """What a step with drafts took, and what its costs had said of its passes one after the
        other."""
        expected_s = drafting.expected_s + verifying.expected_s
        if self.max_branches and plan.is_settled and expected_s > 0:
            ratio = (drafting.seconds + verifying.seconds) / expected_s
            self._of(num_rows).observe(plan, ratio, drafting)

    def _of(self, num_rows: int) -> _Choice:
        return self._choices.setdefault(num_rows.bit_length(), _Choice())


@dataclass(slots=True)
class _Average:
    value: float
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += max(1 / self.count, _WEIGHT) * (value - self.value)


@dataclass(slots=True)
class _Choice:
    """For about so many rows."""

    is_ahead: bool = True  # outside of trials
    trial_left: int = _FIRST_TRIAL  # steps
    rest_left: int = 0
    sequential: _Average = field(default_factory=lambda: _Average(1.0))  # ratios of steps
    ahead: _Average = field(default_factory=lambda: _Average(1.0))
    wait: _Average = field(default_factory=lambda: _Average(1.0))

    def plan(self, max_branches: int) -> AheadPlan:
        is_ahead, is_settled = self.is_ahead, True
        if self.trial_left:
            turn, left = divmod(self.trial_left - 1, _TURN)
            is_ahead, is_settled = turn % 2 == 1, left < _TURN - _UNSETTLED
        num_branches = max_branches if is_ahead else 0
        wait = self.wait.value if is_ahead else 1.0
        return AheadPlan(num_branches, wait, is_settled)

    def observe(self, plan: AheadPlan, ratio: float, drafting: PassTimes) -> None:
        own = self.ahead if plan.num_branches else self.sequential
        own.observe(min(ratio, _OUTLIER * own.value) if own.count else ratio)
        if plan.num_branches and drafting.expected_s > 0:
            self.wait.observe(min(drafting.seconds / drafting.expected_s, 1.0))

    def count_step(self) -> None:
        if self.rest_left:
            self.rest_left -= 1
            if not self.rest_left:
                self.trial_left = _TRIAL
                self.sequential.count = self.ahead.count = 0  # what is older counts no more
            return
        self.trial_left -= 1
        if self.trial_left <= 0 or self._is_clear():
            self.is_ahead = self.ahead.value < _TOLERANCE * self.sequential.value
            self.trial_left, self.rest_left = 0, _REST

    def _is_clear(self) -> bool:
        low, high = sorted((self.sequential.value, self.ahead.value))
        is_enough = min(self.sequential.count, self.ahead.count) >= _ENOUGH_STEPS
        return is_enough and high > _CLEARLY * low
