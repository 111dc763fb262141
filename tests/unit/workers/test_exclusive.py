"""Which requests the recorded passes of a device cannot serve beside others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from outrider.kernels.gpu.columns import Mark
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import Exclusive, RequestSpec
from outrider.workers.gpu.exclusive import exclusivity

MAX_BIASES = dict.fromkeys(range(Mark.MAX_BIASES), 1.0)


def when(
    *bad_words: tuple[int, ...], max_len: int = 100, is_shared: bool = True, **params: Any
) -> Exclusive:
    spec = RequestSpec((1, 2), SamplingParams(**params), seed=0, max_len=9, bad_word_ids=bad_words)
    return exclusivity(spec, max_len, is_shared)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logprobs": 50},
        {"logit_bias": MAX_BIASES, "presence_penalty": 1.0, "allowed_token_ids": [1]},
        {"temperature": 0, "top_p": 0.5},
    ],
)
def test_most_requests_share_their_steps(params: dict[str, Any]) -> None:
    assert when((3,), (4,), **params) is Exclusive.NEVER


def test_what_does_not_fit_the_table_of_adjustments_is_apart() -> None:
    assert when(logit_bias=MAX_BIASES | {Mark.MAX_BIASES: 1.0}) is Exclusive.ALWAYS
    assert when((3,), (4, 5)) is Exclusive.ALWAYS
    longest = 2**Mark.COUNT_BITS
    assert when(presence_penalty=1.0, max_len=longest) is Exclusive.ALWAYS
    assert when(max_len=longest) is Exclusive.NEVER


def test_samples_are_apart_where_drafts_are_rejected_by_chance() -> None:
    assert when(temperature=0.5, is_shared=False) is Exclusive.ALWAYS
    assert when(temperature=0.0, is_shared=False) is Exclusive.NEVER


def test_prompt_log_probabilities_keep_a_request_apart_for_its_prompt() -> None:
    assert when(prompt_logprobs=0) is Exclusive.PROMPT
    assert when((4, 5), prompt_logprobs=0) is Exclusive.ALWAYS
