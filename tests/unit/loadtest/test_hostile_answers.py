"""Answers that no server should send, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import grpc
import pytest

from outrider.errors import ConfigError
from outrider.loadtest.records import CountedBy, RequestRecord, ShiftPhase
from outrider.loadtest.targets import openai_stream
from outrider.loadtest.targets.base import Reply, TargetFault, TargetSpec
from outrider.loadtest.targets.grpc_target import GrpcTarget, _read
from outrider.loadtest.targets.openai_stream import OpenAiStreamParser
from outrider.loadtest.targets.retries import OverloadedFault, retry_after_s, with_retries
from outrider.proto import generation_pb2

DONE = b"data: [DONE]\n\n"
SECRET = "sk-very-secret"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str = "a", **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": text, **more}])


def read(*parts: bytes, count: Any = None) -> Reply:
    reply = Reply()
    answer = OpenAiStreamParser(reply, count)
    for part in parts:
        answer.feed(part)
    answer.end()
    return reply


def record_of(**fields: Any) -> RequestRecord:
    given = {"id": "q/0", "arm": "a", "cell": "rate 1", "block": 0, "phase": ShiftPhase.MEASURED}
    return RequestRecord(**{**given, "category": "c", "intended_s": 0.0, "sent_s": 0.0, **fields})


# -- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("absurd", [10**30, -5, 1e300, "7", True, None, [1]])
def test_a_number_of_tokens_that_is_none_is_not_counted(absurd: Any) -> None:
    reply = read(piece(), event(choices=[], usage={"completion_tokens": absurd}), DONE)
    assert (reply.output_tokens, reply.counted_by) == (0, CountedBy.UNKNOWN)


@pytest.mark.parametrize("wrong", [["x"], [1.5], [None], [[1]], [10**30], [math.nan], [True]])
def test_token_ids_that_are_no_ids_are_malformed(wrong: list[Any]) -> None:
    with pytest.raises(TargetFault) as caught:
        read(piece(token_ids=wrong), DONE)
    assert caught.value.kind == "malformed"


def test_rounds_that_are_no_numbers_are_left_out() -> None:
    told = {"rounds": 1, "drafted": 10**40, "rounds_by_accepted": [1, "x", math.nan]}
    reply = read(event(choices=[], speculation=told), DONE)
    assert reply.speculated is not None
    assert (reply.speculated.drafted, reply.speculated.rounds_by_accepted) == (0, [])


# -- ends -------------------------------------------------------------------------------------


def test_what_comes_behind_done_is_no_answer_however_it_is_cut() -> None:
    behind = piece("b", token_ids=[2])
    together = read(piece(token_ids=[1]) + DONE + behind)
    assert together.token_ids == [1]
    assert read(piece(token_ids=[1]) + DONE + b"data: {half\n\n").token_ids == [1]


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_stream, "MAX_ANSWER_BYTES", 1000)
    answer = OpenAiStreamParser(Reply(), None)
    with pytest.raises(TargetFault, match="longer than"):
        for _ in range(1000):
            answer.feed(b": still here\n\n")


def test_a_reason_to_end_is_kept_short_and_fit_to_print() -> None:
    finish = read(piece(finish_reason="\x1b[2J" + "x" * 10_000), DONE).finish
    assert finish is not None and len(finish) <= 40 and finish.isprintable()


# -- text -------------------------------------------------------------------------------------


def test_half_a_character_can_be_written_and_read_again() -> None:
    record = record_of(text="\ud83d", message="\ud800")
    line = record.to_json()
    assert line.encode()
    assert RequestRecord.from_json(line).text == "\ud83d"


def test_half_a_character_of_an_answer_can_be_sent_back_as_history() -> None:
    from outrider.loadtest.targets.openai import _encoded

    assert json.loads(_encoded({"messages": ["é\ud83d"]})) == {"messages": ["é\ud83d"]}


def test_a_tokeniser_is_given_whole_characters_only() -> None:
    given: list[str] = []

    def count(text: str) -> int:
        given.append(text)
        text.encode()
        return 1

    read(piece("\ud83d"), piece("\ude00 \ud83d"), DONE, count=count)
    assert given == ["😀 \ufffd"]


def test_a_fault_says_nothing_that_a_terminal_obeys() -> None:
    fault = TargetFault("http 500", "no\x1b]0;owned\x07 \x9b2J\r\nnext\u202eline \ud800")
    assert str(fault).isprintable()
    assert str(fault).startswith("no ]0;owned ")


# -- retries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["nan", "-nan", "NaN"])
def test_a_time_to_wait_that_is_no_number_is_as_none(header: str) -> None:
    assert retry_after_s(header) is None


def test_retries_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def refuse() -> None:
        raise OverloadedFault("http 429")

    monkeypatch.setattr("outrider.loadtest.targets.retries.asyncio.sleep", sleep)
    with pytest.raises(OverloadedFault):
        asyncio.run(with_retries(refuse, Reply(), 2000))
    assert len(waits) == 2000 and max(waits) == 10.0


# -- gRPC -------------------------------------------------------------------------------------


def test_rounds_beyond_all_counting_are_left_out() -> None:
    response = generation_pb2.GenerateResponse()
    response.summary.speculation.rounds = 2**64 - 1
    messages = [response.SerializeToString(), grpc.aio.EOF]

    class Call:
        async def read(self) -> Any:
            return messages.pop(0)

    reply = Reply()
    asyncio.run(_read(Call(), reply))
    assert reply.speculated is None


def test_binary_metadata_is_given_as_bytes() -> None:
    target = GrpcTarget(TargetSpec("grpc://127.0.0.1:1", headers={"X-Trace-Bin": "a", "X-A": "b"}))
    assert target._metadata == [("x-trace-bin", b"a"), ("x-a", "b")]


# -- what the user gives ------------------------------------------------------------------------


def test_a_target_in_an_error_shows_no_secret() -> None:
    spec = TargetSpec("http://127.0.0.1:1", headers={"X-Key": SECRET}, api_key=SECRET)
    assert SECRET not in repr(spec)


@pytest.mark.parametrize(
    "given",
    [
        {"headers": {"X-Key": f"{SECRET}\r\nX-Other: 1"}},
        {"headers": {"X-Key": f"{SECRET}\n"}},
        {"headers": {"X-Key": f"{SECRET}é"}},
        {"headers": {"X Key\n": "1"}},
        {"headers": {"X-Key": 5}},
        {"headers": {5: "x"}},
        {"api_key": f"{SECRET}\n"},
        {"api_key": f"{SECRET}\u2028"},
        {"url": f"http://me:{SECRET}@127.0.0.1:1"},
        {"channels": "8"},
        {"channels": 10**9},
        {"channels": 0},
    ],
)
def test_what_would_be_another_header_or_show_a_secret_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        TargetSpec(**{"url": "http://127.0.0.1:1", **given})
    assert SECRET not in str(caught.value)
