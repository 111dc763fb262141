"""When a client goes on after a loss, how long it waits, and what it says it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from outrider.api_types.errors import MARK, UnavailableError
from outrider.client import CHANNEL_OPTIONS, prompt_request
from outrider.client.resuming import LONGEST_PAUSE_S, Calls, ServerEndpoint
from outrider.errors import OutriderError
from outrider.proto import generation_pb2

Code = grpc.StatusCode


class Lost(grpc.RpcError):
    """A status as gRPC gives it, from the server itself if it is marked."""

    def __init__(self, code: grpc.StatusCode, sentence: str = "", *, is_marked: bool) -> None:
        self._parts = code, sentence, (MARK,) if is_marked else ()

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


CUT = Lost(Code.UNAVAILABLE, "Socket closed", is_marked=False)


def calls(
    *, has_begun: bool = True, resumes: bool = True, window_s: float = 100.0, **options: Any
) -> Calls:
    stub = SimpleNamespace(
        Generate=lambda request, timeout: ("Generate", request),
        ResumeStream=lambda request, timeout: ("ResumeStream", request),
    )
    made = Calls(ServerEndpoint(stub, "here:1", resumes, window_s), prompt_request("a"), **options)
    if has_begun:
        made.take(first_message())
    return made


def first_message() -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        request_id="r",
        index=1,
        token_ids=[7, 8],
        rounds=[{"num_tokens": 2, "num_accepted": 1, "num_verified": 3}],
        logprobs=[
            {"tokens": [{"token_id": 5, "logprob": -0.25}, {"token_id": 7, "logprob": -0.5}]},
            {"tokens": [{"token_id": 8, "logprob": -1.0}]},
        ],
        start={"seed": 3, "resume_token": "token"},
    )


@pytest.mark.parametrize(
    "error",
    [
        CUT,
        Lost(Code.CANCELLED, is_marked=False),
        Lost(Code.UNAVAILABLE, "the server is stopping; send it elsewhere.", is_marked=True),
        Lost(Code.UNAVAILABLE, "the server was stopped before the end.", is_marked=True),
    ],
)
def test_a_lost_connection_and_a_server_that_stops_call_for_going_on(error: Lost) -> None:
    made = calls(timeout_s=None)
    assert 0 < made.pause_s(error, is_left=False) < LONGEST_PAUSE_S
    assert made.again()[0] == "ResumeStream"


@pytest.mark.parametrize(
    "error",
    [
        Lost(Code.UNAVAILABLE, "the engine was lost 3 times in a row.", is_marked=True),
        Lost(Code.RESOURCE_EXHAUSTED, "there is no room.", is_marked=True),
        Lost(Code.DEADLINE_EXCEEDED, is_marked=False),
        Lost(Code.INTERNAL, "it broke.", is_marked=True),
    ],
)
def test_what_a_server_says_of_the_request_itself_is_raised(error: Lost) -> None:
    with pytest.raises(OutriderError):
        calls(timeout_s=None).pause_s(error, is_left=False)


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
def test_once_lost_a_server_that_cannot_take_it_yet_is_tried_again(code: grpc.StatusCode) -> None:
    made = calls(timeout_s=None)
    made.pause_s(CUT, is_left=False)
    assert made.pause_s(Lost(code, "not now.", is_marked=True), is_left=False) > 0
    with pytest.raises(OutriderError, match="it is wrong"):
        made.pause_s(Lost(Code.INVALID_ARGUMENT, "it is wrong.", is_marked=True), is_left=False)


def test_pauses_grow_to_a_limit_and_a_message_begins_them_anew() -> None:
    made = calls(timeout_s=None)
    pauses = [made.pause_s(CUT, is_left=False) for _ in range(12)]
    assert pauses[0] < 0.06 and 0.9 < pauses[-1] <= LONGEST_PAUSE_S
    made.take(first_message())
    assert made.pause_s(CUT, is_left=False) < 0.06
    assert made.completion.resumptions == 1


def test_after_the_window_it_is_given_up_in_one_sentence() -> None:
    made = calls(timeout_s=None, window_s=0.0)
    with pytest.raises(UnavailableError) as caught:
        made.pause_s(CUT, is_left=False)
    assert str(caught.value) == (
        "the connection was lost after 2 tokens and not found again within 0 s (the server at "
        "here:1 cannot be reached; start one with 'outrider serve' or give its address); send the "
        "request again."
    )


def test_nothing_is_waited_for_that_was_left_or_is_not_to_be_resumed() -> None:
    for made, is_left in ((calls(timeout_s=None), True), (calls(timeout_s=None, resumes=False), 0)):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            made.pause_s(CUT, is_left=bool(is_left))


def test_without_a_first_message_it_is_sent_anew_to_a_server_that_has_answered_before() -> None:
    made = calls(timeout_s=None, has_begun=False)
    with pytest.raises(UnavailableError):
        made.pause_s(CUT, is_left=False)
    made.server.has_answered = True
    refused = Lost(Code.UNAVAILABLE, "failed to connect to all addresses; ...", is_marked=False)
    with pytest.raises(UnavailableError):  # nobody is there: it was not even sent
        made.pause_s(refused, is_left=False)
    made.pause_s(CUT, is_left=False)
    assert made.again()[0] == "Generate"
    assert made.pause_s(refused, is_left=False) > 0


def test_a_pause_is_no_longer_than_the_deadline() -> None:
    assert calls(timeout_s=0.001).pause_s(CUT, is_left=False) <= 0.001


def test_what_was_received_is_what_is_held() -> None:
    _, request = calls(timeout_s=None).again()
    assert (request.resume_token, request.seed) == ("token", 3)
    [held] = request.samples  # of sample 0 nothing was received
    assert (held.index, list(held.token_ids), held.finished) == (1, [7, 8], False)
    assert held.cumulative_logprob == -1.5
    stats = held.speculation
    assert (stats.rounds, stats.accepted_tokens, list(stats.verified_at)) == (1, 1, [1, 1, 1])


def test_a_channel_looks_for_its_server_soon_enough_to_resume() -> None:
    assert dict(CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 1000 * LONGEST_PAUSE_S
