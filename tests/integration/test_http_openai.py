"""What the real `openai` client asks for reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import MODEL, FakeService, fake_service, tokenizer
from http_tools import openai_client

from outrider.scheduler.params import SamplingParams

PROMPT = [10, 11, 12, 13]
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("http")) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: FakeService) -> Iterator[openai.OpenAI]:
    with openai_client(service) as made:
        yield made


def submitted(service: FakeService) -> Any:
    return service.engine.submitted[-1].spec


# -- every parameter --------------------------------------------------------------------------

OPENAI_FIELDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("max_tokens", 3, {"max_tokens": 3}),
    ("n", 2, {"n": 2}),
    ("temperature", 0.25, {"temperature": 0.25}),
    ("temperature", 0, {"temperature": 0}),
    ("top_p", 0.5, {"top_p": 0.5}),
    ("presence_penalty", 0.5, {"presence_penalty": 0.5}),
    ("frequency_penalty", -0.5, {"frequency_penalty": -0.5}),
    ("logit_bias", {"50": 7}, {"logit_bias": {50: 7.0}}),
    ("seed", 1234, {"seed": 1234}),
    ("stop", "halt", {"stop": ("halt",)}),
    ("stop", ["halt", "end"], {"stop": ("halt", "end")}),
    ("user", "somebody", {}),
]
EXTRA_FIELDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("max_completion_tokens", 3, {"max_tokens": 3}),
    ("top_k", 5, {"top_k": 5}),
    ("top_k", -1, {"top_k": 0}),
    ("min_p", 0.1, {"min_p": 0.1}),
    ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
    ("min_tokens", 2, {"min_tokens": 2}),
    ("stop_token_ids", [7, 8], {"stop_token_ids": (7, 8)}),
    ("include_stop_str_in_output", True, {"include_stop_str_in_output": True}),
    ("ignore_eos", True, {"ignore_eos": True}),
    ("skip_special_tokens", False, {"skip_special_tokens": False}),
    ("allowed_token_ids", [5, 6], {"allowed_token_ids": (5, 6)}),
    ("bad_words", ["never"], {"bad_words": ("never",)}),
    ("prompt_logprobs", 2, {"prompt_logprobs": 2}),
    ("speculation", "ngram", {"speculation": "ngram"}),
    ("num_speculative_tokens", 2, {"num_speculative_tokens": 2}),
    ("best_of", 1, {}),
    ("response_format", {"type": "text"}, {}),
    ("tool_choice", "none", {}),
    ("tools", [], {}),
    ("parallel_tool_calls", True, {}),
    ("service_tier", "auto", {}),
    ("metadata", {"a": "b"}, {}),
    ("store", False, {}),
    ("nobody_knows_this", {"a": [1]}, {}),
    ("temperature", None, {}),
    ("stop", None, {}),
    ("logit_bias", None, {}),
]
COMPLETION_FIELDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("echo", True, {"echo": True}),
    ("logprobs", 3, {"logprobs": 3}),
    ("suffix", "", {}),
]
CHAT_FIELDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("logprobs", True, {"logprobs": 0}),
    ("modalities", ["text"], {}),
    ("prediction", {"type": "content", "content": "x"}, {}),
]


def expected_params(base: dict[str, Any], more: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**(base | more))


@pytest.mark.parametrize(("name", "value", "changed"), OPENAI_FIELDS + COMPLETION_FIELDS)
def test_what_a_completion_asks_for_reaches_the_engine(
    service: FakeService, client: openai.OpenAI, name: str, value: Any, changed: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 2} | {name: value}
    client.completions.create(model=MODEL, prompt=PROMPT, **asked)
    assert submitted(service).params == expected_params({"max_tokens": 2}, changed)


@pytest.mark.parametrize(("name", "value", "changed"), EXTRA_FIELDS)
def test_what_a_completion_asks_for_beyond_openais_fields_reaches_the_engine(
    service: FakeService, client: openai.OpenAI, name: str, value: Any, changed: dict[str, Any]
) -> None:
    client.completions.create(model=MODEL, prompt=PROMPT, extra_body={name: value})
    assert submitted(service).params == expected_params({}, changed)


@pytest.mark.parametrize(("name", "value", "changed"), OPENAI_FIELDS + CHAT_FIELDS)
def test_what_a_chat_asks_for_reaches_the_engine(
    service: FakeService, client: openai.OpenAI, name: str, value: Any, changed: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 2} | {name: value}
    client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert submitted(service).params == expected_params({"max_tokens": 2}, changed)


@pytest.mark.parametrize(("name", "value", "changed"), EXTRA_FIELDS)
def test_what_a_chat_asks_for_beyond_openais_fields_reaches_the_engine(
    service: FakeService, client: openai.OpenAI, name: str, value: Any, changed: dict[str, Any]
) -> None:
    short = {} if name == "max_completion_tokens" else {"max_tokens": 2}
    body: Any = short | {name: value}
    client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=body)
    assert submitted(service).params == expected_params(short, changed)


def test_fixing_the_depth_and_the_priority_reach_the_engine(
    service: FakeService, client: openai.OpenAI
) -> None:
    more = {"num_speculative_tokens": 2, "fix_depth": True, "priority": -3}
    client.completions.create(model=MODEL, prompt=PROMPT, extra_body=more)
    spec = submitted(service)
    assert (spec.depth, spec.is_depth_fixed, spec.priority) == (2, True, -3)


def test_a_completion_stops_at_16_tokens_and_a_chat_where_the_model_does(
    service: FakeService, client: openai.OpenAI
) -> None:
    done = client.completions.create(model=MODEL, prompt=PROMPT)
    assert done.usage is not None and done.usage.completion_tokens == 16
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert whole.usage is not None and whole.usage.total_tokens == 512
    assert whole.choices[0].finish_reason == "length"


def test_the_conversation_is_templated_as_grpc_does_it(
    service: FakeService, client: openai.OpenAI
) -> None:
    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    by_http = submitted(service).prompt_ids
    service.client.chat(MESSAGES, max_tokens=1)
    assert by_http == submitted(service).prompt_ids
    more = {"add_generation_prompt": False}
    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=more)
    assert len(submitted(service).prompt_ids) < len(by_http)


# -- prompts ----------------------------------------------------------------------------------


def test_a_prompt_is_text_or_token_ids(service: FakeService, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Hello world", max_tokens=1)
    assert list(submitted(service).prompt_ids) == tokenizer().encode("Hello world")
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert list(submitted(service).prompt_ids) == PROMPT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["one", "two two", "three"], [[10], [11, 12], [13]]])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    client: openai.OpenAI, prompts: Any, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5, "seed": 3, "n": 2}
    alone = [
        choice.text
        for prompt in prompts
        for choice in client.completions.create(prompt=prompt, **asked).choices
    ]
    done: Any = client.completions.create(prompt=prompts, stream=stream, **asked)
    texts = [""] * 6
    for part in done if stream else [done]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == alone


def test_usage_counts_every_prompt_once_and_every_text(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=[[10, 11], [12]], n=2, max_tokens=3)
    usage = done.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 12, 15)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
