"""What the HTTP API refuses, and in which words."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import MODEL, FakeService, fake_service
from http_tools import TIMEOUT_S, openai_client, send

from outrider.gateway.http.fields import IGNORED, REFUSED
from outrider.text.json_bodies import MAX_PROMPTS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    options = {"max_body_bytes": 200_000, "cors_origins": ("https://here.example",)}
    with fake_service(tmp_path_factory.mktemp("http"), server=options) as running:
        yield running


# -- bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b"[]", "it must be a JSON object"),
        (b'"text"', "it must be a JSON object"),
        (b"null", "it must be a JSON object"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf; it must be a finite"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "twice"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"a":' * 13_000, "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_body_that_is_no_object_of_json_is_refused(
    service: FakeService, body: bytes, words: str
) -> None:
    reply = send(service, COMPLETIONS, body)
    assert reply.status == 400
    assert words in reply.error["message"]


@pytest.mark.parametrize("sent_as", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(service: FakeService, sent_as: str) -> None:
    reply = send(service, COMPLETIONS, {"prompt": "a"}, Content_Type=sent_as)
    assert reply.status == 400
    assert "Content-Type: application/json" in reply.error["message"]


def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so(
    service: FakeService,
) -> None:
    large = b'{"prompt": "' + b"a" * 250_000 + b'"}'
    reply = send(service, COMPLETIONS, large)
    assert (reply.status, reply.error["type"]) == (413, "invalid_request_error")
    assert "server.max_body_bytes" in reply.error["message"]
    connection = http.client.HTTPConnection(service.server.http_address, timeout=TIMEOUT_S)
    pieces = (large[start : start + 50_000] for start in range(0, len(large), 50_000))
    headers = {"Content-Type": "application/json"}
    connection.request("POST", COMPLETIONS, pieces, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_large_body_within_the_bound_is_read(service: FakeService) -> None:
    body = {"prompt": [10], "max_tokens": 1, "metadata": {"a": "b" * 150_000}}
    assert send(service, COMPLETIONS, body).status == 200
    wrong = send(service, COMPLETIONS, body | {"temperature": "hot"})
    assert (wrong.status, wrong.error["param"]) == (400, "temperature")


# -- fields -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("temperature", "hot", "temperature is 'hot'; it must be a number."),
        ("temperature", -1, "temperature is -1.0; it must be a number from 0 to 100."),
        ("temperature", True, "temperature is True; it must be a number."),
        ("n", 0, "n is 0; it must be a whole number from 1 to 128."),
        ("n", 1.5, "n is 1.5; it must be a whole number."),
        ("n", 10**9, None),
        ("max_tokens", 0, "max_tokens is 0; it must be a whole number >= 1, or None for no limit."),
        ("stream", "yes", "stream is 'yes'; it must be true or false."),
        ("model", 5, "model is 5; it must be text."),
        ("bad_words", "word", "bad_words is 'word'; it must be a list."),
        ("stop", 5, None),
        ("stop", ["\ud800"], None),
        ("logit_bias", {"x": 1}, None),
        ("logit_bias", {"5": 1000}, None),
        ("logit_bias", [5], None),
        ("seed", 2**70, None),
        ("logprobs", 1000, None),
        ("logprobs", True, "logprobs is True; it must be a whole number."),
        ("allowed_token_ids", [10**6], None),
        ("speculation", "magic", None),
        ("fix_depth", True, None),
        ("priority", 1000, None),
        ("stream_options", 5, "stream_options is 5; it must be an object."),
        ("stream_options", {"include_usage": 1}, None),
        ("best_of", 3, None),
        ("prompt", None, None),
        ("prompt", 5, None),
        ("prompt", [], None),
        ("prompt", "", None),
        ("prompt", [[]], None),
        ("prompt", [None], None),
        ("prompt", [10, "text"], None),
        ("prompt", [-1], None),
        ("prompt", ["text"] * (MAX_PROMPTS + 1), None),
        ("prompt", "\ud800", None),
    ],
)
def test_a_wrong_value_is_refused_in_a_sentence_that_names_its_field(
    service: FakeService, field: str, value: Any, sentence: str | None
) -> None:
    reply = send(service, COMPLETIONS, {"prompt": "a"} | {field: value})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert re.split(r"[.[]", reply.error["param"])[0] == field
    assert sentence is None or reply.error["message"] == sentence
    assert reply.error["message"].endswith(".")


UNSUPPORTED: dict[str, Any] = dict.fromkeys(REFUSED, {"some": "thing"}) | {
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "suffix": "the end",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "truncate_prompt_tokens": 5,
}


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_field_that_would_change_the_answer_is_refused_unless_it_changes_nothing(
    service: FakeService, field: str
) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        short: dict[str, Any] = body | {"max_tokens": 1}
        reply = send(service, path, short | {field: UNSUPPORTED[field]})
        assert (reply.status, reply.error["param"]) == (400, field)
        assert "not supported" in reply.error["message"]
        for harmless in (None, *REFUSED[field].harmless):
            assert send(service, path, short | {field: harmless}).status == 200


def test_fields_that_mean_nothing_to_an_answer_are_ignored(service: FakeService) -> None:
    body = {"prompt": "a", "max_tokens": 1} | dict.fromkeys(IGNORED, {"any": ["thing"]})
    assert send(service, COMPLETIONS, body).status == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": "a"}, "prompt"),
        ({"chat_template": "{{ 1 }}"}, "messages"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_what_a_chat_cannot_have_is_refused(
    service: FakeService, more: dict[str, Any], param: str
) -> None:
    reply = send(service, CHAT, {"messages": MESSAGES} | more)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_refusal_never_repeats_what_is_long(service: FakeService) -> None:
    for more in (
        {"temperature": "x" * 100_000},
        {"stop": ["y" * 100_000]},
        {"model": "z" * 100_000},
        {"speculation": "v" * 100_000},
        {"a" * 100_000: 1, "tools": ["w" * 50_000]},
    ):
        reply = send(service, COMPLETIONS, {"prompt": "a"} | more)
        assert reply.status in (400, 404)
        assert len(reply.error["message"]) <= 300
        assert len(reply.body) < 600


# -- names and routes -------------------------------------------------------------------------


def test_an_unknown_model_is_not_found_and_the_served_one_named(service: FakeService) -> None:
    with openai_client(service) as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-7", prompt="a")
    assert caught.value.param == "model"
    assert "'gpt-7'" in str(caught.value) and MODEL in str(caught.value)
    assert send(service, "/v1/models/gpt-7", method="GET").error["param"] == "model"


def test_the_model_is_listed_under_each_of_its_names(tmp_path: Path) -> None:
    options = {"model_names": ("short", "a/long-name")}
    with fake_service(tmp_path, server=options) as own, openai_client(own) as client:
        assert [each.id for each in client.models.list()] == ["short", "a/long-name"]
        found: Any = client.models.retrieve("a/long-name")
        assert (found.max_model_len, found.root) == (512, MODEL)
        assert found.sampling_defaults == {}
        done = client.completions.create(model="a/long-name", prompt="a", max_tokens=1)
        assert done.model == "short"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/audio/speech"])
def test_routes_that_are_not_here_say_what_is(service: FakeService, path: str) -> None:
    reply = send(service, path, {"input": "a"})
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    assert "/v1/chat/completions" in reply.error["message"]


def test_an_unknown_path_and_a_wrong_method_are_answered_in_shape(service: FakeService) -> None:
    assert "'/nowhere'" in send(service, "/nowhere", method="GET").error["message"]
    reply = send(service, COMPLETIONS, method="GET")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert reply.error["message"] == f"'{COMPLETIONS}' does not take GET; use POST."


def test_the_description_of_the_api_has_every_field(service: FakeService) -> None:
    described = send(service, "/openapi.json", method="GET").json["paths"]
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        body = described[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "model" in body["properties"]
    assert "$ref" not in str(described[CHAT]["post"]["requestBody"])


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", "1e99"])
def test_a_timeout_that_is_no_time_is_refused(service: FakeService, value: str) -> None:
    reply = send(service, COMPLETIONS, {"prompt": "a"}, X_Request_Timeout=value)
    assert (reply.status, reply.error["param"]) == (400, "X-Request-Timeout")


# -- labels and origins -----------------------------------------------------------------------


def test_a_request_id_is_repeated_however_often_it_comes(service: FakeService) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    replies = [send(service, COMPLETIONS, body, X_Request_Id="mine") for _ in range(2)]
    assert [reply.headers["X-Request-Id"] for reply in replies] == ["mine", "mine"]
    assert replies[0].json["id"] != replies[1].json["id"]
    for path in ("/nowhere", "/v1/models", COMPLETIONS):
        assert send(service, path, b"x", X_Request_Id="mine").headers["X-Request-Id"] == "mine"
    named = send(service, COMPLETIONS, body | {"request_id": "in the body"})
    assert named.headers["X-Request-Id"] == "in_the_body"
    unnamed = send(service, COMPLETIONS, body)
    assert unnamed.headers["X-Request-Id"] == unnamed.json["id"]
    assert (
        len(send(service, COMPLETIONS, body, X_Request_Id="x" * 999).headers["X-Request-Id"]) < 200
    )


def test_only_pages_of_configured_origins_may_call(service: FakeService) -> None:
    for origin, allowed in (("https://here.example", True), ("https://there.example", False)):
        reply = send(service, "/v1/models", method="GET", Origin=origin)
        assert (reply.headers["Access-Control-Allow-Origin"] == origin) is allowed


def test_without_configured_origins_nothing_is_said_to_browsers(tmp_path: Path) -> None:
    with fake_service(tmp_path) as own:
        reply = send(own, "/v1/models", method="GET", Origin="https://here.example")
        assert reply.headers["Access-Control-Allow-Origin"] is None
        asked = send(own, COMPLETIONS, method="OPTIONS", Origin="https://here.example")
        assert asked.status == 405


def test_before_there_is_an_engine_a_request_is_told_to_come_back(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"max_requests": 1}) as own:
        own.engine.stop()
        reply = send(own, COMPLETIONS, {"prompt": "a"})
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert reply.error["type"] == "service_unavailable_error"


# -- tokens -----------------------------------------------------------------------------------


def test_text_becomes_tokens_and_tokens_text(service: FakeService) -> None:
    found = send(service, "/tokenize", {"prompt": "Hello 東京"}).json
    assert found["count"] == len(found["tokens"]) > 2
    assert found["max_model_len"] == 512
    assert send(service, "/detokenize", {"tokens": found["tokens"]}).json == {
        "prompt": "Hello 東京"
    }


def test_a_conversation_becomes_the_tokens_that_chat_would_read(service: FakeService) -> None:
    found = send(service, "/tokenize", {"messages": MESSAGES}).json["tokens"]
    send(service, CHAT, {"messages": MESSAGES, "max_tokens": 1})
    assert tuple(found) == service.engine.submitted[-1].spec.prompt_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(
    service: FakeService, path: str, body: dict[str, Any], param: str
) -> None:
    reply = send(service, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_tokens_of_an_unknown_model_are_not_found(service: FakeService) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        reply = send(service, path, body | {"model": "gpt-7"})
        assert (reply.status, reply.error["param"]) == (404, "model")
