"""Calls are charged before anything of their bodies is read, over both protocols."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest
from fake_engine import FakeService, fake_service, tokenizer
from fastapi.routing import APIRoute
from http_tools import TIMEOUT_S, send
from waits import wait_until

from outrider.client import Client
from outrider.errors import CapacityError, RequestError
from outrider.gateway.auth.keys_file import key_digest
from outrider.gateway.http.access import CHARGED_PATHS
from outrider.gateway.http.app import ROUTERS
from outrider.gateway.upload_budget import SMALL_BYTES, UploadBudget
from outrider.text.messages import Conversation

MIB = 2**20
KEYS = {
    "free": "",
    "slow": ", requests_per_minute: 1",
    "slower": ", requests_per_minute: 1",
    "tokens": ", requests_per_minute: 2",
    "grpc": ", requests_per_minute: 2",
    "few": ", max_concurrent: 2",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    folder = tmp_path_factory.mktemp("charges")
    entries = [
        f"  - {{name: {name}, sha256: '{key_digest(name + '-key').hex()}'{rest}}}\n"
        for name, rest in KEYS.items()
    ]
    (folder / "keys.yaml").write_text("keys:\n" + "".join(entries))
    with fake_service(folder, server={"api_keys_file": str(folder / "keys.yaml")}) as found:
        yield found


@pytest.fixture
def parsed(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How large the bodies were that a child was asked to parse."""
    sizes: list[int] = []
    parse = service.server.gateway.body_parser.parse

    async def counted(body: Any, *rest: Any) -> dict[str, Any]:
        sizes.append(len(body))
        return await parse(body, *rest)

    monkeypatch.setattr(service.server.gateway.body_parser, "parse", counted)
    return sizes


def _auth(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


def test_every_route_that_takes_a_body_is_charged_or_needs_an_administrator() -> None:
    routes = [each for router in ROUTERS for each in router.routes if isinstance(each, APIRoute)]
    taken = {each.path for each in routes if "requestBody" in (each.openapi_extra or {})}
    assert not [each.path for each in routes if each.body_field], "FastAPI would parse it first"
    assert taken - CHARGED_PATHS == {"/outrider/speculation"}
    assert taken >= CHARGED_PATHS


def test_a_key_over_its_limit_has_no_body_parsed_and_its_client_sees_429(
    service: FakeService, parsed: list[int]
) -> None:
    client = openai.OpenAI(
        base_url=f"http://{service.server.http_address}/v1",
        api_key="slow-key",
        max_retries=0,
        timeout=TIMEOUT_S,
    )
    prompt = "word " * (3 * MIB // 5)
    outcomes = []
    for _ in range(6):
        try:
            client.completions.create(model="", prompt=prompt, max_tokens=1)
        except openai.APIStatusError as error:
            outcomes.append(error.status_code)
    assert outcomes == [400] + [429] * 5, "the first is read, and too long"
    assert len(parsed) == 1


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"])
def test_a_refusal_comes_before_the_body_and_the_rest_of_it_is_drained(
    service: FakeService, ending: bytes
) -> None:
    send(service, "/v1/completions", {"prompt": "a", "max_tokens": 1}, **_auth("slower"))
    with _half_sent(service, "slower", "/v1/completions", 3 * MIB, ending) as connection:
        assert b"429 Too Many Requests" in _received(connection, b"}}")
        connection.sendall(b"x" * (3 * MIB))  # which would fail on a connection that is reset
        if ending:
            assert connection.recv(4096) == b""
        else:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)


@contextmanager
def _half_sent(
    service: FakeService, key: str, path: str, size: int, more: bytes = b""
) -> Iterator[socket.socket]:
    host, _, port = service.server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %s-key\r\nContent-Length: %d\r\n%s\r\n"
            % (path.encode(), key.encode(), size, more)
        )
        yield connection


