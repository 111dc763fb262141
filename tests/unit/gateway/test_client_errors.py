"""Failed calls as errors, and what the client refuses before it sends anything."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from outrider.api_types.errors import (
    MARK,
    RequestIdInUseError,
    UnknownModelError,
    error_of,
    status_of,
)
from outrider.client import Client, DeadlineError, RequestCancelledError, UnavailableError
from outrider.errors import CapacityError, ConfigError, OutriderError, RequestError

Code = grpc.StatusCode


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, is_ours: bool) -> None:
        self._code, self._details = code, details
        self._metadata = (("other", "1"), MARK) if is_ours else None

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


@pytest.mark.parametrize(
    "kind",
    [
        *(RequestError, CapacityError, UnknownModelError, RequestIdInUseError),
        *(UnavailableError, DeadlineError, RequestCancelledError),
    ],
)
def test_an_error_comes_back_as_what_it_was(kind: type[OutriderError]) -> None:
    sentence = "x is 1; it must be 2."
    error = error_of(FakeRpcError(status_of(kind(sentence)), sentence, True), "here:1")
    assert type(error) is kind
    assert str(error) == sentence


def test_an_error_without_a_code_of_its_own_is_internal() -> None:
    assert status_of(ConfigError("a")) is Code.INTERNAL
    error = error_of(FakeRpcError(Code.INTERNAL, "it broke.", True), "here:1")
    assert (type(error), str(error)) == (OutriderError, "it broke.")


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (Code.UNAVAILABLE, UnavailableError, "the server at here:1 cannot be reached"),
        (Code.UNIMPLEMENTED, OutriderError, "no Outrider server"),
        (Code.DEADLINE_EXCEEDED, DeadlineError, "deadline"),
        (Code.CANCELLED, RequestCancelledError, "cancelled"),
        (Code.RESOURCE_EXHAUSTED, CapacityError, "RESOURCE_EXHAUSTED: raw text"),
        (Code.DATA_LOSS, OutriderError, "DATA_LOSS: raw text"),
    ],
)
def test_a_status_of_grpc_itself_is_explained(
    code: grpc.StatusCode, kind: type[OutriderError], words: str
) -> None:
    error = error_of(FakeRpcError(code, "raw text", False), "here:1")
    assert type(error) is kind
    assert words in str(error)


# -- refused by the client itself -------------------------------------------------------------


@pytest.fixture
def client() -> Client:
    return Client("127.0.0.1:9")  # nothing listens there; the tests must not connect


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -1}, "temperature is -1; it must be"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ({"top_k": 2**40}, "top_k is 1099511627776, which is beyond 32 bits"),
        ({"priority": "high"}, "wrong priority"),
        ({"model": 5}, "wrong model"),
    ],
)
def test_a_wrong_argument_is_refused_before_it_is_sent(
    client: Client, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        client.stream("a", **arguments)


@pytest.mark.parametrize("prompt", [[-1], ["a"], [2**40], 5])
def test_a_prompt_must_be_text_or_token_ids(client: Client, prompt: Any) -> None:
    with pytest.raises(RequestError, match="text or a list of token ids"):
        client.stream(prompt)


@pytest.mark.parametrize("message", [{"role": "user", "text": "a"}, {"role": 5}, "a"])
def test_a_message_must_have_role_and_content(client: Client, message: Any) -> None:
    with pytest.raises(RequestError, match="give {'role': ..., 'content': ...}"):
        client.chat_stream([message])
