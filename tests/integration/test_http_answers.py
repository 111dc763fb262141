"""What comes back to the real `openai` client: texts, streamed and whole, and more beside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import EOS, MODEL, FakeService, fake_service, tokenizer
from http_tools import openai_client, send
from waits import wait_until

from outrider.gateway.http import answers

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


# -- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"stop": ["e"]},
        {"echo": True},
        {"skip_special_tokens": False, "temperature": 0.5},
        {"stop_token_ids": [10], "include_stop_str_in_output": True},
    ],
)
def test_streamed_whole_and_grpc_texts_are_the_same(
    service: FakeService, client: openai.OpenAI, more: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "seed": 11} | more
    whole = client.completions.create(model=MODEL, prompt="A tale", extra_body=asked)
    texts = [""] * len(whole.choices)
    reasons: list[Any] = [None] * len(texts)
    for chunk in client.completions.create(
        model=MODEL, prompt="A tale", stream=True, extra_body=asked
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    by_grpc = service.client.generate("A tale", **asked)
    assert texts == [choice.text for choice in whole.choices]
    assert texts == [sample.text for sample in by_grpc.samples]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert reasons == [sample.finish_reason for sample in by_grpc.samples]


def test_a_streamed_chat_begins_with_the_role_and_ends_with_a_reason(
    client: openai.OpenAI,
) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=6, seed=5, stream=True
        )
    )
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, seed=5)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].delta.role for each in chunks[1:]] == [None] * (len(chunks) - 1)
    text = "".join(each.choices[0].delta.content or "" for each in chunks)
    assert text == whole.choices[0].message.content
    reasons = [each.choices[0].finish_reason for each in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {each.id for each in chunks} == {chunks[0].id}
    assert chunks[0].id.startswith("chatcmpl-") and chunks[0].id != whole.id
    assert whole.system_fingerprint == chunks[0].system_fingerprint
    assert (whole.model, whole.object, chunks[0].object) == (
        MODEL,
        "chat.completion",
        "chat.completion.chunk",
    )


def test_usage_comes_in_a_chunk_of_its_own_if_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "stream": True}
    *others, last = client.completions.create(stream_options={"include_usage": True}, **asked)
    assert last.choices == [] and all(each.choices and not each.usage for each in others)
    assert last.usage is not None and last.usage.completion_tokens == 6
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 1
    extra: Any = last.model_extra
    assert extra["speculation_stats"]["rounds"] > 0
    assert all(each.choices for each in client.completions.create(**asked))


def test_usage_comes_in_every_chunk_if_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, stream=True, stream_options=options
    )
    counts = [each.usage.completion_tokens for each in chunks if each.usage is not None]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 6


def test_the_end_says_what_ended_the_text(tmp_path: Any) -> None:
    with (
        fake_service(tmp_path, script=lambda seed, position: EOS if position == 6 else 2000) as own,
        openai_client(own) as client,
    ):
        done: Any = client.completions.create(model=MODEL, prompt=PROMPT)
        assert (done.choices[0].finish_reason, done.choices[0].stop_reason) == ("stop", EOS)
        halted: Any = client.completions.create(
            model=MODEL, prompt=PROMPT, stop=tokenizer().decode([2000])
        )
        assert halted.choices[0].stop_reason == tokenizer().decode([2000])


# -- log-probabilities ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_log_probabilities_have_openais_shape(client: openai.OpenAI, stream: bool) -> None:
    done: Any = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, stream=stream
    )
    content = [
        entry
        for part in (done if stream else [done])
        for entry in (part.choices[0].logprobs.content if part.choices[0].logprobs else [])
    ]
    assert len(content) == 4
    for entry in content:
        assert entry.logprob == -1.5 and entry.bytes == list(entry.token.encode())
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.0]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_log_probabilities_have_openais_shape(
    client: openai.OpenAI, stream: bool
) -> None:
    done: Any = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, seed=2, logprobs=2, echo=True, stream=stream
    )
    parts = [part.choices[0] for part in (done if stream else [done])]
    text = "".join(part.text for part in parts)
    tokens = [token for part in parts for token in part.logprobs.tokens]
    own = [each for part in parts for each in part.logprobs.token_logprobs]
    tops = [each for part in parts for each in part.logprobs.top_logprobs]
    offsets = [each for part in parts for each in part.logprobs.text_offset]
    assert "".join(tokens) == text
    assert own == [None] + [-1.5] * 7
    assert tops[0] is None and all(len(each) == 3 for each in tops[1:])
    assert offsets == [sum(map(len, tokens[:end])) for end in range(8)]


def test_every_sample_of_an_echo_has_the_log_probabilities_of_the_prompt(
    client: openai.OpenAI,
) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "logprobs": 1, "echo": True}
    done: Any = client.completions.create(n=3, **asked)
    assert [len(choice.logprobs.tokens) for choice in done.choices] == [6, 6, 6]


def test_prompt_log_probabilities_come_as_vllm_tells_them(
    service: FakeService, client: openai.OpenAI
) -> None:
    more = {"prompt_logprobs": 1, "max_tokens": 2}
    whole: Any = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=more)
    told = whole.choices[0].prompt_logprobs
    assert told[0] is None and len(told) == 4
    assert told[1]["11"] == {
        "logprob": -1.5,
        "rank": 3,
        "decoded_token": tokenizer().decode([11]),
    }
    chat = {"messages": MESSAGES, **more}
    whole_chat = send(service, "/v1/chat/completions", chat).json["prompt_logprobs"]
    events = send(service, "/v1/chat/completions", chat | {"stream": True}).events
    streamed = [each for event in events for each in event.get("prompt_logprobs", [])]
    assert whole_chat == streamed and len(streamed) > 10


def test_tokens_are_named_by_their_ids_if_asked_for(client: openai.OpenAI) -> None:
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    done: Any = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, logprobs=0, extra_body=more
    )
    choice = done.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]


# -- what else is told ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_if_asked_for(
    service: FakeService, client: openai.OpenAI, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5, "seed": 4, "stream": stream}
    more: Any = {"return_token_ids": True}
    done: Any = client.completions.create(prompt=PROMPT, extra_body=more, **asked)
    choices = [part.choices[0] for part in (done if stream else [done])]
    assert choices[0].prompt_token_ids == PROMPT
    by_grpc = service.client.generate(PROMPT, max_tokens=5, seed=4)
    told = [token for choice in choices for token in choice.token_ids]
    assert told == by_grpc.samples[0].token_ids
    chat: Any = client.chat.completions.create(messages=MESSAGES, extra_body=more, **asked)
    first = next(iter(chat)) if stream else chat
    assert tuple(first.prompt_token_ids) == submitted(service).prompt_ids


@pytest.mark.parametrize("stream", [False, True])
def test_every_piece_of_text_says_whose_it_is(service: FakeService, stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 9, "num_speculative_tokens": 1}
    more = {"return_speculation": True, "stream": stream}
    reply = send(service, "/v1/chat/completions", body | more)
    answers = reply.events[1:] if stream else [reply.json]
    told = [answer["choices"][0]["speculation"] for answer in answers]
    pieces = [piece for each in told for piece in each["pieces"]]
    rounds = [each for one in told for each in one["rounds"]]
    plain = send(service, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert "".join(piece["text"] for piece in pieces) == plain
    assert sum(each["tokens"] for each in rounds) == 12
    assert [piece["round"] for piece in pieces] == sorted(piece["round"] for piece in pieces)
    assert pieces[-1]["round"] == len(rounds) - 1
    for piece in pieces:
        judged = rounds[piece["round"]]
        all_accepted = judged["accepted"] == judged["verified"]
        own = ("bonus" if all_accepted else "recovered") if judged["verified"] else "target"
        assert piece["origin"] in ("draft", own)
    assert {piece["origin"] for piece in pieces} >= {"draft", "bonus", "recovered"}
    assert answers[-1]["speculation_stats"]["rounds"] == len(rounds)
    assert all("speculation_stats" not in answer for answer in answers[:-1])


def test_pieces_of_other_proposers_and_of_none_are_called_so(service: FakeService) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "return_speculation": True}
    origins = {}
    for method in ("ngram", "off"):
        reply = send(service, "/v1/completions", body | {"speculation": method})
        pieces = reply.json["choices"][0]["speculation"]["pieces"]
        origins[method] = {piece["origin"] for piece in pieces}
    assert "ngram" in origins["ngram"] and "draft" not in origins["ngram"]
    assert origins["off"] == {"target"}


def test_statistics_have_vllms_names_and_meanings(service: FakeService) -> None:
    stats = send(service, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12}).json[
        "speculation_stats"
    ]
    drafts, accepted = stats["verified_per_position"][0], stats["accepted_tokens"]
    assert stats["mean_acceptance_length"] == 1 + accepted / drafts
    assert stats["draft_acceptance_rate"] == accepted / stats["drafted_tokens"]
    assert stats["acceptance_rate_per_position"] == [
        each / drafts for each in stats["accepted_per_position"]
    ]
    histogram = {int(number): count for number, count in stats["acceptance_histogram"].items()}
    assert sum(histogram.values()) == drafts
    assert sum(number * count for number, count in histogram.items()) == accepted
    assert stats["rounds"] + accepted == 12
    assert 0 < stats["time_to_first_token_s"] <= stats["total_s"]
    assert stats["resubmissions"] == 0
    plain = {"prompt": PROMPT, "speculation": "off"}
    stats = send(service, "/v1/completions", plain).json["speculation_stats"]
    assert (stats["mean_acceptance_length"], stats["draft_acceptance_rate"]) == (1.0, 0.0)


# -- many at once -----------------------------------------------------------------------------


def test_64_clients_at_once_get_each_their_own_text(service: FakeService) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream: Any = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        address = f"http://{service.server.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="x", timeout=20) as client:
            return await asyncio.gather(*(ask(client, seed % 32) for seed in range(64)))

    texts = asyncio.run(ask_all())
    assert texts[:32] == texts[32:]
    assert len(set(texts)) == 32
    wait_until(lambda: len(service.server.gateway.active_requests) == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_with_many_log_probabilities_is_written_off_the_event_loop(
    service: FakeService, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing it takes seconds, in which every other stream would stand still."""
    is_chat = "chat" in path
    asked: dict[str, Any] = {"seed": 7, "n": 2, "max_tokens": 9, "return_token_ids": True}
    asked |= {"messages": MESSAGES} if is_chat else {"prompt": PROMPT, "echo": True}
    asked |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    inline = send(service, path, asked | {"prompt_logprobs": 2}).json
    written_by: list[str] = []
    written = answers.CompleteResponse._serialized

    def noticed(*args: Any) -> bytes:
        written_by.append(threading.current_thread().name)
        return written(*args)

    monkeypatch.setattr(answers, "MAX_INLINE_POSITIONS", 0)
    monkeypatch.setattr(answers.CompleteResponse, "_serialized", noticed)
    elsewhere = send(service, path, asked | {"prompt_logprobs": 2}).json
    assert len(written_by) == 1 and written_by[0].startswith("asyncio_")
    assert elsewhere["choices"] == inline["choices"]
    assert elsewhere["usage"] == inline["usage"]
    assert elsewhere.get("prompt_logprobs") == inline.get("prompt_logprobs")
