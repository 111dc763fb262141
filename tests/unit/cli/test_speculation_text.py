"""How far a server drafts, as commands say it."""

from __future__ import annotations

import pytest

from outrider.cli.speculation_text import MEANINGS, settings_lines, speculation_sentence
from outrider.config import EngineConfig
from outrider.engine.sizing import settle_for_device
from outrider.links.speculation import SpeculationSettings, SpeculationStatus
from outrider.scheduler.policies import OFF, POLICIES


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
    assert speculation_sentence(found, EngineConfig(), "why") == sentence


def own_model(device: str, **given: str) -> EngineConfig:
    config = EngineConfig.from_kwargs(**{"model": "./my target"} | given)
    return settle_for_device(config, device, gpu_bytes=None)


@pytest.mark.parametrize(
    "config",
    [own_model("cuda"), own_model("cpu", draft_model="none"), own_model("cpu", method=OFF)],
)
def test_without_a_proposer_the_sentence_has_the_commands_that_change_it(
    config: EngineConfig,
) -> None:
    assert speculation_sentence(status(), config) == (
        "speculation: off, as './my target' has no draft. `outrider serve './my target' --method "
        "ngram` looks guesses up in the text, `outrider serve './my target' --draft-model DRAFT` "
        "takes a small model of its family or a head, and `outrider distill draft --target "
        "'./my target' --out ./draft` trains one"
    )


def test_look_up_is_named_with_the_commands_for_a_draft() -> None:
    sentence = speculation_sentence(status(), own_model("cpu"), "why")
    assert sentence == (
        "speculation: auto (goodput), by n-gram lookup, up to 4 drafts a request (why), at every "
        "step what should give most tokens per second. A draft guesses more: `outrider serve "
        "'./my target' --draft-model DRAFT`; `outrider distill draft --target './my target' --out "
        "./draft` trains one"
    )


def test_what_the_engine_began_with_is_told_where_it_was_something_else() -> None:
    same = SpeculationSettings("fixed", None, "fixed", None, 4, True)
    assert settings_lines(same) == [
        "policy     fixed: at every step",
        "max depth  none: each request's own limit, 4 unless it says otherwise",
    ]
    changed = SpeculationSettings("off", 2, "fixed", None, 4, True)
    assert settings_lines(changed) == [
        "policy     off: no drafting (initially fixed)",
        "max depth  2 (initially none)",
    ]
