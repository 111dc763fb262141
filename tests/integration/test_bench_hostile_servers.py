"""Servers that answer in ways no server should, over real sockets: each ends in its own kind of
fault, soon, and takes nothing along."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.runs import ServerSample
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest, is_ready
from outrider.loadtest.servers.watch import ServerWatch
from outrider.loadtest.targets import Reply, TargetFault, TargetSpec, make_target
from outrider.loadtest.targets import openai as openai_target

LIMIT_S = 60.0
NOWHERE = Path("nowhere")  # no log is written
TEXT = BenchRequest(id="q/0", category="test", text="Once", max_tokens=6)
DEEP = b"[" * 60_000
MODELS = json.dumps({"data": [{"id": "m"}]}).encode()
CHUNK = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n'

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def head(status: str, *lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines, "")).encode()


def body(status: str, data: bytes, *lines: str) -> bytes:
    return head(status, f"Content-Length: {len(data)}", *lines) + data


LISTED = body("200 OK", MODELS, "Connection: close")


@asynccontextmanager
async def serving(answer: Answer, seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """A socket whose every request is answered by hand; yields its address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", request)
            await reader.readexactly(int(length[1]) if length else 0)
            if seen is not None:
                seen.append(request)
            await answer(request.split(b" ")[1], writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def sent(answer: bytes) -> Reply | TargetFault:
    """What becomes of a request that is answered so."""

    async def say(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(LISTED if path.endswith(b"/models") else answer)

    async def run() -> Reply | TargetFault:
        async with asyncio.timeout(LIMIT_S), serving(say) as url:
            target = make_target(TargetSpec(url))
            await target.open()
            reply = Reply()
            try:
                await target.send(TEXT, reply)
            except TargetFault as fault:
                return fault
            finally:
                await target.close()
            return reply

    return asyncio.run(run())


STREAM = "Content-Type: text/event-stream"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (body("500 Oops", DEEP), "http 500"),
        (body("500 Oops", b'{"error": "\\ud800\\u001b[2J"}'), "http 500"),
        (head("204 No Content"), "http 204"),
        (head("307 Elsewhere", "Location: file:///etc/passwd"), "http 307"),
        (head("302 Elsewhere", "Location: http://127.0.0.1:9/v1"), "http 302"),
        (body("200 OK", b""), "cut off"),
        (body("200 OK", b"", "Content-Type: application/json"), "malformed"),
        (body("200 OK", gzip.compress(CHUNK), STREAM, "Content-Encoding: gzip"), "cut off"),
        (body("200 OK", b"data: " + DEEP + b"\n\n", STREAM), "malformed"),
        (body("200 OK", b'data: {"choices":[{"text":"\0\xff"}]}\n\n', STREAM), "malformed"),
        (head("200 OK", *(f"X-{n}: {n}" for n in range(100_000))) + CHUNK, "malformed"),
        (head("200 OK", "X: " + "x" * 100_000) + CHUNK, "malformed"),
        (b"HTTP/1.1 two hundred\r\n\r\n", "malformed"),
        (head("200 OK", "Transfer-Encoding: chunked") + b"xyz\r\n", "malformed"),
    ],
)
def test_an_answer_that_is_none_has_its_kind_of_fault(answer: bytes, kind: str) -> None:
    fault = sent(answer)
    assert isinstance(fault, TargetFault)
    assert (fault.kind, str(fault).isprintable()) == (kind, True)
    assert len(str(fault)) <= 300


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n" + CHUNK,
        head("100 Continue") * 20 + body("200 OK", CHUNK, STREAM),
        head("200 OK", "Transfer-Encoding: chunked", "Trailer: X")
        + b"%x\r\n%s\r\n0\r\nX: 1\r\n\r\n" % (len(CHUNK), CHUNK),
        body("200 OK", b"event: x\nid: 7\nretry: 1\n" + CHUNK + b": bye\n\n", STREAM),
        body("200 OK", CHUNK + b"data: [DONE]\n\n" * 3 + CHUNK, STREAM),
    ],
)
def test_an_answer_in_another_dress_is_one(answer: bytes) -> None:
    reply = sent(answer)
    assert isinstance(reply, Reply)
    assert (reply.pieces, reply.finish) == (["a"], "stop")


def test_a_connection_closed_between_requests_is_a_reset() -> None:
    """Not told that it would be closed, the client may have taken it for the next request."""

    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path.endswith(b"/models"):
            writer.write(body("200 OK", MODELS))

    async def run() -> str:
        async with asyncio.timeout(LIMIT_S), serving(answer) as url:
            target = make_target(TargetSpec(url))
            await target.open()
            with pytest.raises(TargetFault) as caught:
                await target.send(TEXT, Reply())
            await target.close()
            return caught.value.kind

    assert asyncio.run(run()) == "reset"


def test_a_kept_connection_that_the_server_gave_up_costs_a_retry_not_the_request() -> None:
    """Of every connection only the first request is answered, and nobody was told so."""

    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        stream = b'data: {"choices": [{"text": "x", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        if path.endswith(b"/models"):
            writer.write(body("200 OK", MODELS))
        else:
            writer.write(body("200 OK", stream, "Content-Type: text/event-stream"))

    async def run() -> list[Reply]:
        async with asyncio.timeout(LIMIT_S), serving(answer) as url:
            target = make_target(TargetSpec(url))
            await target.open()
            replies = [Reply() for _ in range(3)]
            for reply in replies:
                await target.send(TEXT, reply)
            await target.close()
            return replies

    replies = asyncio.run(run())
    assert [reply.finish for reply in replies] == ["stop"] * 3
    assert sum(reply.retries for reply in replies) <= 3


