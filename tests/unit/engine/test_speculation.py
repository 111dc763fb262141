"""The operator's side of speculation control, on a real scheduler without a model."""

from __future__ import annotations

import pytest
from speculation_tools import CHEAP, DEAR, DRAFT_S, VERIFY_S, add_requests, run, speculating_loop

from outrider.engine.speculation import SpeculationService, calibration
from outrider.engine.step import StepLoop
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.gateway_messages import (
    ExplainSpeculation,
    ExplainSpeculationResult,
    SetSpeculation,
    SetSpeculationResult,
)
from outrider.links.speculation import SpeculationChange
from outrider.scheduler.control import StepRecord
from outrider.scheduler.depths import Candidate, DepthChoice

DEPTH = 3


def desk_of(loop: StepLoop) -> SpeculationService:
    return SpeculationService(loop.scheduler, DEPTH)


def change(desk: SpeculationService, *fields: object) -> SetSpeculationResult:
    return desk.set(SetSpeculation(7, SpeculationChange(*fields)))  # type: ignore[arg-type]


def explain(
    desk: SpeculationService, step: int | None = None, last: int = 1
) -> ExplainSpeculationResult:
    return desk.explain(ExplainSpeculation(7, step, last))


# -- settings ---------------------------------------------------------------------------------


def test_a_change_holds_from_the_next_step_on_and_requests_go_on() -> None:
    loop = speculating_loop("fixed", acceptance=1.0)
    desk = desk_of(loop)
    add_requests(loop, max_tokens=40)
    run(loop, 3)
    answer = change(desk, "off")
    assert (answer.query, answer.error, answer.settings.policy) == (7, "", "off")
    assert answer.settings.first_policy == "fixed"
    committed = loop.scheduler.stats.committed_tokens
    run(loop, 2)
    assert loop.scheduler.stats.committed_tokens == committed + 4, "two rows, two plain steps"
    change(desk, "fixed", True, 1)
    run(loop, 2)
    assert [each.num_drafts for each in loop.scheduler.control.records][-1] == 2
    while loop.scheduler.has_work:
        loop.step(0.0)
    assert loop.scheduler.stats.committed_tokens == 80


