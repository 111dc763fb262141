"""When an engine says that speculation does not pay, and what it says."""

from __future__ import annotations

import pytest
from speculation_tools import CHEAP, VERIFY_S

from outrider.catalog.proposers import traits
from outrider.scheduler.control import SpeculationControl, StepRecord
from outrider.scheduler.depths import DepthChoice
from outrider.scheduler.speculation_monitor import SpeculationMonitor, speedup_over_plain

MINUTE = 60


class Watched:
    """A watch on a controller that takes one step a second, on a clock of its own."""

    def __init__(self, policy: str = "goodput", *, is_measured: bool = True) -> None:
        self.control = SpeculationControl(policy, CHEAP if is_measured else None)
        self.watch = SpeculationMonitor(self.control)
        self.now_s = 1000.0
        self.logged: list[str] = []
        self._step = 0
        self.work(1)

    def work(
        self, seconds: int, drafts: int = 0, *, committed: int = 4, is_wanted: bool = True
    ) -> None:
        """Steps of four rows that take as long as plain ones, and twice that if they draft."""
        for _ in range(seconds):
            if is_wanted:
                self.control.steps_without = 0 if drafts else self.control.steps_without + 1
            record = StepRecord(self._step, 4, 0, 0, DepthChoice([drafts] * 4), 4 * drafts, 4, 0, 0)
            record.committed, record.verify_s = committed, VERIFY_S * (2 if drafts else 1)
            self.control.records.append(record)
            self._step += 1
            self.idle(1)

    def idle(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            said = self.watch.look(self.now_s, num_running=64, acceptance=None)
            if said:
                self.logged.append(said)


def test_it_is_said_after_five_minutes_of_work_with_figures_and_a_remedy() -> None:
    watched = Watched()
    watched.control.agreement = 0.31
    watched.work(4 * MINUTE)
    assert watched.logged == [] and watched.watch.warning == ""
    watched.work(2 * MINUTE)
    assert watched.logged == [
        "speculation has been off for 5 minutes: the draft guesses 31% of tokens right and 64 "
        "requests run; a draft closer to the target, or fewer seats (scheduler.max_num_seqs), "
        "would change that; `outrider explain` has the figures."
    ]
    assert "off for 6 minutes" in watched.watch.warning


def test_a_draft_that_guesses_well_is_not_blamed() -> None:
    watched = Watched()
    watched.control.agreement = 0.9
    watched.work(6 * MINUTE)
    assert "fewer seats (scheduler.max_num_seqs) or a smaller draft would" in watched.logged[0]


def test_nothing_is_made_up_about_a_draft_that_was_never_tried() -> None:
    watched = Watched()
    watched.work(6 * MINUTE)
    assert watched.logged[0].startswith("speculation has been off for 5 minutes: 64 requests run;")


def test_it_is_said_again_only_after_many_minutes() -> None:
    watched = Watched()
    watched.work(64 * MINUTE)
    assert len(watched.logged) == 4


def test_time_in_which_nothing_runs_does_not_count() -> None:
    watched = Watched()
    watched.work(2 * MINUTE)
    watched.idle(30 * MINUTE)
    watched.work(2 * MINUTE)
    assert watched.logged == []


def test_requests_that_want_no_drafts_say_nothing_about_them() -> None:
    watched = Watched()
    watched.work(10 * MINUTE, is_wanted=False)
    assert watched.logged == [] and watched.watch.warning == ""


def test_a_step_that_drafts_again_takes_the_warning_back() -> None:
    watched = Watched()
    watched.work(6 * MINUTE)
    assert watched.watch.warning
    watched.work(2, drafts=2, committed=9)
    assert watched.watch.warning == ""
    watched.work(4 * MINUTE)
    assert watched.watch.warning == ""


@pytest.mark.parametrize("policy", ["fixed", "trim"])
def test_a_policy_that_drafts_at_a_loss_is_told_by_the_engines_own_estimate(policy: str) -> None:
    watched = Watched(policy)
    watched.control.acceptance = 0.25
    watched.work(6 * MINUTE, drafts=2, committed=6)
    assert watched.logged == [
        "drafting has cost speed for 5 minutes: 0.75 times plain decoding, with 25% of drafts "
        "right and 64 requests run; `outrider speculation set --policy goodput` drafts only where "
        "it pays."
    ]


def test_a_fixed_depth_that_gains_is_not_warned_of() -> None:
    watched = Watched("fixed")
    watched.work(10 * MINUTE, drafts=2, committed=10)
    assert watched.logged == []


def test_nothing_is_said_of_a_loss_that_nobody_can_estimate() -> None:
    watched = Watched("fixed", is_measured=False)
    watched.work(10 * MINUTE, drafts=2, committed=4)
    assert watched.logged == []


def test_what_was_switched_off_by_hand_is_not_warned_of() -> None:
    watched = Watched("off")
    watched.work(10 * MINUTE)
    bounded = Watched()
    bounded.control.max_depth = 0
    bounded.work(10 * MINUTE)
    assert watched.logged == bounded.logged == []


def test_another_policy_begins_anew() -> None:
    watched = Watched()
    watched.work(6 * MINUTE)
    watched.control.set_policy("threshold")
    watched.idle(2)
    assert watched.watch.warning == ""


def test_steps_with_prompts_say_nothing_about_the_gain() -> None:
    record = StepRecord(0, 4, 100, 0, DepthChoice([2] * 4), 8, 112, 0, 0)
    record.committed, record.verify_s = 8, 1.0
    assert speedup_over_plain([record], CHEAP) is None
    record.num_prompt_tokens = 0
    assert speedup_over_plain([record], CHEAP) == pytest.approx(8 / 1.0 * VERIFY_S / 4)


def test_look_up_that_finds_nothing_is_no_trouble() -> None:
    watched = Watched()
    watched.control.add_proposers(traits(has_draft_model=False))
    watched.work(20 * MINUTE)
    assert watched.logged == [] and watched.watch.warning == ""
