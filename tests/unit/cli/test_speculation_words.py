"""How far a server drafts, as commands say it."""

from __future__ import annotations

import pytest

from outrider.cli.speculation_words import MEANINGS, settings_lines, speculation_sentence
from outrider.links.speculation import SpeculationSettings, SpeculationStatus
from outrider.scheduler.policies import POLICIES


def status(
    policy: str = "goodput",
    *,
    max_depth: int | None = None,
    is_weighed: bool = True,
    draft_cost: float | None = None,
) -> SpeculationStatus:
    settings = SpeculationSettings(policy, max_depth, policy, max_depth, 4, is_weighed)
    return SpeculationStatus(
        settings,
        mean_depth=0.0,
        drafting_share=0.0,
        acceptance=None,
        agreement=None,
        gain=None,
        draft_cost=draft_cost,
        arrivals_per_s=0.0,
        calibration_error=None,
        steps_without=0,
        warning="",
    )


def test_every_policy_has_its_words() -> None:
    assert list(MEANINGS) == list(POLICIES)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            status(draft_cost=0.12),
            "speculation: auto (goodput), up to 4 drafts a request (why), at every step what "
            "should give most tokens per second; drafting one token costs 12% of a pass here",
        ),
        (
            status(is_weighed=False),
            "speculation: auto (goodput), up to 4 drafts a request (why), costs were not measured "
            "here, so it drafts at every step as fixed does",
        ),
        (
            status("fixed", max_depth=1, is_weighed=False),
            "speculation: fixed, 1 draft a request (why), at every step",
        ),
        (
            status("off"),
            "speculation: off; `outrider speculation set --policy goodput` turns it on",
        ),
        (
            status(max_depth=0),
            "speculation: off; `outrider speculation set --max-depth none` turns it on",
        ),
    ],
)
def test_a_server_says_what_it_chose_and_why(found: SpeculationStatus, sentence: str) -> None:
    assert speculation_sentence(found, "draft", "why") == sentence


def test_without_a_proposer_there_is_nothing_to_choose() -> None:
    assert speculation_sentence(status(), None) == "speculation: off, as there is nobody to draft"


def test_what_the_engine_began_with_is_told_where_it_was_something_else() -> None:
    same = SpeculationSettings("fixed", None, "fixed", None, 4, True)
    assert settings_lines(same) == [
        "policy     fixed: at every step",
        "max depth  none: each request's own limit, 4 unless it says otherwise",
    ]
    changed = SpeculationSettings("off", 2, "fixed", None, 4, True)
    assert settings_lines(changed) == [
        "policy     off: nobody drafts (the engine began with fixed)",
        "max depth  2 (the engine began with none)",
    ]