def test_what_is_not_named_stays() -> None:
    desk = desk_of(speculating_loop("fixed"))
    change(desk, None, True, 2)
    settings = change(desk, "trim").settings
    assert (settings.policy, settings.max_depth) == ("trim", 2)
    assert change(desk, None, True, None).settings.max_depth is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            ("fastest", True, 1),
            "the policy is 'fastest'; it must be one of goodput, threshold, trim, fixed, off.",
        ),
        (
            ("off", True, 33),
            "the maximum depth is 33; it must be from 0 to 32, or none for each request's own.",
        ),
        (
            ("off", True, -1),
            "the maximum depth is -1; it must be from 0 to 32, or none for each request's own.",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_a_sentence_and_nothing_changes(
    fields: tuple[object, ...], sentence: str
) -> None:
    desk = desk_of(speculating_loop("fixed"))
    before = desk.settings()
    answer = change(desk, *fields)
    assert answer.error == sentence
    assert answer.settings == desk.settings() == before


def test_changes_add_up() -> None:
    bound = SpeculationChange(None, True, 2)
    both = bound.followed_by(SpeculationChange("off"))
    assert both == SpeculationChange("off", True, 2)
    assert both.followed_by(SpeculationChange(None, True, None)) == SpeculationChange("off", True)


# -- status -----------------------------------------------------------------------------------


def test_before_the_first_step_nothing_is_claimed() -> None:
    status = desk_of(speculating_loop()).status()
    assert (status.acceptance, status.agreement, status.gain) == (None, None, None)
    assert (status.calibration_error, status.mean_depth, status.drafting_share) == (None, 0.0, 0.0)
    assert status.draft_cost == pytest.approx(DRAFT_S / VERIFY_S)
    assert status.warning == ""


def test_depth_and_share_are_those_of_the_last_rows() -> None:
    loop = speculating_loop("fixed", costs=None, acceptance=0.5)
    add_requests(loop, 3, depth=3)
    add_requests(loop, 1, depth=0)
    run(loop, 6)
    status = desk_of(loop).status()
    assert status.mean_depth == 3.0
    assert status.drafting_share == pytest.approx(3 / 4)
    assert status.acceptance is not None
    assert (status.gain, status.draft_cost, status.settings.is_weighed) == (None, None, False)


def test_the_gain_is_estimated_where_costs_are_known() -> None:
    loop = speculating_loop("goodput", acceptance=1.0)
    add_requests(loop)
    run(loop, 12)
    weighed = desk_of(loop).status()
    assert weighed.gain is not None and weighed.gain > 1
    assert weighed.calibration_error is not None
    fixed = speculating_loop("fixed", acceptance=1.0)
    add_requests(fixed)
    run(fixed, 12)
    measured = desk_of(fixed).status().gain
    assert measured is not None and measured > 1


def test_drafting_that_costs_too_much_is_off_and_counted() -> None:
    loop = speculating_loop("goodput", DEAR, acceptance=0.5)
    add_requests(loop)
    run(loop, 12)
    status = desk_of(loop).status()
    assert status.steps_without > 5
    assert status.drafting_share < 0.5


# -- explanations -----------------------------------------------------------------------------


def test_the_last_step_is_explained_with_what_was_weighed_and_what_came_of_it() -> None:
    loop = speculating_loop("goodput", acceptance=1.0)
    add_requests(loop)
    run(loop, 8)
    answer = explain(desk_of(loop))
    [step] = answer.steps
    assert (step.step, step.policy, step.num_rows) == (8, "goodput", 2)
    assert step.candidates[0].level == 0 and len(step.candidates) > 1
    assert step.chosen is not None and step.chosen.num_drafts == step.num_drafts == 6
    assert step.reason.startswith("6 drafts for 2 of 2 rows, at most 3 each: it promised ")
    assert step.reason.endswith(" times the rate of plain decoding.")
    assert step.committed == 8
    assert step.tokens_per_s == pytest.approx(8 / (step.draft_s + step.verify_s))
    assert answer.num_remembered == 8 and answer.calibration


def test_plain_decoding_is_explained_by_what_drafting_promised() -> None:
    loop = speculating_loop("goodput", DEAR, acceptance=0.5)
    add_requests(loop)
    run(loop, 8)
    [step] = explain(desk_of(loop)).steps
    assert step.num_drafting == 0
    assert step.reason.startswith("Plain decoding: the best drafting found (")
    assert step.chosen == step.candidates[0]


def test_a_step_keeps_the_policy_that_chose_it() -> None:
    loop = speculating_loop("fixed", acceptance=0.0)
    desk = desk_of(loop)
    add_requests(loop)
    run(loop, 3)
    change(desk, "off")
    run(loop, 1)
    prompts, _, third, fourth = explain(desk, last=4).steps
    assert prompts.reason == "Only prompts were computed."
    assert third.reason == "6 drafts for 2 of 2 rows, at most 3 each, as the policy fixed says."
    assert fourth.reason == "Plain decoding, as the policy off says."
    assert (third.candidates, third.chosen) == ((), None)


def test_one_step_is_found_by_its_number() -> None:
    loop = speculating_loop("fixed")
    add_requests(loop)
    run(loop, 5)
    assert [each.step for each in explain(desk_of(loop), step=2).steps] == [2]
    assert explain(desk_of(loop), step=9).error == (
        "step is 9, but steps 1 to 5 are remembered; ask for one of these."
    )


def test_no_more_is_told_than_is_remembered() -> None:
    loop = speculating_loop("fixed", costs=CHEAP, acceptance=0.0, draft_s=0.0)
    desk = desk_of(loop)
    assert explain(desk, last=256).steps == ()
    for number in range(300):
        if not loop.scheduler.has_work:
            add_requests(loop, 1)
        loop.step(float(number))
    answer = explain(desk, last=256)
    assert len(answer.steps) == answer.num_remembered == 256
    assert [each.step for each in answer.steps] == list(range(45, 301))
    for last in (0, 257):
        assert explain(desk, last=last).error == f"last is {last}; it must be from 1 to 256."


def test_answers_survive_the_link() -> None:
    loop = speculating_loop("goodput", acceptance=1.0)
    add_requests(loop)
    run(loop, 8)
    desk = desk_of(loop)
    for sent in (explain(desk, last=8), change(desk, "off", True, 2)):
        assert GATEWAY_CODEC.decode(GATEWAY_CODEC.encode(sent)) == sent


def test_a_step_of_requests_that_had_ended_is_shown_by_its_number_only() -> None:
    loop = speculating_loop("fixed")
    desk = desk_of(loop)
    add_requests(loop)
    run(loop, 4)
    loop.scheduler.control.records[-1].committed = 0
    assert [each.step for each in explain(desk, last=2).steps] == [2, 3]
    assert [each.step for each in explain(desk, step=4).steps] == [4]


def test_predictions_that_add_up_are_right_though_single_steps_are_off_by_luck() -> None:
    promised = Candidate(1, 1, 1, tokens=1.5, draft_s=0.0, verify_s=1.0)
    records = []
    for number, committed in enumerate([1, 2] * 8 + [2] * 16):
        record = StepRecord(number, 1, 0, 0, DepthChoice([1], None, promised), 1, 2, 0, 0)
        record.committed, record.verify_s = committed, 1.0
        records.append(record)
    assert calibration(records, 2) == pytest.approx((0.0, 0.25))
    records[0].num_drafts = 0  # something else was done
    assert calibration(records[:1], 2) == ()


def test_nothing_is_said_about_predictions_from_costs_that_nobody_measured() -> None:
    loop = speculating_loop("trim", costs=None, acceptance=1.0)
    add_requests(loop)
    run(loop, 6)
    desk = desk_of(loop)
    assert explain(desk).calibration == ()
    assert desk.status().calibration_error is None
