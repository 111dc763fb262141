"""Server-sent events do not depend on how the network cuts them, and no event is a surprise."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.loadtest.targets.base import Reply, TargetFault
from outrider.loadtest.targets.openai_stream import OpenAiStreamParser
from outrider.loadtest.targets.sse import EventSplitter

PIECES = (
    *("data: ", "data:", "a", "é", "日本", "😀", ":", ": ping", "event: x", "id: 1", "[DONE]", " "),
    *("\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\r\r", '{"a": 1}'),
)
streams = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def events_of(parts: list[bytes]) -> list[bytes | None]:
    splitter = EventSplitter()
    events: list[bytes | None] = [event for part in parts for event in splitter.feed(part)]
    return [*events, splitter.end()]


def by_lines(stream: str) -> list[bytes]:
    """The definition, word for word: lines, and what the blank ones end."""
    events: list[bytes] = []
    data: list[str] = []
    lines = stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for line in lines[:-1]:
        if not line:
            if data:
                events.append("\n".join(data).encode())
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
    return events


@settings(deadline=None)
@given(streams)
def test_events_are_those_of_the_definition(stream: str) -> None:
    assert EventSplitter().feed(stream.encode()) == by_lines(stream)


@settings(deadline=None)
@given(streams, st.lists(st.integers(0, 200), max_size=12))
def test_events_are_the_same_wherever_the_stream_is_cut(stream: str, cuts: list[int]) -> None:
    data = stream.encode()
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    assert events_of(parts) == events_of([data])


def test_every_byte_may_be_a_border() -> None:
    texts = ["é", "日本", "😀", "a\nb", "plain"]
    stream = b": ping\r\n\r\n"
    for number, text in enumerate(texts):
        line_end = b"\r\n" if number % 2 else b"\n"
        body = json.dumps({"t": text}, ensure_ascii=False).encode()
        stream += b"data:" + b" " * (number % 3 > 0) + body + line_end * 2
    stream += b"data: [DONE]\n\n"
    for border in range(len(stream) + 1):
        *events, done, rest = events_of([stream[:border], stream[border:]])
        assert [json.loads(event or b"")["t"] for event in events] == texts
        assert (done, rest) == (b"[DONE]", None)
    assert events_of([bytes([byte]) for byte in stream]) == events_of([stream])


# -- what events say --------------------------------------------------------------------------

NAMES = (
    *("choices", "usage", "timings", "speculation", "error", "delta", "text", "content", "index"),
    *("token_ids", "tokens", "completion_tokens", "prompt_tokens", "prompt_tokens_details"),
    *("cached_tokens", "predicted_n", "draft_n", "finish_reason", "rounds", "tool_calls"),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=5,
)
choices = st.fixed_dictionaries(
    {"choices": st.lists(st.dictionaries(st.sampled_from(NAMES), values))}
)
bodies = st.dictionaries(st.sampled_from(NAMES), values) | choices | values


@settings(deadline=None, max_examples=40)
@given(st.lists(bodies, max_size=3))
def test_whatever_json_a_server_sends_only_a_fault_may_come_of_it(sent: list[Any]) -> None:
    reply = Reply()
    answer = OpenAiStreamParser(reply, len)
    with suppress(TargetFault):
        for body in sent:
            answer.feed(b"data: " + json.dumps(body).encode() + b"\n\n")
        answer.end()
    answer.settle()
    assert isinstance(reply.output_tokens, int) and reply.output_tokens >= 0
    assert len(reply.update_tokens) in (0, len(reply.update_s))
    assert "".join(reply.pieces) is not None
