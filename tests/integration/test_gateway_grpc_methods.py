"""Every method of the gRPC services but the streams of `Generate`: what they answer and refuse."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import (
    EOS,
    MODEL,
    VOCAB_SIZE,
    FakeService,
    fake_facts,
    fake_service,
    tokenizer,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waits import wait_until

from outrider.api_types.convert import logprobs_from_proto
from outrider.api_types.results import Completion
from outrider.client import AsyncClient, Client, prompt_request
from outrider.errors import OutriderError, RequestError
from outrider.gateway.grpc.control import ControlServicer
from outrider.gateway.grpc.generation import GenerationServicer
from outrider.gateway.grpc.server import CONTROL, GENERATION
from outrider.proto import (
    control_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from outrider.text.tokenizer import of_transformers

SERVICES = {
    GenerationServicer: generation_pb2.DESCRIPTOR.services_by_name["Generation"],
    ControlServicer: control_pb2.DESCRIPTOR.services_by_name["Control"],
}
METHODS = [
    (f"/{service.full_name}/{name}", method.server_streaming)
    for servicer, service in SERVICES.items()
    for name, method in service.methods_by_name.items()
    if hasattr(servicer, name)
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    folder: Path = tmp_path_factory.mktemp("engine")
    with fake_service(folder) as running:
        yield running


@pytest.fixture(scope="module")
def channel(service: FakeService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        yield channel


@pytest.mark.parametrize(
    ("method", "is_stream"), [*METHODS, ("/grpc.health.v1.Health/Check", False)]
)
def test_bytes_that_are_no_request_are_refused_as_such(
    channel: grpc.Channel, method: str, is_stream: bool
) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        if is_stream:
            list(channel.unary_stream(method)(b"\xff\xff\xff", timeout=10))
        else:
            channel.unary_unary(method)(b"\xff\xff\xff", timeout=10)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the request cannot be read; send a " in failure.value.details()


# -- whole answers ----------------------------------------------------------------------------

Request = generation_pb2.GenerateRequest


def _stub(channel: grpc.Channel) -> Any:
    return generation_pb2_grpc.GenerationStub(channel)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "logprobs": 2, "prompt_logprobs": 1, "want_text_spans": True},
        {"stop": ["a"], "max_tokens": 60},
    ],
)
def test_a_whole_answer_is_what_the_stream_adds_up_to(
    channel: grpc.Channel, options: dict[str, Any]
) -> None:
    request = prompt_request("Hello there", **{"seed": 3, "max_tokens": 12} | options)
    streamed = Completion()
    for response in _stub(channel).Generate(request, timeout=20):
        streamed.take(response)
    once = _stub(channel).GenerateOnce(request, timeout=20)
    whole = Completion()
    for sample in once.samples:
        assert sample.HasField("end")
        whole.take(sample)
    assert [each.index for each in once.samples] == list(range(options.get("n", 1)))
    assert whole.samples == streamed.samples
    assert logprobs_from_proto(once.prompt_logprobs) == streamed.prompt_logprobs
    assert (once.start.seed, once.start.model) == (3, streamed.model)
    assert once.summary.usage.completion_tokens == streamed.usage.completion_tokens > 0
    assert sum(span.num_chars for each in once.samples for span in each.text_spans) == (
        sum(len(each.text) for each in streamed.samples) if options.get("want_text_spans") else 0
    )


def test_a_whole_answer_that_nobody_waits_for_is_cancelled(
    service: FakeService, channel: grpc.Channel
) -> None:
    service.engine.is_paused = True
    try:
        call = _stub(channel).GenerateOnce.future(prompt_request("a", max_tokens=9), timeout=20)
        wait_until(lambda: len(service.engine.running) == 1)
        call.cancel()
        wait_until(lambda: not service.engine.running)
    finally:
        service.engine.is_paused = False


# -- what a status says to programs -----------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(text="a", sampling={"temperature": -1.0}), "temperature"),
        (Request(text="a", sampling={"logit_bias": {3: 500.0}}), "logit_bias[3]"),
        (Request(text="a", sampling={"min_tokens": 9, "max_tokens": 3}), "min_tokens"),
        (Request(text="a", request_id="a b"), "request_id"),
        (Request(text="a", model="other"), "model"),
        (
            Request(chat={"messages": [{"role": "user", "content": "a"}, {"role": "x"}]}),
            "messages[1].role",
        ),
        (Request(text=""), None),
    ],
)
def test_the_field_at_fault_is_in_the_metadata(
    channel: grpc.Channel, request_: Request, field: str | None
) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        _stub(channel).GenerateOnce(request_, timeout=10)
    told = dict(failure.value.trailing_metadata())
    assert told.get("outrider-error-field") == field, failure.value.details()
    assert "outrider-retry-after-s" not in told


def test_what_may_be_tried_again_says_when(tmp_path: Path) -> None:
    with (
        fake_service(tmp_path, server={"max_requests": 1}, is_paused=True) as service,
        grpc.insecure_channel(service.server.grpc_address) as channel,
    ):
        first = _stub(channel).Generate(prompt_request("a"), timeout=10)
        wait_until(lambda: len(service.engine.running) == 1)
        with pytest.raises(grpc.RpcError) as failure:
            _stub(channel).GenerateOnce(prompt_request("a"), timeout=10)
        first.cancel()
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert float(dict(failure.value.trailing_metadata())["outrider-retry-after-s"]) > 0


# -- tokens -----------------------------------------------------------------------------------


def test_text_and_tokens_are_turned_into_each_other(service: FakeService) -> None:
    client, text = service.client, "Hello, wörld <|im_end|>"
    ids = client.tokenize(text)
    assert ids == tokenizer().encode(text)
    assert client.detokenize(ids) == text
    assert client.detokenize(ids, skip_special_tokens=True) == "Hello, wörld "
    assert client.tokenize("", add_special_tokens=False) == []


def test_a_conversation_is_tokenised_as_a_request_would_read_it(service: FakeService) -> None:
    chat: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
        {"role": "assistant", "content": None},
    ]
    service.client.chat(chat, max_tokens=2)
    sent = list(service.engine.submitted[-1].spec.prompt_ids)
    assert service.client.tokenize(chat) == sent
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
    ]
    for is_asked in (True, False):
        read = service.client.tokenize(chat, add_generation_prompt=is_asked)
        assert read == of_transformers(tokenizer()).apply_chat_template(
            plain, add_generation_prompt=is_asked, return_dict=False
        )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda client: client.tokenize("a b " * 20_000), "at least .* tokens"),
        (lambda client: client.tokenize([]), "the conversation is empty"),
        (lambda client: client.tokenize("a", mood=1), "unknown option 'mood'"),
        (lambda client: client.detokenize([49152]), "token_ids holds 49152; token ids must be"),
        (lambda client: client.detokenize([1] * 513), "token_ids has 513 entries; it may have 512"),
        (lambda client: client.detokenize([-1]), "must be a list of token ids >= 0"),
        (
            lambda client: client.chat([{"role": "user", "content": [{"type": "image_url"}]}]),
            r"messages\[0\]\.content\[0\] is a part of type 'image_url'",
        ),
        (lambda client: client.chat("hi"), "messages is 'hi'; it must be a list of"),
        (
            lambda client: client.chat([{"role": "user", "content": "a", "tool_calls": [1]}]),
            r"messages\[0\] has 'tool_calls'",
        ),
        (
            lambda client: client.chat(
                [{"role": "user", "content": "a"}], chat_template_kwargs={"tools": []}
            ),
            "chat_template_kwargs names 'tools'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    service: FakeService, call: Any, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        call(service.client)


def test_parts_of_messages_that_hold_no_text_are_refused(channel: grpc.Channel) -> None:
    for message, problem in (
        ({"role": "user", "parts": [{"text": "a"}, {}]}, "messages[0].parts[1] holds no text"),
        ({"role": "user", "parts": [{"text": "a"}], "content": "b"}, "both content and parts"),
    ):
        with pytest.raises(grpc.RpcError) as failure:
            _stub(channel).GenerateOnce(Request(chat={"messages": [message]}), timeout=10)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert problem in failure.value.details()


def test_the_servers_template_takes_the_place_of_the_models(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% if loud %}!{% endif %}{{ messages[0]['content'] }}")
    with fake_service(tmp_path, server={"chat_template": str(path)}) as service:
        service.client.chat(
            [{"role": "user", "content": "hi"}], max_tokens=1, chat_template_kwargs={"loud": True}
        )
        assert list(service.engine.submitted[-1].spec.prompt_ids) == tokenizer().encode("!hi")
        assert service.client.model_info().has_chat_template


# -- what is told of the server ---------------------------------------------------------------


def test_the_models_defaults_hold_unless_a_request_says_otherwise(tmp_path: Path) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    facts = dataclasses.replace(fake_facts(), sampling_defaults=defaults)
    with fake_service(tmp_path, facts=facts) as service:
        assert service.client.model_info().sampling_defaults == defaults
        service.client.generate("a", top_k=3)
        params = service.engine.submitted[-1].spec.params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 3, 5)
    with fake_service(tmp_path, facts=facts, server={"generation_config": "none"}) as service:
        assert service.client.model_info().sampling_defaults == {}
        service.client.generate("a")
        params = service.engine.submitted[-1].spec.params
        assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 0, 16)
        service.client.chat([{"role": "user", "content": "a"}], seed=1)
        assert service.engine.submitted[-1].spec.max_len == facts.max_model_len


def test_model_and_server_tell_what_they_are(tmp_path: Path) -> None:
    options = {"model_names": ("small", "tiny"), "api_key": "k", "max_requests": 7}
    with fake_service(tmp_path, server=options) as service:
        with pytest.raises(OutriderError, match="no API key was sent"):
            service.client.model_info()
        with Client(service.server.grpc_address, api_key="k") as client:
            info, model = client.server_info(), client.model_info()
    assert (info.needs_key, info.max_requests, info.processes) == (True, 7, 1)
    assert (model.names, model.checkpoint) == (("small", "tiny"), MODEL)
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (512, VOCAB_SIZE, (EOS,))


def test_health_says_which_services_go_on_while_draining(tmp_path: Path) -> None:
    with (
        fake_service(tmp_path) as service,
        grpc.insecure_channel(service.server.grpc_address) as channel,
    ):
        gateway, stub = service.server.gateway, health_pb2_grpc.HealthStub(channel)
        assert gateway._watching is not None
        loop = gateway._watching.get_loop()
        for expected in ([1, 1, 1], [2, 2, 1]):  # SERVING and NOT_SERVING
            told = [
                stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status
                for name in ("", GENERATION, CONTROL)
            ]
            assert told == expected
            asyncio.run_coroutine_threadsafe(gateway.drain(), loop).result(60)


def test_the_asynchronous_client_asks_the_same(service: FakeService) -> None:
    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(service.server.grpc_address) as client:
            ids = await client.tokenize("a b")
            text = await client.detokenize(ids)
            return ids, text, await client.model_info(), await client.server_info()

    client = service.client
    ids = client.tokenize("a b")
    assert asyncio.run(ask()) == (ids, "a b", client.model_info(), client.server_info())
