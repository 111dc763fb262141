"""Checks of a request against the server's limits, and its queue timeout."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterator

from outrider.api_types.errors import UnavailableError
from outrider.config import ServerConfig
from outrider.errors import ContextLengthError, RequestError
from outrider.gateway.session import Session
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RequestSpec

# A complete response keeps all of them in memory; a stream keeps few at a time.
MAX_LOGPROBS_OF_REQUEST = 2**21
MAX_OPEN_FILES = 65_536
RETRY_QUEUE_S = 5.0


def allow_open_files() -> None:
    """Raise the soft limit of open files: shells start with few, and each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def max_connections(config: ServerConfig) -> int:
    """Connections per protocol in this process. Idle ones are cheap: more of them than requests."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(min(4 * config.max_requests, files // 3), 16)


def check_params(params: SamplingParams, config: ServerConfig) -> None:
    bounds = {
        "n": (params.n, config.max_samples, "max_samples"),
        "logprobs": (params.logprobs, config.max_logprobs, "max_logprobs"),
        "prompt_logprobs": (params.prompt_logprobs, config.max_logprobs, "max_logprobs"),
    }
    for name, (value, limit, setting) in bounds.items():
        if value is not None and value > limit:
            raise RequestError(
                f"{name} is {value}; this server allows {limit} (server.{setting}), so lower it."
            )


def check_context(spec: RequestSpec, max_tokens: int | None, max_model_len: int) -> None:
    """HTTP only: prompt and max_tokens must fit the context, as OpenAI's clients expect."""
    num_tokens = len(spec.prompt_ids)
    if max_tokens is not None and num_tokens + max_tokens > max_model_len:
        raise ContextLengthError(
            max_model_len,
            f"you requested {max_tokens} output tokens and your prompt contains {num_tokens} input "
            f"tokens, for a total of {num_tokens + max_tokens} tokens; shorten the prompt, or "
            f"lower max_tokens to {max_model_len - num_tokens} or leave it out.",
        )


def check_prepared(spec: RequestSpec, config: ServerConfig) -> None:
    """Checks that need the tokenized prompt."""
    num_tokens, limit = len(spec.prompt_ids), config.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; this server allows {limit} "
            "(server.max_prompt_tokens), so shorten it."
        )
    params, num_outputs = spec.params, spec.max_len - num_tokens
    num_logprobs = params.n * num_outputs * (params.logprobs or 0)
    num_logprobs += num_tokens * (params.prompt_logprobs or 0)
    if num_logprobs > MAX_LOGPROBS_OF_REQUEST:
        raise RequestError(
            f"the request may return {num_logprobs} log-probabilities ({params.n} samples of up "
            f"to {num_outputs} tokens); this server allows {MAX_LOGPROBS_OF_REQUEST}, so lower "
            "logprobs, n or max_tokens."
        )


@contextlib.contextmanager
def queue_timeout(late_s: float, session: Session, config: ServerConfig) -> Iterator[None]:
    """End the session if it has no token by `late_s`, on the clock of `time.monotonic`."""
    error = UnavailableError(
        f"the request has waited for {config.queue_timeout_s:g} s (server.queue_timeout_s) "
        "without a token; the server is overloaded, so try again later.",
        retry_after_s=RETRY_QUEUE_S,
    )
    left_s = max(late_s - time.monotonic(), 0.0)
    loop = asyncio.get_running_loop()
    timer = loop.call_later(left_s, session.end_unless_started, error)
    try:
        yield
    finally:
        timer.cancel()
