"""What is made of a request before it is submitted."""

from __future__ import annotations

import pytest

from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import NO_PROPOSER
from outrider.text.input_processor import InputProcessor

FACTS = EngineFacts(
    {"target.model": "big", "draft.model": "small"}, 100, (2,), 64, 4, True, "", num_blocks=8
)


@pytest.mark.parametrize(
    ("params", "proposer", "depth", "is_fixed"),
    [
        (SamplingParams(), "draft", 4, False),
        (SamplingParams(num_speculative_tokens=2), "draft", 2, False),
        (SamplingParams(num_speculative_tokens=2, fix_depth=True), "draft", 2, True),
        (
            SamplingParams(speculation="ngram", num_speculative_tokens=7, fix_depth=True),
            "ngram",
            7,
            True,
        ),
        (
            SamplingParams(speculation="off", num_speculative_tokens=2, fix_depth=True),
            NO_PROPOSER,
            0,
            False,
        ),
    ],
)
def test_a_request_says_how_far_at_most_or_exactly_it_is_drafted(
    params: SamplingParams, proposer: str, depth: int, is_fixed: bool
) -> None:
    spec = InputProcessor(FACTS, None).prepare("r", [1, 2, 3], params).spec
    assert (spec.proposer, spec.depth, spec.is_depth_fixed) == (proposer, depth, is_fixed)