def test_no_redirect_takes_headers_elsewhere() -> None:
    """Neither a request's, nor those of who asks whether a server is ready, or for its counters."""
    reached: list[bytes] = []

    async def elsewhere(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(body("200 OK", MODELS))

    async def run() -> tuple[str, bool, ServerSample]:
        async with asyncio.timeout(LIMIT_S), serving(elsewhere, reached) as other:

            async def send_away(path: bytes, writer: asyncio.StreamWriter) -> None:
                writer.write(
                    body("307 Elsewhere", b"", f"Location: {other}/x", "Connection: close")
                )

            async with serving(send_away) as url:
                headers = {"X-Api-Key": "secret"}
                target = make_target(TargetSpec(url, headers=headers, api_key="secret", model="m"))
                await target.open()
                with pytest.raises(TargetFault) as caught:
                    await target.send(TEXT, Reply())
                await target.close()
                watch = ServerWatch(ServerUnderTest(ServerSpec("s", url, headers=headers), NOWHERE))
                sample = await watch.sample()
                await watch.close()
                return caught.value.kind, await is_ready(url, headers), sample

    kind, ready, _ = asyncio.run(run())
    assert (kind, ready, reached) == ("http 307", False, [])


def test_a_server_whose_health_is_elsewhere_is_asked_for_its_models() -> None:
    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        moved = head("308 Moved", "Location: /health/", "Content-Length: 0")
        writer.write(body("200 OK", MODELS) if path == b"/v1/models" else moved)

    async def run() -> bool:
        async with asyncio.timeout(LIMIT_S), serving(answer) as url:
            return await is_ready(url, {})

    assert asyncio.run(run())


@pytest.mark.parametrize("answer", [DEEP, b'{"data": [{"id"', b"\xff"])
def test_a_list_of_models_that_is_none_is_a_fault(answer: bytes) -> None:
    async def say(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(body("200 OK", answer))

    async def run() -> str:
        async with asyncio.timeout(LIMIT_S), serving(say) as url:
            with pytest.raises(TargetFault) as caught:
                await make_target(TargetSpec(url)).open()
            return caught.value.kind

    assert asyncio.run(run()) == "malformed"


def test_a_body_that_comes_in_parts_is_read_whole() -> None:
    """Models, refusals and counters: cut, a number would be another one."""
    page = b"vllm:num_requests_running 1234\nvllm:num_requests_waiting 56\n"
    refusal = json.dumps({"error": {"message": "x" * 200}}).encode()

    async def drip(path: bytes, writer: asyncio.StreamWriter) -> None:
        status, data = "200 OK", MODELS
        if path == b"/metrics":
            data = page
        elif path.endswith(b"/completions"):
            status, data = "429 Full", refusal
        whole = body(status, data, "Connection: close")
        for at in (whole[:-33], whole[-33:-18], whole[-18:]):
            writer.write(at)
            await writer.drain()
            await asyncio.sleep(0.05)

    async def run() -> tuple[str, ServerSample]:
        async with asyncio.timeout(LIMIT_S), serving(drip) as url:
            target = make_target(TargetSpec(url))
            await target.open()
            with pytest.raises(TargetFault) as caught:
                await target.send(TEXT, Reply())
            await target.close()
            watch = ServerWatch(ServerUnderTest(ServerSpec("s", url), NOWHERE))
            sample = await watch.sample()
            await watch.close()
            return str(caught.value), sample

    message, sample = asyncio.run(run())
    assert message == "x" * 200
    assert (sample.running, sample.waiting) == (1234, 56)


def test_a_refusal_counts_though_its_words_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_target, "_REFUSAL_S", 0.1)

    async def hang(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path.endswith(b"/models"):
            writer.write(LISTED)
            return
        writer.write(head("429 Full", "Content-Length: 99") + b"no room")
        await writer.drain()
        await asyncio.sleep(5)

    async def run() -> Any:
        async with asyncio.timeout(LIMIT_S), serving(hang) as url:
            target = make_target(TargetSpec(url, model="m"))
            await target.open()
            with pytest.raises(TargetFault) as caught:
                await target.send(TEXT, Reply())
            await target.close()
            return caught.value.kind, str(caught.value)

    assert asyncio.run(run()) == ("http 429", "no room")


def test_a_packed_page_of_counters_is_not_unpacked() -> None:
    seen: list[bytes] = []
    bomb = gzip.compress(b"vllm:num_requests_running 7\n" + b"\n" * 10_000_000)

    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(body("200 OK", bomb, "Content-Encoding: gzip"))

    async def run() -> ServerSample:
        async with asyncio.timeout(LIMIT_S), serving(answer, seen) as url:
            watch = ServerWatch(ServerUnderTest(ServerSpec("s", url), NOWHERE))
            try:
                return await watch.sample()
            finally:
                await watch.close()

    assert asyncio.run(run()).running is None
    assert b"gzip" not in seen[0]
