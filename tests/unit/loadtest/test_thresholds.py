"""Limits that a run is held to."""

from __future__ import annotations

import pytest
from load_records import answered, failed, shift

from outrider.errors import ConfigError
from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.thresholds import Threshold, ThresholdResult, evaluate


def run(d2_tokens: tuple[int, ...] = (4, 3, 4, 5)) -> Analysis:
    """Arm off sends 3 tokens in each of four blocks, d2 as many as told; one load has an error."""
    records, shifts = [failed("reset", cell="rate 4")], [shift(cell="rate 4")]
    for block, tokens in enumerate(d2_tokens):
        at = 10.0 * block
        for arm, num in (("off", 3), ("d2", tokens)):
            window = shift(arm=arm, block=block, measured_from_s=at, measured_to_s=at + 10)
            shifts.append(window)
            made = answered(
                arm=arm, block=block, intended_s=at, update_s=(0.4, 0.6), update_tokens=(num - 1, 1)
            )
            records.append(made)
    return Analysis(records, shifts)


def check(text: str) -> list[ThresholdResult]:
    return evaluate([Threshold.parse(text)], run())


@pytest.mark.parametrize(
    ("text", "measured", "met"),
    [
        ('off:ttft_p99<500ms @"rate 2"', 400, True),
        ("off:e2e_p95 < .5s@rate 2", 600, False),
        ('off:tokens_s>=0.3@"rate 2"', 0.3, True),
        ('off:tokens_s!=0.3 @ "rate 2"', 0.3, False),
        ('off:error_share<1% @"rate 4"', 1.0, False),
        ('off:errors==0@"rate 4"', 1, False),
        ('d2/off:tokens_s>=1.3 @"rate 2"', 1.3120, True),
        ('d2/off:tokens_s>=1.3! @"rate 2"', 0.9402, False),
        ('d2/off:tokens_s<=1.4! @"rate 2"', 1.8308, False),
        ('d2/off:e2e_p50<=1.0! @"rate 2"', 1.0, True),
    ],
)
def test_a_limit_is_met_or_not(text: str, measured: float, met: bool) -> None:
    (found,) = check(text)
    assert found.measured == pytest.approx(measured, rel=1e-3)
    assert found.met is met


def test_a_limit_without_names_is_about_every_arm_and_load() -> None:
    found = check("errors==0")
    assert [(each.arm, each.cell, each.met) for each in found] == [
        ("off", "rate 4", False),
        ("off", "rate 2", True),
        ("d2", "rate 2", True),
    ]
    assert str(found[0]) == "errors==0: NOT met by off at rate 4 (1)"


def test_what_was_not_measured_is_not_met() -> None:
    (found,) = check('d2:acceptance>=0 @"rate 2"')
    assert (found.measured, found.met, found.remark) == (None, False, "not measured")
    (found,) = check('d2:errors==0 @"rate 4"')
    assert (found.met, found.remark) == (False, "never ran")
    (found,) = evaluate([Threshold.parse("errors==0")], Analysis([], []))
    assert not found.met
    (found,) = evaluate([Threshold.parse('d2/off:tokens_s>1! @"rate 2"')], run((4, 4)))
    assert (found.met, found.remark) == (False, "too few blocks to say")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "cannot be read"),
        ("tokens_s>40 and more", "give a number"),
        ("ttft_p99<500", "a number with ms or s"),
        ("ttft_p98<5ms", "did you mean ttft_p9"),
        ("warmth>5", "choose of tokens_s, requests_s"),
        ("errors==0!", "ends in !"),
        ("d2/off:errors==0!", "ends in !"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Threshold.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("d3:errors==0", "names the arm 'd3'; this run has off, d2"),
        ("d2/of:errors==0", "names the arm 'of'"),
        ("errors==0@rate 3", "names the load 'rate 3'; this run has rate 4, rate 2"),
    ],
)
def test_a_name_that_the_run_does_not_have_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(text)
