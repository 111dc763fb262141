"""What one request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import ServerConfig
from outrider.errors import RequestError
from outrider.gateway.bounds import MAX_LOGPROBS_OF_REQUEST, check_params, check_prepared
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RequestSpec


def _spec(num_prompt: int, num_outputs: int, **params: Any) -> RequestSpec:
    return RequestSpec(
        prompt_ids=(5,) * num_prompt,
        params=SamplingParams(**params),
        seed=1,
        max_len=num_prompt + num_outputs,
    )


@pytest.mark.parametrize(
    ("asked", "setting"),
    [({"n": 3}, "max_samples"), ({"logprobs": 5}, "max_logprobs"), ({"prompt_logprobs": 5}, "max")],
)
def test_more_than_the_server_allows_is_refused_by_its_setting(
    asked: dict[str, Any], setting: str
) -> None:
    config = ServerConfig(max_samples=2, max_logprobs=4)
    with pytest.raises(RequestError, match=rf"allows \d \(server\.{setting}"):
        check_params(SamplingParams(**asked), config)
    check_params(SamplingParams(n=2, logprobs=4, prompt_logprobs=4), config)


def test_a_prompt_may_be_as_long_as_the_setting_says() -> None:
    config = ServerConfig(max_prompt_tokens=4)
    check_prepared(_spec(4, 1), config)
    with pytest.raises(RequestError, match=r"has 5 tokens; .*server\.max_prompt_tokens"):
        check_prepared(_spec(5, 1), config)
    check_prepared(_spec(5, 1), ServerConfig())


def test_log_probabilities_are_bounded_over_samples_and_positions() -> None:
    num_outputs = MAX_LOGPROBS_OF_REQUEST // (8 * 16)
    check_prepared(_spec(1, num_outputs, n=8, logprobs=16), ServerConfig())
    with pytest.raises(RequestError, match="lower logprobs, n or max_tokens"):
        check_prepared(_spec(1, num_outputs + 1, n=8, logprobs=16), ServerConfig())
    with pytest.raises(RequestError, match="log-probabilities"):
        check_prepared(_spec(1, num_outputs, n=8, logprobs=16, prompt_logprobs=1), ServerConfig())
