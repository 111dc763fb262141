"""What a server refuses: every code with its sentence, on the wire and in the client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import (
    FakeEngine,
    FakeService,
    fake_service,
    running_server,
    tokenizer,
)
from waits import wait_until

from outrider.api_types.convert import params_from_request
from outrider.client import Client, RequestIdInUseError, UnavailableError, UnknownModelError
from outrider.errors import CapacityError, OutriderError, RequestError
from outrider.links.gateway_messages import SubmitRefused
from outrider.proto import generation_pb2, generation_pb2_grpc

Request = generation_pb2.GenerateRequest
Sampling = generation_pb2.SamplingParameters
Speculation = generation_pb2.SpeculationParameters
Chat = generation_pb2.Conversation
Ids = generation_pb2.TokenIds


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    options = {"max_body_bytes": 100_000}
    with fake_service(tmp_path_factory.mktemp("gw"), server=options) as running:
        yield running


@pytest.fixture(scope="module")
def generate(service: FakeService) -> Iterator[Any]:
    """A call without the client's own checks; returns code and sentence."""
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        def call(request: Request) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.RpcError) as failure:
                list(stub.Generate(request, timeout=10))
            return failure.value.code(), failure.value.details()

        yield call


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x0a\x7fabc", b"\x52\x02\xff\xfe"])
def test_bytes_that_are_no_request_are_refused_as_such(service: FakeService, data: bytes) -> None:
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        call = channel.unary_stream("/outrider.v1.Generation/Generate")
        with pytest.raises(grpc.RpcError) as failure:
            list(call(data, timeout=10))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.value.details().startswith("the request cannot be read; send a GenerateRequest")


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(), "the request has no prompt; give text, token_ids or chat."),
        (Request(text=""), "the prompt is empty; give at least one token."),
        (
            Request(token_ids=Ids(ids=[1, 49152])),
            "the prompt holds 49152; token ids must be from 0 to 49151.",
        ),
        (
            Request(token_ids=Ids(ids=[1] * 512)),
            "This model's maximum context length is 512 tokens. However, your prompt contains 512 "
            "input tokens; shorten it to 511 tokens or fewer",
        ),
        (Request(chat=Chat()), "the conversation is empty; give at least one message."),
        (
            Request(text="a", sampling=Sampling(temperature=-1)),
            "temperature is -1.0; it must be a number from 0 to 100.",
        ),
        (
            Request(text="a", sampling=Sampling(temperature=float("nan"))),
            "temperature is nan; it must be a number from 0 to 100.",
        ),
        (Request(text="a", sampling=Sampling(top_p=0)), "top_p is 0.0; it must be"),
        (Request(text="a", sampling=Sampling(n=0)), "n is 0; it must be"),
        (
            Request(text="a", priority=-101),
            "priority is -101; it must be a whole number from -100 to 100, lower ones running",
        ),
        (
            Request(text="a", sampling=Sampling(min_tokens=9, max_tokens=3)),
            "min_tokens is 9 but max_tokens is 3",
        ),
        (
            Request(text="a", sampling=Sampling(allowed_token_ids=Ids())),
            "allowed_token_ids is empty; name at least one token or leave it out.",
        ),
        (
            Request(text="a", sampling=Sampling(stop_token_ids=[60000])),
            "stop_token_ids names token 60000; ids must be under 49152.",
        ),
        (Request(text="a", sampling=Sampling(stop=[""])), "stop holds ''"),
        (
            Request(text="a", speculation=Speculation(depth=33)),
            "num_speculative_tokens is 33; it must be a whole number from 0 to 32, or None.",
        ),
        (
            Request(text="a", speculation=Speculation(fix_depth=True)),
            "fix_depth is True but num_speculative_tokens is None; say how many to draft.",
        ),
        (
            Request(text="a", speculation=Speculation(method="tree")),
            "speculation is 'tree', which this engine does not offer; choose 'draft' or 'ngram' "
            "or 'off'.",
        ),
        (Request(text="a", request_id="a/b"), "request_id is 'a/b'; it must be at most 128"),
        (Request(text="a", request_id="a" * 129), "it must be at most 128 letters"),
    ],
)
def test_a_bad_request_is_an_invalid_argument(
    generate: Any, request_: Request, sentence: str
) -> None:
    code, details = generate(request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in details


def test_a_model_that_is_not_served_is_not_found(service: FakeService, generate: Any) -> None:
    code, details = generate(Request(text="a", model="gpt-9"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "'gpt-9'" in details and "'smollm2-135m-draft'" in details
    with pytest.raises(UnknownModelError):
        service.client.generate("a", model="gpt-9")


def test_the_served_model_may_be_named(service: FakeService) -> None:
    done = service.client.generate("a", model="smollm2-135m-draft", max_tokens=2)
    assert done.model == "smollm2-135m-draft"


def test_an_id_in_use_already_exists(service: FakeService, generate: Any) -> None:
    service.engine.is_paused = True
    try:
        with service.client.stream("a", request_id="mine"):
            # On connections of their own either could be the first: the engine says who was.
            wait_until(lambda: len(service.engine.running) > 0)
            code, details = generate(Request(text="a", request_id="mine"))
            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert details == "request_id 'mine' is in use; choose another."
            with pytest.raises(RequestIdInUseError):
                service.client.generate("a", request_id="mine")
    finally:
        service.engine.is_paused = False


def test_an_id_may_be_used_again_when_its_request_has_ended(service: FakeService) -> None:
    for _ in range(3):
        assert service.client.generate("a", request_id="again", max_tokens=2).request_id == "again"


@pytest.mark.parametrize(
    ("is_capacity", "code", "kind"),
    [
        (True, grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityError),
        (False, grpc.StatusCode.INVALID_ARGUMENT, RequestError),
    ],
)
def test_a_refusal_reaches_the_client_in_the_words_of_the_engine(
    service: FakeService,
    generate: Any,
    is_capacity: bool,
    code: grpc.StatusCode,
    kind: type[OutriderError],
) -> None:
    service.engine.refuse = lambda submit: SubmitRefused(
        submit.samples[0].handle, "the request 'r1~5' is too much.", is_capacity
    )
    try:
        assert generate(Request(text="a", request_id="r1")) == (
            code,
            "the request 'r1~5' is too much.",
        )
        with pytest.raises(kind, match="too much"):
            service.client.generate("a")
    finally:
        service.engine.refuse = lambda submit: None


def test_a_request_that_is_too_large_is_refused_unread(service: FakeService) -> None:
    with pytest.raises(CapacityError, match="larger than max"):
        service.client.generate("a " * 60_000)


@pytest.mark.parametrize("model", ["x" * 30_000, "é" * 30_000, "🙂" * 10_000])
def test_a_long_sentence_is_shortened_so_that_it_arrives(generate: Any, model: str) -> None:
    code, details = generate(Request(text="a", model=model))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.startswith("model is 'x" if model[0] == "x" else "model is '")
    assert details.endswith("or leave it out.") and len(details) < 600


def test_a_large_request_is_read_off_the_event_loop(
    service: FakeService, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []

    def note(request: Request) -> Any:
        readers.append(threading.current_thread().name)
        return params_from_request(request)

    monkeypatch.setattr("outrider.gateway.grpc.generation.params_from_request", note)
    code, details = generate(Request(token_ids=Ids(ids=[1] * 90_000)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "your prompt contains 90000 input tokens;" in details
    service.client.generate("a", max_tokens=1)
    assert [name.startswith("outrider-prepare") for name in readers] == [True, False]


def test_more_messages_than_a_conversation_has_are_refused(generate: Any) -> None:
    chat = Chat(messages=[generation_pb2.ChatMessage()] * 10_001)
    code, details = generate(Request(chat=chat))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "the conversation has 10001 messages; it may have 10000" in details


def test_text_that_is_not_utf_8_harms_nobody(service: FakeService) -> None:
    broken = Request(text="aaaa").SerializeToString().replace(b"aaaa", b"\xff\xfe\xfd\xfc")
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        call = channel.unary_stream("/outrider.v1.Generation/Generate")
        with pytest.raises(grpc.RpcError):
            list(call(broken, timeout=10))
    assert len(service.client.generate("a", max_tokens=2).samples[0].token_ids) == 2
    assert service.client.status().active_requests == 0


@pytest.mark.parametrize("given", [{"prompt": "a\ud800"}, {"prompt": "a", "stop": ["\ud800"]}])
def test_half_a_character_is_refused_by_the_client(service: FakeService, given: Any) -> None:
    with pytest.raises(RequestError, match="half a character"):
        service.client.generate(**given)


def _templated(template: str) -> Request:
    user = generation_pb2.ChatMessage(role="user", content="a")
    return Request(chat=Chat(messages=[user], template=template))


def test_a_clients_template_is_refused_unless_the_server_allows_it(generate: Any) -> None:
    code, details = generate(_templated("{{ messages[0]['content'] }}"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "server.allow_client_templates" in details


@pytest.mark.thorough
def test_an_allowed_template_runs_within_limits_and_holds_up_nobody(tmp_path: Path) -> None:
    options = {"allow_client_templates": True}
    with (
        fake_service(tmp_path, server=options) as service,
        grpc.insecure_channel(service.server.grpc_address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        endless = [stub.Generate(_templated(loop), timeout=60) for _ in range(2)]
        assert len(service.client.generate("a", max_tokens=3).samples[0].token_ids) == 3
        for call in endless:
            with pytest.raises(grpc.RpcError) as failure:
                list(call)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "it ran for more than 2 s" in failure.value.details()
        with pytest.raises(grpc.RpcError, match="no users here"):
            list(stub.Generate(_templated("{{ raise_exception('no users here') }}"), timeout=60))
        with pytest.raises(grpc.RpcError, match="refuses the conversation"):
            list(stub.Generate(_templated("{{ raise_exception('\\ud800') }}"), timeout=60))
        list(stub.Generate(_templated("<{{ messages[0]['content'] }}>"), timeout=60))
        assert list(service.engine.submitted[-1].spec.prompt_ids) == tokenizer().encode("<a>")


def test_a_defect_is_internal_and_its_traceback_is_in_the_log(
    service: FakeService, generate: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("outrider.text.input_processor.InputProcessor.prepare", fail)
    with caplog.at_level(logging.ERROR, "outrider.gateway.grpc.calls"):
        code, details = generate(Request(text="a"))
    assert code is grpc.StatusCode.INTERNAL
    assert details == "the server failed in a way it should not; its log has the details."
    assert "planted" in caplog.text


# -- no engine --------------------------------------------------------------------------------


def test_before_there_is_an_engine_requests_are_refused_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine) as server, Client(server.grpc_address) as client:
        with pytest.raises(UnavailableError, match="the engine is starting; try again"):
            client.generate("a")
        status = client.status()
        assert (status.state, status.model, status.settings, status.engine) == (
            "starting",
            "",
            None,
            None,
        )
        with pytest.raises(UnavailableError, match=r"not ready within 0\.2 s"):
            client.wait_ready(0.2)


def test_an_engine_with_another_secret_is_no_engine(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock", secret="something else").start()
    try:
        with running_server(engine) as server, Client(server.grpc_address) as client:
            with pytest.raises(UnavailableError):
                client.wait_ready(0.3)
            assert client.status().state == "starting"
    finally:
        engine.stop()


def test_a_server_that_is_not_there_is_told_in_one_sentence() -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(UnavailableError) as refused:
        client.generate("a")
    assert str(refused.value) == (
        "the server at 127.0.0.1:9 cannot be reached; start one with 'outrider serve' "
        "or give its address."
    )
