"""What is read out of the events of an OpenAI-compatible stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.loadtest.records import CountedBy
from outrider.loadtest.targets.base import Reply, TargetFault
from outrider.loadtest.targets.openai_stream import OpenAiStreamParser, error_text
from outrider.loadtest.targets.sse import MAX_EVENT_BYTES

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(finish: str | None = None, more: dict[str, Any] | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event(choices=[choice], **(more or {}))


def usage(number: int, **more: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 9, "completion_tokens": number, **more}}


def read(*parts: bytes, count: Any = None) -> Reply:
    reply = Reply()
    answer = OpenAiStreamParser(reply, count)
    for part in parts:
        answer.feed(part)
    answer.end()
    return reply


def fails(*parts: bytes) -> TargetFault:
    with pytest.raises(TargetFault) as caught:
        read(*parts)
    return caught.value


# -- counting ---------------------------------------------------------------------------------


def test_ids_are_counted_where_the_server_sends_them() -> None:
    first = event(choices=[{"index": 0, "text": "a b", "token_ids": [5, 6]}])
    last = event(choices=[{"index": 0, "text": "", "token_ids": [7], "finish_reason": "stop"}])
    reply = read(first, last, event(choices=[], **usage(99)), DONE)
    assert (reply.update_tokens, reply.token_ids) == ([2, 1], [5, 6, 7])
    assert (reply.output_tokens, reply.counted_by) == (3, CountedBy.IDS)


def test_usage_of_every_event_gives_the_tokens_of_every_update() -> None:
    reply = read(
        chat(role="assistant", content="", more=usage(0)),
        chat(content="a", more=usage(3)),
        chat(content="b", more=usage(5)),
        chat(finish="stop", content="", more=usage(5)),
        event(choices=[], **usage(5)),
        DONE,
    )
    assert reply.update_tokens == [3, 2]
    assert (reply.output_tokens, reply.counted_by) == (5, CountedBy.USAGE)


def test_usage_at_the_end_tells_the_sum_only() -> None:
    final = usage(7, prompt_tokens_details={"cached_tokens": 4})
    reply = read(chat(content="a"), chat(content="b"), event(choices=[], **final), DONE)
    assert (len(reply.update_s), reply.update_tokens) == (2, [])
    assert (reply.output_tokens, reply.counted_by) == (7, CountedBy.USAGE)
    assert (reply.prompt_tokens, reply.cached_tokens) == (9, 4)


def test_usage_beside_the_last_choice_is_a_sum_and_no_update() -> None:
    reply = read(chat(content="a"), chat(finish="stop", content="", more=usage(4)), DONE)
    assert (len(reply.update_s), reply.update_tokens, reply.output_tokens) == (1, [], 4)


def test_a_tokeniser_counts_where_the_server_tells_nothing() -> None:
    reply = read(
        chat(content="one two "), chat(content="three"), DONE, count=lambda t: len(t.split())
    )
    assert (reply.output_tokens, reply.counted_by) == (3, CountedBy.TOKENISER)


def test_nobody_counts_chunks() -> None:
    reply = read(chat(content="a"), chat(content="b"), DONE)
    assert len(reply.update_s) == 2
    assert (reply.output_tokens, reply.counted_by) == (0, CountedBy.UNKNOWN)


def test_samples_of_one_request_are_counted_together() -> None:
    def sample(index: int, total: int) -> bytes:
        return event(choices=[{"index": index, "text": "x"}], **usage(total))

    reply = read(sample(0, 2), sample(1, 3), sample(0, 4), event(choices=[], **usage(7)), DONE)
    assert (reply.update_tokens, reply.output_tokens) == ([2, 3, 2], 7)


def test_llama_cpp_tells_tokens_and_drafts_in_its_timings() -> None:
    timings = {"predicted_n": 6, "draft_n": 8, "draft_n_accepted": 4}
    reply = read(chat(content="a"), chat(finish="stop", more={"timings": timings}), DONE)
    assert (reply.output_tokens, reply.counted_by) == (6, CountedBy.USAGE)
    assert reply.speculated is not None
    assert (reply.speculated.drafted, reply.speculated.accepted) == (8, 4)


def test_speculation_is_read_under_the_names_servers_have_for_it() -> None:
    told = {"num_drafts": 3, "num_draft_tokens": 9, "num_accepted_tokens": 5}
    told_by_us = {"rounds": 3, "drafted": 9, "accepted": 5, "rounds_by_accepted": [1, 0, 1, 1]}
    theirs = read(chat(content="a"), event(choices=[], **usage(1, speculation=told)), DONE)
    ours = read(chat(content="a", more={"speculation": told_by_us}), DONE)
    assert theirs.speculated is not None and ours.speculated is not None
    assert (theirs.speculated.rounds, theirs.speculated.accepted) == (3, 5)
    assert ours.speculated.rounds_by_accepted == [1, 0, 1, 1]


# -- content ----------------------------------------------------------------------------------


def test_a_role_alone_is_no_update() -> None:
    assert len(read(chat(role="assistant"), chat(role="assistant", content=""), DONE).update_s) == 0


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_thoughts_count_as_the_answer_does(name: str) -> None:
    reply = read(event(choices=[{"index": 0, "delta": {name: "hm"}}]), DONE)
    assert (len(reply.update_s), reply.pieces) == (1, ["hm"])


def test_calls_of_tools_are_updates() -> None:
    call = [{"index": 0, "function": {"arguments": "{"}}]
    assert len(read(chat(tool_calls=call), DONE).update_s) == 1


def test_a_reason_to_end_is_enough_without_done() -> None:
    assert read(chat(content="a", finish="stop")).finish == "stop"


def test_done_needs_no_blank_line_after_it() -> None:
    assert read(chat(content="a"), b"data: [DONE]\n").pieces == ["a"]


# -- faults -----------------------------------------------------------------------------------


def test_a_stream_that_just_ends_is_cut_off() -> None:
    assert fails(chat(content="a")).kind == "cut off"
    assert fails(chat(content="a"), b'data: {"choi').kind == "cut off"


@pytest.mark.parametrize(
    "wrong", [b"data: {half\n\n", b"data: [1]\n\n", b"data: \xff\n\n", b"data: {} {}\n\n"]
)
def test_what_is_no_object_is_malformed(wrong: bytes) -> None:
    assert fails(wrong, DONE).kind == "malformed"


def test_an_error_inside_a_stream_keeps_its_message() -> None:
    fault = fails(event(error={"message": "out of memory"}), DONE)
    assert (fault.kind, str(fault)) == ("stream error", "out of memory")


def test_an_event_without_end_is_given_up() -> None:
    answer = OpenAiStreamParser(Reply(), None)
    answer.feed(b"data: ")
    with pytest.raises(TargetFault) as caught:
        answer.feed(b"x" * (MAX_EVENT_BYTES + 1))
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"message": "no"}, "no"),
        ({"error": "no"}, "no"),
        ({"detail": "no"}, "no"),
        ([1], "[1]"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_errors_of_every_shape_become_a_short_text(said: Any, shown: str) -> None:
    assert error_text(said) == shown


def test_where_only_some_updates_have_ids_the_sum_is_the_server_s() -> None:
    with_ids = event(choices=[{"index": 0, "text": "a b", "token_ids": [5, 6]}])
    without = event(choices=[{"index": 0, "text": "c"}])
    reply = read(with_ids, without, event(choices=[], **usage(3)), DONE)
    assert (len(reply.update_s), reply.update_tokens) == (2, [])
    assert (reply.output_tokens, reply.counted_by) == (3, CountedBy.USAGE)
    assert read(with_ids, without, DONE).output_tokens == 2
