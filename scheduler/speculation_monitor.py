"""Watches whether speculation pays off, and warns with a remedy when it has not for a while."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.scheduler.control import SpeculationControl, StepRecord
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.policies import FIXED_DEPTH_POLICIES, GOODPUT, OFF

_CHECK_EVERY_S = 1.0
_WARN_AFTER_S = 300.0  # of work
_REPEAT_S = 900.0
# Estimates are off by some percent: a smaller loss than this is noise.
_MIN_SPEEDUP = 0.97
_GOOD_ACCEPTANCE = 0.6  # above this the draft is not the problem


def speedup_over_plain(records: Iterable[StepRecord], costs: StepCosts) -> float | None:
    """Tokens per second of these steps over those of plain decoding, as estimated by `costs`; None
    if no step counts. Steps with prompts do not: they take longer than decoding."""
    committed = rows = 0
    spent_s = plain_s = 0.0
    for record in records:
        step_s = record.draft_s + record.verify_s
        if record.num_prompt_tokens or not record.committed or step_s <= 0:
            continue
        committed += record.committed
        spent_s += step_s
        rows += record.num_rows
        plain_s += costs.verify.at(record.num_rows) + record.context * costs.context_s
    if not rows or plain_s <= 0:
        return None
    return committed / spent_s * plain_s / rows


class SpeculationMonitor:
    """Checks a `SpeculationControl` periodically. Idle time does not count.

    `warning` is the current warning with its remedy; empty while speculation pays off.
    """

    def __init__(self, control: SpeculationControl) -> None:
        self.warning = ""
        self._control = control
        self._checked_s: float | None = None
        self._last_step = -1
        self._without = 0
        self._policy = control.policy_name
        self._unpaid_s = 0.0
        self._warned_s: float | None = None

    def look(self, now_s: float, num_running: int, acceptance: float | None) -> str:
        """Call between steps. `acceptance` is None while no draft token was verified. Returns the
        line to log now: the warning, at most every `_REPEAT_S`."""
        checked_s = self._checked_s
        if checked_s is not None and now_s - checked_s < _CHECK_EVERY_S:
            return ""
        self._checked_s = now_s
        control = self._control
        if control.policy_name != self._policy:
            self._policy, self._unpaid_s, self.warning = control.policy_name, 0.0, ""
        taken = [each for each in control.records if each.step > self._last_step]
        if not taken or checked_s is None:
            return ""
        unpaid_s = self._unpaid_s + now_s - checked_s
        problem = self._problem(taken, unpaid_s, num_running, acceptance)
        self._last_step, self._without = taken[-1].step, control.steps_without
        if problem is None:
            return ""
        self._unpaid_s = unpaid_s if problem else 0.0
        self.warning = problem if unpaid_s >= _WARN_AFTER_S else ""
        if not self.warning:
            return ""
        if self._warned_s is not None and now_s - self._warned_s < _REPEAT_S:
            return ""
        self._warned_s = now_s
        return self.warning

    def _problem(
        self,
        taken: list[StepRecord],
        unpaid_s: float,
        num_running: int,
        acceptance: float | None,
    ) -> str | None:
        """The problem, empty if there is none; None if these steps show neither."""
        control = self._control
        if control.policy_name == OFF or control.max_depth == 0:
            return ""  # switched off by the operator
        if control.policy_name in FIXED_DEPTH_POLICIES:
            return self._loss(taken, unpaid_s, num_running)
        if not control.has_model:
            return ""  # n-gram lookup without a match costs nothing
        if control.steps_without == 0 or control.steps_without < self._without:
            return ""
        if control.steps_without == self._without:
            return None  # no row could draft
        guessed = acceptance if control.agreement is None else control.agreement
        figures = "" if guessed is None else f"the draft guesses {guessed:.0%} of tokens right and "
        return (
            f"speculation has been off for {_minutes(unpaid_s)}: {figures}"
            f"{_requests(num_running)}; {_remedy(guessed or 0.0)} would change that; "
            "`outrider explain` has the figures."
        )

    def _loss(self, taken: list[StepRecord], unpaid_s: float, num_running: int) -> str | None:
        control = self._control
        drafted = [each for each in taken if each.num_drafts]
        if not control.is_measured or not drafted:
            return None
        gain = speedup_over_plain(drafted, control.costs.now)
        if gain is None:
            return None
        if gain >= _MIN_SPEEDUP:
            return ""
        return (
            f"drafting has cost speed for {_minutes(unpaid_s)}: {gain:.2f} times plain "
            f"decoding, with {control.acceptance:.0%} of drafts right and "
            f"{_requests(num_running)}; `outrider speculation set --policy {GOODPUT}` drafts only "
            "where it pays."
        )


def _remedy(guessed: float) -> str:
    if guessed >= _GOOD_ACCEPTANCE:
        return "fewer seats (scheduler.max_num_seqs) or a smaller draft"
    return "a draft closer to the target, or fewer seats (scheduler.max_num_seqs),"


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return "a minute" if minutes == 1 else f"{minutes} minutes"


def _requests(count: int) -> str:
    return "one request runs" if count == 1 else f"{count} requests run"
