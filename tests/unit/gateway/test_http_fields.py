"""What a body becomes before anything is asked of an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from outrider.errors import FieldRefusedError, RequestError, shown
from outrider.gateway.http.answers import in_pieces
from outrider.gateway.http.body import validated
from outrider.gateway.http.errors import error_body, with_field
from outrider.gateway.http.fields import IGNORED, warning_of
from outrider.gateway.http.labels import clean_label
from outrider.gateway.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    conversation_of,
)
from outrider.text.json_bodies import parse


def chat(**more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest.model_validate({"messages": messages} | more)


def test_only_what_was_given_is_passed_on() -> None:
    asked = validated(
        CompletionRequest, parse(b'{"prompt": "a", "top_p": null, "seed": 0, "user": "me"}')
    )
    assert asked.params() == {"seed": 0}


def test_log_probabilities_of_chat_are_a_number_to_the_sampler() -> None:
    assert chat(logprobs=True, top_logprobs=3).params() == {"logprobs": 3}
    assert chat(logprobs=True).params() == {"logprobs": 0}
    assert chat(logprobs=False).params() == {}


def test_a_conversation_has_what_the_template_may_want_to_know() -> None:
    messages = [{"role": "assistant", "content": None, "name": "A", "refusal": None}]
    more = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    asked = chat(**more, messages=messages, add_generation_prompt=False)
    found = asked.conversation()
    assert found.messages == [{"role": "assistant", "content": None, "name": "A"}]
    assert found.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert found.add_generation_prompt is False


def known_to(kind: type[GenerationRequest]) -> set[str]:
    return {*kind.model_fields, *kind.refused, *IGNORED}


def test_no_field_of_openais_client_is_unknown() -> None:
    for kind, params in ((ChatRequest, chat_params), (CompletionRequest, completion_params)):
        sent = {*params.CompletionCreateParamsBase.__annotations__, "stream"}
        assert sent - known_to(kind) == set()


# Of ChatCompletionRequest and CompletionRequest at a014e35f38c8 (August 2026), but for OpenAI's.
VLLM_FIELDS = (
    *("add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params"),
    *("ignore_eos", "include_stop_str_in_output", "kv_transfer_params", "length_penalty"),
    *("logprob_token_ids", "min_p", "min_tokens", "priority", "session_id", "stream_interval"),
    *("prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id"),
    *("response_format", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids"),
    *("routed_experts_prompt_start", "skip_special_tokens", "spaces_between_special_tokens"),
    *("stop_token_ids", "structured_outputs", "thinking_token_budget", "top_k"),
    *("truncate_prompt_tokens", "truncation_side", "use_beam_search", "vllm_xargs"),
)
VLLM_CHAT_FIELDS = (
    *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "echo", "include_reasoning", "media_io_kwargs", "mm_processor_kwargs"),
    *("return_assistant_tokens_mask", "return_prompt_text"),
)


def test_no_field_of_vllm_is_unknown() -> None:
    assert {*VLLM_FIELDS, "prompt_embeds"} - known_to(CompletionRequest) == set()
    assert {*VLLM_FIELDS, *VLLM_CHAT_FIELDS} - known_to(ChatRequest) == set()


def test_a_warning_names_unknown_fields_and_the_nearest_that_there_are() -> None:
    asked = chat(temprature=1, maxtokens=5, nobody_knows_this=0, user="me", more=1, tools=None)
    assert asked.unknown == ["temprature", "maxtokens", "nobody_knows_this", "more"]
    assert warning_of(asked.unknown, frozenset(ChatRequest.model_fields)) == (
        "ignored unknown fields: 'temprature' (did you mean 'temperature'?), 'maxtokens' "
        "(did you mean 'max_tokens'?), 'nobody_knows_this', and 1 more"
    )


@pytest.mark.parametrize(
    "name", ["a\r\nSet-Cookie: b", "\ud800", "é\x00", "x" * 10**6, "\x85" * 99]
)
def test_a_warning_can_go_into_a_header_whatever_the_names_are(name: str) -> None:
    line = warning_of([name] * 1000, frozenset(ChatRequest.model_fields))
    assert line.isascii() and line.isprintable()
    assert len(line) < 300


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (CompletionRequest, b"{}", "prompt is missing; the request must have it."),
        (
            CompletionRequest,
            b'{"messages": [{"role": "user", "content": "Hello"}]}',
            "prompt is missing; send messages to /v1/chat/completions.",
        ),
        (
            ChatRequest,
            b'{"prompt": "Hello"}',
            "messages is missing; send prompt to /v1/completions.",
        ),
    ],
)
def test_what_belongs_to_another_route_is_told_so(kind: Any, body: bytes, sentence: str) -> None:
    with pytest.raises(FieldRefusedError) as caught:
        validated(kind, parse(body))
    assert str(caught.value) == sentence


def test_many_wrong_entries_are_one_complaint() -> None:
    with pytest.raises(ValidationError) as caught:
        DetokenizeRequest.model_validate({"tokens": ["x"] * 1000})
    assert caught.value.error_count() == 1
    with pytest.raises(ValidationError) as caught:
        chat(messages=["x"] * 1000)
    assert caught.value.error_count() == 1


def test_a_sentence_that_is_too_long_keeps_its_beginning_and_its_remedy() -> None:
    message = error_body(400, "stop is " + "x" * 5000 + "; shorten it.")["error"]["message"]
    assert len(message) <= 300
    assert message.startswith("stop is xxx") and message.endswith("; shorten it.")


@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 1000] * 1000, {"a": "b" * 10**6}, 10**4000])
def test_a_value_is_shown_in_a_few_letters(value: Any) -> None:
    assert len(shown(value)) <= 63


@pytest.mark.parametrize(
    ("sentence", "param"),
    [
        ("temperature is 5; lower it.", "temperature"),
        ("logit_bias[5] is 1000; lower it.", "logit_bias[5]"),
        ("messages[1].content is null; give some.", "messages[1].content"),
        ("the prompt is empty; give some.", "prompt"),
        ("the conversation is empty; give some.", "messages"),
        ("the engine is away; wait.", None),
        ("", None),
    ],
)
def test_a_sentence_about_a_field_begins_with_its_name(sentence: str, param: str | None) -> None:
    error = with_field(RequestError(sentence), {"temperature", "logit_bias", "prompt", "messages"})
    assert getattr(error, "param", None) == param


def test_a_refusal_that_names_its_field_keeps_it() -> None:
    error = with_field(FieldRefusedError("n", "temperature is wrong."), {"temperature"})
    assert getattr(error, "param", None) == "n"


def test_a_label_can_go_into_a_header_and_a_line_of_the_log() -> None:
    assert clean_label("  trace-7 \r\nX: y ") == "trace-7_X:_y"
    assert clean_label("é" * 500) == "_"
    assert len(clean_label("a" * 500)) == 128


def test_too_many_messages_are_refused_without_a_look_at_each() -> None:
    with pytest.raises(RequestError, match="10001 messages; it may have 10000") as refused:
        chat(messages=[{"audio": "which is refused"}] * 10_001)
    assert refused.value.param == "messages"  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="10001 messages; it may have 10000"):
        conversation_of([{}] * 10_001, None, None, None)


def test_json_in_pieces_is_the_same_json() -> None:
    value = {"a": [{"b": {"c": [1, {"d": "é"}, None]}, "e": {}}, []], "f": "g", "h": {"i": [2.5]}}
    whole = json.dumps(value, ensure_ascii=False)
    for levels in range(7):
        assert "".join(in_pieces(value, levels)) == whole
    assert len(list(in_pieces({"a": list(range(100))}, 2))) > 100