def _received(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        part = connection.recv(4096)
        assert part, received
        received += part
    return received


def test_who_may_not_control_speculation_hears_it_before_sending_anything(
    service: FakeService,
) -> None:
    with _half_sent(service, "free", "/outrider/speculation", 3 * MIB) as connection:
        assert b"403 Forbidden" in connection.recv(4096)


def test_tokens_are_asked_for_within_the_limits(service: FakeService) -> None:
    auth = _auth("tokens")
    assert send(service, "/tokenize", {"prompt": "a"}, **auth).status == 200
    assert send(service, "/detokenize", {"tokens": [5]}, **auth).status == 200
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        refused = send(service, path, body, **auth)
        assert refused.status == 429 and "2 requests a minute" in refused.error["message"]
    with Client(service.server.grpc_address, api_key="grpc-key") as client:
        client.tokenize("a")
        client.detokenize([5])
        with pytest.raises(CapacityError, match="2 requests a minute"):
            client.tokenize("a")
        with pytest.raises(CapacityError, match="2 requests a minute"):
            client.detokenize([5])


@pytest.mark.parametrize("asked", [{"prompt": ["a", "b", "c"]}, {"prompt": "a", "n": 3}])
def test_more_samples_than_a_key_may_ever_have_are_a_wrong_request(
    service: FakeService, asked: dict[str, Any]
) -> None:
    refused = send(service, "/v1/completions", {"max_tokens": 1} | asked, **_auth("few"))
    assert refused.status == 400
    assert "3 samples at once; the key 'few' may have 2" in refused.error["message"]


def test_samples_count_among_those_at_once(service: FakeService) -> None:
    with Client(service.server.grpc_address, api_key="few-key") as client:
        with pytest.raises(RequestError, match="may have 2 .max_concurrent"):
            client.generate([5], n=3, max_tokens=1)
        assert len(client.generate([5], n=2, max_tokens=1).samples) == 2
        service.engine.is_paused = True
        try:
            stream = client.stream([5], n=2, max_tokens=1)
            wait_until(lambda: bool(service.engine.running))
            with pytest.raises(CapacityError, match="2 requests at once"):
                client.generate([5], max_tokens=1)
        finally:
            service.engine.is_paused = False
        stream.result()


def test_a_large_body_is_read_as_a_small_one_is(service: FakeService, parsed: list[int]) -> None:
    """Token ids of many prompts, and texts with every kind of character."""
    auth = _auth("free")
    prompts = [[10_000 + at] * 400 for at in range(100)]
    reply = send(service, "/v1/completions", {"prompt": prompts, "max_tokens": 1}, **auth)
    assert reply.status == 200 and reply.json["usage"]["prompt_tokens"] == 40_000
    text = 'caf\u00e9 \U0001f600, "quoted" \\ [1, {2}]\n'
    padding = {"metadata": {"padding": "x" * SMALL_BYTES}}
    message = {"role": "user", "content": [{"type": "text", "text": text}], "tool_calls": []}
    for body in ({"prompt": text}, {"messages": [message]}):
        small, large = (send(service, "/tokenize", body | more, **auth) for more in ({}, padding))
        assert small.status == large.status == 200
        assert small.json == large.json
    tokens = tokenizer().encode("word " * 30)
    reply = send(service, "/detokenize", padding | {"tokens": [*tokens] * 3}, **auth)
    assert reply.json["prompt"] == "word " * 90
    assert len(parsed) == 4


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"prompt": [' + b"[]," * MIB + b"[]]}", "1048579 lists and objects"),
        (b'{"prompt": "a", "x": ' + b"[" * MIB, "1048577 lists and objects"),
        (b'{"prompt": "a", "x": "' + b"a" * MIB, "the body is not JSON"),
        (b'{"prompt": "' + b"a" * MIB + b'"}', "your prompt contains 1048576 characters"),
        (b'{"prompt": "a", "stop": [' + b'"",' * 50_000 + b'""]}', "stop has 50001 entries"),
        (b'{"prompt": "a", "n": 1.5, "x": "' + b"a" * MIB + b'"}', "n is 1.5; it must be a whole"),
    ],
)
def test_a_large_body_that_is_wrong_is_told_what_is(
    service: FakeService, body: bytes, sentence: str
) -> None:
    refused = send(service, "/v1/completions", body, **_auth("free"))
    assert refused.status == 400
    assert sentence in refused.error["message"]


def test_uploads_that_stand_still_make_room_for_an_honest_client(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the budget holds, each one byte short of its end."""
    size, number = MIB, 8
    reading = UploadBudget(number * size)
    monkeypatch.setattr(service.server.gateway, "uploads", reading)
    honest = json.dumps({"prompt": "a", "max_tokens": 1, "x": "a" * (2 * SMALL_BYTES)}).encode()
    with ExitStack() as stack:
        for _ in range(number):
            connection = stack.enter_context(_half_sent(service, "free", "/tokenize", size))
            connection.sendall(b"x" * (size - 1))
        wait_until(lambda: sum(reading._held.values()) == number * (size - 1))
        for key in ("few", "free"):  # another's, and that of the uploads itself
            assert send(service, "/v1/completions", honest, **_auth(key)).status == 200
    wait_until(lambda: not reading._held)


def test_a_running_request_keeps_nothing_of_what_was_sent(service: FakeService) -> None:
    def kept() -> list[Any]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, Conversation)]

    messages = [{"role": "user", "content": "Hello", "a": [], "b": {}, "c": ""}]
    body = {"messages": messages, "max_tokens": 5, "stream": True, "ignore_eos": True}
    service.engine.is_paused = True
    try:
        with (
            Client(service.server.grpc_address, api_key="free-key") as client,
            _half_sent(service, "free", "/v1/chat/completions", len(json.dumps(body))) as http,
        ):
            stream = client.chat_stream([{"role": "user", "content": "Hello"}])
            http.sendall(json.dumps(body).encode())
            wait_until(lambda: len(service.engine.running) == 2)
            wait_until(lambda: not kept())
            assert not service.server.gateway.uploads._held
            service.engine.is_paused = False
            stream.cancel()
            assert b"200 OK" in http.recv(4096)
    finally:
        service.engine.is_paused = False
