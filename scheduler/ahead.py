"""Whether the draft drafts ahead of outcomes: chosen by what steps of both kinds take.

Drafting ahead hides the draft behind the target's pass as often as the outcome is among its
branches. It costs where both share cores or memory, and where a branch delays the next round. Both
are measured, not modelled: a step's time over what its passes take by their cost tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.scheduler.costs import StepCosts
from outrider.scheduler.policies import AHEAD_OFF, AHEAD_ON

_FIRST_TRIAL, _TRIAL = 256, 192  # steps, of both kinds in turns: disturbances meet both
_TURN = 8  # steps of one kind
_UNSETTLED = 2  # of these, that count for nothing: the step before them was of the other kind; the
# last counts for nothing either, since the draft works for the next meanwhile
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


SEQUENTIAL = AheadPlan(is_settled=False)
"""Of steps that are no sample."""


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
        """For the next step; called once a step."""
        if self.mode == AHEAD_OFF or not self.max_branches or not num_rows:
            return SEQUENTIAL
        choice = self._of(num_rows)
        if self.mode == AHEAD_ON:
            return AheadPlan(self.max_branches, choice.wait.value)
        return choice.plan(self.max_branches)

    def observe(self, num_rows: int, plan: AheadPlan, ratio: float, wait: float) -> None:
        """A step whose drafts are all the draft model's took `ratio` of what its passes take one
        after the other by the measured costs, and waited for `wait` of drafting by present ones."""
        if self.max_branches and plan.is_settled:
            self._of(num_rows).observe(plan, ratio, wait)

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
        self._count_step()
        is_ahead, is_settled = self.is_ahead, True
        if self.trial_left:
            turn, left = divmod(self.trial_left - 1, _TURN)
            is_ahead = turn % 2 == 1
            is_settled = 0 < left < _TURN - _UNSETTLED
        if not is_ahead:
            return AheadPlan(is_settled=is_settled)
        return AheadPlan(max_branches, self.wait.value, is_settled)

    def observe(self, plan: AheadPlan, ratio: float, wait: float) -> None:
        own = self.ahead if plan.num_branches else self.sequential
        own.observe(min(ratio, _OUTLIER * own.value) if own.count else ratio)
        if plan.num_branches:
            self.wait.observe(min(wait, 1.0))

    def _count_step(self) -> None:
        if self.rest_left:
            self.rest_left -= 1
            if not self.rest_left:
                self._begin_trial()
                self.sequential.count = self.ahead.count = 0  # what is older counts no more
            return
        self.trial_left -= 1
        if self.trial_left <= 0 or self._is_clear():
            self._end_trial()

    def _begin_trial(self) -> None:
        self.trial_left = _TRIAL

    def _end_trial(self) -> None:
        """Where drafting pays only one way, steps of the other kind had no drafts."""
        knows_sequential, knows_ahead = (
            each.count >= _ENOUGH_STEPS for each in (self.sequential, self.ahead)
        )
        if not knows_sequential and not knows_ahead:
            self._begin_trial()
            return
        self.is_ahead = knows_ahead
        if knows_sequential and knows_ahead:
            self.is_ahead = self.ahead.value < _TOLERANCE * self.sequential.value
        self.trial_left, self.rest_left = 0, _REST

    def _is_clear(self) -> bool:
        low, high = sorted((self.sequential.value, self.ahead.value))
        is_enough = min(self.sequential.count, self.ahead.count) >= _ENOUGH_STEPS
        return is_enough and high > _CLEARLY * low
