"""What clients and tools made for OpenAI's or vLLM's servers rely on beside the texts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import MODEL, FakeService, fake_facts, fake_service
from http_tools import Reply, openai_client, send

from outrider.gateway.http.fields import WARNING

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
MAX_LEN = 512
WORDS = f"This model's maximum context length is {MAX_LEN} tokens. However, "


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("compat")) as running:
        yield running


# -- a prompt that does not fit ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    [
        (COMPLETIONS, {"prompt": [10] * 600}, "your prompt contains 600 input tokens;", "prompt"),
        (COMPLETIONS, {"prompt": "\n word" * 5000}, "your prompt contains 30000 char", "prompt"),
        (COMPLETIONS, {"prompt": "a b " * 700}, "your prompt contains ", "prompt"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a b " * 700}]},
            "your prompt contains ",
            "messages",
        ),
        (
            COMPLETIONS,
            {"prompt": [10] * 500, "max_tokens": 13},
            "you requested 13 output tokens and your prompt contains 500 input tokens, for a total "
            "of 513 tokens; shorten the prompt, or lower max_tokens to 12 or leave it out.",
            "prompt",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "max_completion_tokens": 512},
            "you requested 512 output tokens and your prompt contains ",
            "messages",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_context_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    service: FakeService, path: str, body: dict[str, Any], words: str, param: str, stream: bool
) -> None:
    reply = send(service, path, body | {"stream": stream})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", param)
    assert reply.error["message"].startswith(WORDS + words)


def test_what_just_fits_is_answered(service: FakeService) -> None:
    body = {"prompt": [10] * 500, "max_tokens": 12, "ignore_eos": True}
    assert send(service, COMPLETIONS, body).json["usage"]["completion_tokens"] == 12
    rest = send(service, CHAT, {"messages": MESSAGES, "ignore_eos": True}).json
    assert rest["usage"]["total_tokens"] == MAX_LEN
    default = send(service, COMPLETIONS, {"prompt": [10] * 500, "ignore_eos": True}).json
    assert default["usage"]["completion_tokens"] == 12  # rather than the 16 it did not ask for


def test_openais_client_has_the_code_of_a_context_that_is_too_long(service: FakeService) -> None:
    with openai_client(service) as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[10] * 600)
    assert caught.value.code == "context_length_exceeded"


# -- fields -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})]
)
def test_an_unknown_field_is_ignored_with_a_warning(
    service: FakeService, path: str, body: dict[str, Any], stream: bool
) -> None:
    asked = body | {"stream": stream, "max_tokens": 2}
    assert WARNING not in send(service, path, asked).headers
    reply = send(service, path, asked | {"temprature": 0.5, "a\r\nX-Other: b": 1})
    assert reply.status == 200
    assert reply.headers[WARNING] == (
        "ignored unknown fields: 'temprature' (did you mean 'temperature'?), 'a\\r\\nX-Other: b'"
    )
    assert "X-Other" not in reply.headers


def test_a_large_body_with_unknown_fields_is_warned_of_in_few_words(service: FakeService) -> None:
    names = {f"{'ü' * 500}{number}": number for number in range(300)}
    reply = send(service, COMPLETIONS, {"prompt": "a", "max_tokens": 1} | names)
    assert reply.status == 200
    assert reply.headers[WARNING].endswith("and 297 more")
    assert len(reply.headers[WARNING]) < 300


def test_an_unknown_field_is_refused_where_the_server_says_so(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"unknown_fields": "refuse"}) as own:
        known = {"prompt": "a", "max_tokens": 1, "user": "me", "verbosity": "low", "tools": []}
        assert send(own, COMPLETIONS, known).status == 200
        reply = send(own, COMPLETIONS, known | {"temprature": 0.5})
        assert (reply.status, reply.error["param"]) == (400, "temprature")
        assert reply.error["message"] == (
            "'temprature' is no field of this request (did you mean 'temperature'?); leave it out, "
            "or have the server set server.unknown_fields to warn."
        )
        assert not own.engine.submitted[1:]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"verbosity": "low"},
        {"verbosity": "high"},
    ],
)
def test_tools_that_are_turned_off_and_verbosity_change_nothing(
    service: FakeService, more: dict[str, Any]
) -> None:
    reply = send(service, CHAT, {"messages": MESSAGES, "max_tokens": 2, "seed": 1} | more)
    plain = send(service, CHAT, {"messages": MESSAGES, "max_tokens": 2, "seed": 1})
    assert reply.json["choices"] == plain.json["choices"]
    assert WARNING not in reply.headers


@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_tools_are_refused_with_how_to_turn_them_off(
    service: FakeService, choice: str | None
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "tools": TOOLS, "tool_choice": choice}
    reply = send(service, CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert reply.error["message"].endswith('leave the field out or set tool_choice to "none".')


# -- names ------------------------------------------------------------------------------------


def test_a_folder_is_served_under_its_path_and_its_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "my-model"
    shutil.copytree(str(files("outrider") / "assets" / MODEL), folder)
    facts = fake_facts()
    facts.settings["target.model"] = str(folder)
    with fake_service(tmp_path, facts=facts) as own, openai_client(own) as client:
        assert [each.id for each in client.models.list()] == [str(folder), "my-model"]
        for name in (str(folder), "my-model"):
            done = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert done.model == str(folder)
            found: Any = client.models.retrieve(name)
            assert found.root == str(folder)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="models/my-model", prompt="a")


def test_a_bundled_model_has_one_name(service: FakeService) -> None:
    (found,) = send(service, "/v1/models", method="GET").json["data"]
    assert found["id"] == found["root"] == MODEL


# -- metrics of a request, as AIPerf reads them -----------------------------------------------

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _speculative(reply: Reply, *, stream: bool) -> dict[str, Any]:
    """What AIPerf finds: of a stream, exactly one event may have it, and that with the usage."""
    answers = reply.events if stream else [reply.json]
    found = [each for each in answers if each.get("metrics")]
    assert found == answers[-1:] and found[0]["usage"]
    metrics: dict[str, Any] = found[0]["metrics"]["speculative_decoding"]
    return metrics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})]
)
@pytest.mark.parametrize("depth", [None, 1, 5])
def test_an_answer_has_vllms_metrics_of_speculation(
    service: FakeService, path: str, body: dict[str, Any], stream: bool, depth: int | None
) -> None:
    asked = body | {"max_tokens": 40, "num_speculative_tokens": depth, "ignore_eos": True}
    found = _speculative(send(service, path, asked | (STREAMED if stream else {})), stream=stream)
    histogram, most = found["acceptance_histogram"], depth or fake_facts().depth
    assert (found["num_spec_tokens"], len(histogram)) == (most, most + 1)
    accepted = sum(number * count for number, count in enumerate(histogram))
    assert 0 < found["num_accepted_draft_tokens"] == accepted <= found["num_draft_tokens"]
    assert 0 < found["num_spec_steps"] == sum(histogram)
    assert found["mean_acceptance_length"] == 1 + accepted / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    assert all(type(count) is int for count in histogram)


@pytest.mark.parametrize("more", [{"n": 2}, {"speculation": "off"}, {"prompt": ["a", "b"]}])
def test_several_texts_and_those_without_a_proposer_have_no_metrics_of_speculation(
    service: FakeService, more: dict[str, Any]
) -> None:
    asked = {"prompt": "a", "max_tokens": 4} | more
    assert send(service, COMPLETIONS, asked).json["metrics"] is None
    assert all(
        "metrics" not in each for each in send(service, COMPLETIONS, asked | STREAMED).events
    )


def test_a_text_too_short_for_a_draft_has_metrics_of_no_step(service: FakeService) -> None:
    found = _speculative(send(service, COMPLETIONS, {"prompt": "a", "max_tokens": 1}), stream=False)
    assert found["acceptance_histogram"] == [0] * (fake_facts().depth + 1)
    assert (found["num_spec_steps"], found["mean_acceptance_length"]) == (0, 1.0)
