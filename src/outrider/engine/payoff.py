"""Whether speculation pays, and a word with a remedy when it has not for a while."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.scheduler.control import SpeculationControl, StepRecord
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.policies import FIXED_DEPTH_POLICIES, GOODPUT, OFF

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 300.0  # of work
_REPEAT_S = 900.0
# Estimates are off by some percent: less than this is no loss to speak of.
_LOSES = 0.97
_GOOD_GUESSES = 0.6  # a draft this often right is not what is wrong


def gain_over_plain(records: Iterable[StepRecord], costs: StepCosts) -> float | None:
    """Tokens per second of these steps over what plain decoding would have made by `costs`; None if
    none of them says anything. Steps with prompts do not: their time is not that of decoding."""
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


class PayoffWatch:
    """Looks at a controller now and then. Time in which nothing ran does not count.

    `warning` is what holds now, with its remedy; empty while speculation pays.
    """

    def __init__(self, control: SpeculationControl) -> None:
        self.warning = ""
        self._control = control
        self._looked_s: float | None = None
        self._last_step = -1
        self._without = 0
        self._policy = control.policy_name
        self._unpaid_s = 0.0
        self._told_s: float | None = None

    def look(self, now_s: float, num_running: int, acceptance: float | None) -> str:
        """Between steps. `acceptance` is None while no draft was verified. Returns what is to be
        logged now: the warning, once in many minutes."""
        looked_s = self._looked_s
        if looked_s is not None and now_s - looked_s < _LOOK_EVERY_S:
            return ""
        self._looked_s = now_s
        control = self._control
        if control.policy_name != self._policy:
            self._policy, self._unpaid_s, self.warning = control.policy_name, 0.0, ""
        taken = [each for each in control.records if each.step > self._last_step]
        if not taken or looked_s is None:
            return ""
        unpaid_s = self._unpaid_s + now_s - looked_s
        problem = self._problem(taken, unpaid_s, num_running, acceptance)
        self._last_step, self._without = taken[-1].step, control.steps_without
        if problem is None:
            return ""
        self._unpaid_s = unpaid_s if problem else 0.0
        self.warning = problem if unpaid_s >= _PATIENCE_S else ""
        if not self.warning:
            return ""
        if self._told_s is not None and now_s - self._told_s < _REPEAT_S:
            return ""
        self._told_s = now_s
        return self.warning

    def _problem(
        self,
        taken: list[StepRecord],
        unpaid_s: float,
        num_running: int,
        acceptance: float | None,
    ) -> str | None:
        """What is wrong, empty if nothing is; None if these steps say neither."""
        control = self._control
        if control.policy_name == OFF or control.max_depth == 0:
            return ""  # as somebody wants it
        if control.policy_name in FIXED_DEPTH_POLICIES:
            return self._loss(taken, unpaid_s, num_running)
        if not control.has_model:
            return ""  # look-up that finds nothing costs nothing
        if control.steps_without == 0 or control.steps_without < self._without:
            return ""
        if control.steps_without == self._without:
            return None  # nobody could have drafted
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
        gain = gain_over_plain(drafted, control.costs.now)
        if gain is None:
            return None
        if gain >= _LOSES:
            return ""
        return (
            f"drafting has cost speed for {_minutes(unpaid_s)}: {gain:.2f} times plain "
            f"decoding, with {control.acceptance:.0%} of drafts right and "
            f"{_requests(num_running)}; `outrider speculation set --policy {GOODPUT}` drafts only "
            "where it pays."
        )


def _remedy(guessed: float) -> str:
    if guessed >= _GOOD_GUESSES:
        return "fewer seats (scheduler.max_num_seqs) or a smaller draft"
    return "a draft closer to the target, or fewer seats (scheduler.max_num_seqs),"


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return "a minute" if minutes == 1 else f"{minutes} minutes"


def _requests(count: int) -> str:
    return "one request runs" if count == 1 else f"{count} requests run"
