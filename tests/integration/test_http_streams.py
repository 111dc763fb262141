"""How streams over HTTP behave on the wire: what comes first, what comes while nothing does, and
how they end."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, FakeService, fake_service, tokenizer
from http_tools import send
from waits import wait_until

from outrider.gateway.http import stream
from outrider.links.gateway_messages import SubmitRefused
from outrider.text.builder import TextBuilder

PROMPT = [10, 11, 12, 13]
ENDLESS = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("http")) as running:
        yield running


class RawStream:
    """A request whose answer is read as it arrives."""

    def __init__(self, service: FakeService, body: Any, path: str = "/v1/completions") -> None:
        host, _, port = service.server.http_address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)
        self.read = b""

    def until(self, mark: bytes) -> bytes:
        while mark not in self.read:
            got = self.socket.recv(65536)
            assert got, f"the stream ended without {mark!r}: {self.read!r}"
            self.read += got
        return self.read


@contextlib.contextmanager
def raw_stream(service: FakeService, body: Any, path: str = "/v1/completions") -> Iterator[Any]:
    made = RawStream(service, body, path)
    try:
        yield made
    finally:
        made.socket.close()


def test_a_stream_tells_proxies_to_pass_it_on_at_once(service: FakeService) -> None:
    reply = send(service, "/v1/completions", ENDLESS | {"max_tokens": 3})
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert 1 <= len(reply.events) <= 3, "what comes while others are sent goes with the next"


def test_no_chunk_is_empty(service: FakeService) -> None:
    # A word that may be the beginning of the stop string is held back with all that follows it.
    asked = ENDLESS | {"max_tokens": 30, "seed": 1}
    plain = send(service, "/v1/completions", asked).events
    held = send(service, "/v1/completions", asked | {"stop": plain[0]["choices"][0]["text"] + "!"})
    for event in held.events[:-1]:
        assert event["choices"][0]["text"]


def test_text_of_every_script_arrives_as_it_is(tmp_path: Path) -> None:
    ids = tokenizer().encode('naïve "quoted" \\ 東京 🙂 \u2028 end\n')
    with fake_service(tmp_path, script=lambda seed, place: [*ids, EOS][place - 4]) as own:
        reply = send(own, "/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "stream": True})
        text = "".join(event["choices"][0]["text"] for event in reply.events)
        assert text == tokenizer().decode(ids)


# -- while nothing comes ----------------------------------------------------------------------


def test_a_queued_stream_is_kept_alive(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.05)
    service.engine.is_paused = True
    try:
        with raw_stream(service, ENDLESS | {"max_tokens": 3}) as waiting:
            waiting.until(b": keep-alive\n\n\r\n" + b"e\r\n: keep-alive")
            assert b"data:" not in waiting.read
            service.engine.is_paused = False
            waiting.until(b"data: [DONE]\n\n")
    finally:
        service.engine.is_paused = False


def test_a_busy_stream_needs_no_keeping_alive(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 2.0)
    assert b"keep-alive" not in send(service, "/v1/completions", ENDLESS).body


# -- how it ends ------------------------------------------------------------------------------


def test_an_error_before_the_first_token_is_a_status(tmp_path: Path) -> None:
    def refuse(submit: Any) -> SubmitRefused:
        return SubmitRefused(
            submit.samples[0].handle, "there is no room; try later.", is_capacity=True
        )

    with fake_service(tmp_path, refuse=refuse) as own:
        reply = send(own, "/v1/completions", ENDLESS)
        assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
        assert reply.error["message"] == "there is no room; try later."


def test_an_error_after_the_first_byte_is_an_event_and_the_end(tmp_path: Path) -> None:
    options = {"resubmit_timeout_s": 0.1}
    with fake_service(tmp_path, server=options) as own, raw_stream(own, ENDLESS) as broken:
        broken.until(b"data: {")
        own.engine.stop()
        broken.until(b'data: {"error"')
        broken.until(b"\r\n0\r\n\r\n")  # the end of a body that is sent in chunks
        events = broken.read.decode().split("data: ")
        error = json.loads(events[-1].partition("\n\n")[0])["error"]
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        assert "engine" in error["message"]
        assert "[DONE]" not in events[-1]


@pytest.mark.parametrize("num_sent", [0, 200])  # many: a busy server sends several at once
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_failure_of_the_servers_own_is_told_without_its_details(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, num_sent: int, is_stream: bool
) -> None:
    take, left = TextBuilder.take, iter(range(num_sent))

    def take_some(self: TextBuilder, *arguments: Any) -> Any:
        if next(left, None) is None:
            raise ZeroDivisionError("a secret of the inside")
        return take(self, *arguments)

    monkeypatch.setattr(TextBuilder, "take", take_some)
    reply = send(service, "/v1/completions", ENDLESS | {"stream": is_stream})
    assert b"a secret" not in reply.body
    if num_sent and is_stream:
        assert reply.status == 200
        error = json.loads(reply.body.decode().rpartition("data: ")[2])["error"]
    else:
        assert reply.status == 500
        error = reply.error
    assert error["type"] == "api_error" and "its log" in error["message"]
    wait_until(lambda: len(service.server.gateway.active_requests) == 0)


def test_a_stream_goes_on_after_the_loss_of_its_engine(tmp_path: Path) -> None:
    asked = ENDLESS | {"max_tokens": 40, "seed": 6, "return_token_ids": True}
    with fake_service(tmp_path) as own:
        whole = [
            token
            for event in send(own, "/v1/completions", asked).events
            for token in event["choices"][0]["token_ids"]
        ]
        own.engine.deaths = [own.engine.tokens_told + 15]
        usage = {"stream_options": {"include_usage": True}}
        *events, last = send(own, "/v1/completions", asked | usage).events
        assert [t for event in events for t in event["choices"][0]["token_ids"]] == whole
        assert last["speculation_stats"]["resubmissions"] == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(service: FakeService, is_stream: bool) -> None:
    engine: FakeEngine = service.engine
    num_before = len(engine.cancelled)
    asked = {**ENDLESS, "prompt": [PROMPT, PROMPT], "n": 2, "stream": is_stream}
    with raw_stream(service, asked) as left:
        if is_stream:
            left.until(b"data: {")
        else:
            wait_until(lambda: len(engine.running) == 4)
    wait_until(lambda: not engine.running and len(service.server.gateway.active_requests) == 0)
    assert len(engine.cancelled) == num_before + 4


def test_one_of_several_prompts_that_is_refused_ends_all(service: FakeService) -> None:
    asked = ENDLESS | {"prompt": [[10], [11] * 600]}
    reply = send(service, "/v1/completions", asked)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert len(service.server.gateway.active_requests) == 0


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(service: FakeService) -> None:
    service.engine.is_paused = True
    try:
        reply = send(service, "/v1/completions", ENDLESS, X_Request_Timeout="0.1")
        assert (reply.status, reply.error["type"]) == (408, "timeout_error")
    finally:
        service.engine.is_paused = False
    late = ENDLESS | {"prompt": [10], "max_tokens": 500}
    body = send(service, "/v1/completions", late, X_Request_Timeout="0.15").body
    assert b'"error"' in body and b"deadline" in body
