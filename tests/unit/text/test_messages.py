"""What the messages of a conversation may be, and what a template is given of them."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.text.messages import (
    Message,
    checked_kwargs,
    kwargs_from_json,
    template_messages,
)

PLAIN = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %}"


def _content(content: Any, role: str = "user") -> Any:
    (message,) = template_messages([{"role": role, "content": content}], PLAIN)
    return message["content"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hello", "hello"),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_content_is_text_or_parts_of_it(content: Any, text: str) -> None:
    assert _content(content) == text


def test_an_assistant_may_have_said_nothing() -> None:
    assert _content(None, "assistant") == ""
    assert template_messages([{"role": "assistant"}], PLAIN) == [
        {"role": "assistant", "content": ""}
    ]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("hi", "messages[0] is 'hi'; it must be {'role': ..., 'content': ...}."),
        ({"content": "a"}, "messages[0].role is missing; it must be 'system', 'developer', "),
        ({"role": "usr", "content": "a"}, "messages[0].role is 'usr'; it must be 'system', "),
        ({"role": 7, "content": "a"}, "messages[0].role is 7; it must be "),
        ({"role": "user"}, "messages[0] has no content; give it text."),
        ({"role": "user", "content": None}, "messages[0].content is null; it must be text or "),
        ({"role": "user", "content": 3}, "messages[0].content is 3; it must be text or "),
        ({"role": "user", "content": [3]}, "messages[0].content[0] is 3; it must be {'type': "),
        (
            {"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[1] is a part of type 'image_url', which this model cannot read; ",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content[0].text is None; it must be text.",
        ),
        (
            {"role": "user", "content": "a", "mood": "good"},
            "messages[0].mood is not supported, as the chat template does nothing with it; ",
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls is not supported; leave it out.",
        ),
        ({"role": "user", "content": "a", "name": 3}, "messages[0].name is 3; it must be text."),
    ],
)
def test_a_message_that_is_none_is_refused_in_one_sentence(message: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=re.escape(sentence)) as failure:
        template_messages([message], PLAIN)
    assert len(str(failure.value)) < 300


@pytest.mark.parametrize("messages", ["hi", None, 5, {"role": "user", "content": "a"}])
def test_a_conversation_is_a_list(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages is .*; it must be a list of "):
        template_messages(messages, PLAIN)


def test_empty_fields_that_clients_send_along_are_left_out() -> None:
    sent: Message = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [],
        "refusal": None,
        "audio": None,
    }
    assert template_messages([sent], PLAIN) == [{"role": "assistant", "content": "a"}]


def test_a_name_reaches_the_template() -> None:
    sent = {"role": "user", "content": "a", "name": "Ann"}
    assert template_messages([sent], PLAIN) == [sent]


def test_a_template_that_does_not_know_developers_gets_a_system_message() -> None:
    sent = [{"role": "developer", "content": "be brief"}]
    assert template_messages(sent, PLAIN)[0]["role"] == "system"
    knows = PLAIN + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert template_messages(sent, knows)[0]["role"] == "developer"


def test_a_role_or_field_that_the_template_names_is_its_own() -> None:
    knows = PLAIN + "{% if message.role == 'ipython' %}{{ message.mood }}{% endif %}"
    sent = [{"role": "ipython", "content": "1", "mood": "good"}]
    assert template_messages(sent, knows) == sent


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([1], "chat_template_kwargs is [1]; it must be an object."),
        ({"messages": []}, "chat_template_kwargs names 'messages', which is not the request's"),
        ({"tokenize": True}, "chat_template_kwargs names 'tokenize', which is not the request's"),
        ({"add_generation_prompt": 0}, "chat_template_kwargs names 'add_generation_prompt'"),
        ({"a b": 1}, "chat_template_kwargs names 'a b'"),
        ({1: 1}, "chat_template_kwargs names 1, "),
        ({"a": float("nan")}, "chat_template_kwargs holds what JSON cannot"),
        ({"a": object()}, "chat_template_kwargs holds what JSON cannot"),
        ({"a": "x" * 20_000}, "chat_template_kwargs has 20009 characters as JSON; it may have "),
    ],
)
def test_values_for_a_template_are_small_and_plain_and_nobody_elses(
    given: Any, sentence: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(sentence)):
        checked_kwargs(given)


@pytest.mark.parametrize(
    "text", ["{", "[" * 9000, "[1]", '{"tools": []}', '{"a": NaN}', '"' + "x" * 20_000 + '"']
)
def test_values_in_json_are_checked_alike(text: str) -> None:
    with pytest.raises(RequestError, match="template_kwargs"):
        kwargs_from_json(text)


def test_values_for_a_template_are_taken_as_they_are() -> None:
    assert kwargs_from_json('{"enable_thinking": false, "n": [1, null]}') == {
        "enable_thinking": False,
        "n": [1, None],
    }
    assert kwargs_from_json("") == checked_kwargs(None) == {}


@pytest.mark.parametrize("place", ["role", "field"])
def test_a_word_of_megabytes_is_looked_up_and_not_searched_for(place: str) -> None:
    """A pattern made of it took minutes, with everybody else waiting."""
    word = "x" * 4_000_000
    message = {"role": "user", "content": "a", word: "b"}
    if place == "role":
        message = {"role": word, "content": "a"}
    start_s = time.process_time()
    with pytest.raises(RequestError) as refused:
        template_messages([message] * 10, PLAIN)
    assert len(str(refused.value)) < 300
    assert time.process_time() - start_s < 5


def test_a_template_is_read_once_for_all_messages() -> None:
    template = PLAIN + "{# don't: " + "'.." * 300_000 + " #}{{ message.thinking }}'tool'"
    start_s = time.process_time()
    read = template_messages(
        [{"role": "developer", "content": "a", "thinking": "b"}] * 300, template
    )
    assert {message["role"] for message in read} == {"system"}
    assert template_messages([{"role": "tool", "content": "a"}], template)[0]["role"] == "tool"
    assert time.process_time() - start_s < 10
