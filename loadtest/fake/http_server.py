"""A fake OpenAI-compatible server. It writes HTTP/1.1 itself: a framework's overhead would be
measured."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from outrider.loadtest.fake.http_events import (
    HEAD,
    LAST_CHUNK,
    ResponseFormat,
    chunk,
    error_answer,
    event,
    updates_of,
    whole_answer,
)
from outrider.loadtest.fake.script import (
    DRIP_BYTES,
    DRIP_S,
    Fault,
    Script,
    ScriptPlayer,
    ServedRequest,
)

_REFUSALS = {
    Fault.TOO_MANY: (429, "Too Many Requests"),
    Fault.INTERNAL: (500, "Internal Server Error"),
    Fault.UNAVAILABLE: (503, "Service Unavailable"),
}
_CLOSE_WITH_RESET = struct.pack("ii", 1, 0)
_BACKLOG = 8192


class FakeOpenAiServer:
    """Serves a script; `actor` has the request log."""

    def __init__(
        self,
        script: Script,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.actor = ScriptPlayer(script)
        self._tls = tls
        self.connections: set[_FakeConnection] = set()
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None
        self._updates: dict[ResponseFormat, list[bytes]] = {}

    async def __aenter__(self) -> FakeOpenAiServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _FakeConnection(self), self._host, self._port, backlog=_BACKLOG, ssl=self._tls
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in list(self.connections):
                connection.close()
            await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http{'s' * bool(self._tls)}://{self._host}:{self._port}"

    @property
    def served(self) -> list[ServedRequest]:
        return self.actor.served

    def updates(self, response_format: ResponseFormat) -> list[bytes]:
        """The updates of a response, cached by format."""
        if response_format not in self._updates:
            self._updates[response_format] = updates_of(self.actor.script, response_format)
        return self._updates[response_format]


class _FakeConnection(asyncio.Protocol):
    """One client connection; its requests are served in order."""

    def __init__(self, server: FakeOpenAiServer) -> None:
        self._server = server
        self._actor = server.actor
        self._buffer = b""
        self._answer: _StreamingResponse | None = None
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._answer is not None:
            self._answer.abandon()

    def close(self) -> None:
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._buffer[:1].isalpha() and self._buffer:  # TLS or garbage
            self.transport.write(error_answer(400, "Bad Request", None))
            self.leave(self.transport.close)
        while self._answer is None:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            length = _content_length(head)
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._handle(head, rest[:length])

    def leave(self, close: Callable[[], None]) -> None:
        """Closes from the server's side."""
        self._answer = None
        self._buffer = b""
        close()

    def answered(self) -> None:
        """A response is complete; the next request may be buffered already."""
        self._answer = None
        if self._buffer:
            self.data_received(b"")

    def _handle(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path.endswith(b"/models"):
            listed = {"object": "list", "data": [{"id": self._actor.script.model}]}
            self.transport.write(whole_answer(b"200 OK", json.dumps(listed).encode()))
        elif path.endswith(b"/completions"):
            self._complete(json.loads(body), is_chat=path.endswith(b"/chat/completions"))
        else:
            self.transport.write(error_answer(404, "Not Found", None))

    def _complete(self, body: dict[str, Any], is_chat: bool) -> None:
        script = self._actor.script
        options = body.get("stream_options") or {}
        has_usage = script.has_usage and bool(options.get("include_usage"))
        response_format = ResponseFormat(
            is_chat=is_chat,
            has_usage=has_usage,
            has_running_usage=has_usage and bool(options.get("continuous_usage_stats")),
            num_updates=script.num_updates(int(body.get("max_tokens") or 16)),
        )
        prompt = body["messages"][-1]["content"] if is_chat else body.get("prompt")
        served = self._actor.begin(prompt if isinstance(prompt, str) else "", time.monotonic())
        self._answer = _StreamingResponse(
            self, self._actor, served, self._server.updates(response_format)
        )


class _StreamingResponse:
    """One response in progress: a timer writes the updates that are due."""

    __slots__ = ("_actor", "_connection", "_dues", "_loop", "_next", "_served", "_start_s",
                 "_timer", "_updates", "_was_stalled")  # fmt: skip

    def __init__(
        self,
        connection: _FakeConnection,
        actor: ScriptPlayer,
        served: ServedRequest,
        updates: list[bytes],
    ) -> None:
        self._connection = connection
        self._actor = actor
        self._served = served
        self._updates = updates
        self._dues = actor.delays(len(updates))
        self._start_s = served.received_s
        self._next = 0
        self._was_stalled = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._wait(self._dues[0])

    def abandon(self) -> None:
        """The client disconnected."""
        self._served.is_closed_early = True
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, due_s: float) -> None:
        left_s = self._start_s + due_s - time.monotonic()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._tick)
        else:
            self._timer = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if not self._was_stalled and (stalled_s := self._actor.stall_delay_s(self._start_s, now_s)):
            self._was_stalled = True
            self._start_s += stalled_s
            self._wait(self._dues[self._next])
            return
        if self._served.fault is not None and self._fail():
            return
        self._write(now_s)

    def _write(self, now_s: float) -> None:
        first, dues, last = self._next, self._dues, len(self._updates)
        due_s = now_s - self._start_s
        number = first + 1
        stop = last if self._served.fault is None else last // 2  # the fault comes mid-stream
        while number < stop and dues[number] <= due_s:
            number += 1
        parts = [chunk(update) for update in self._updates[first:number]]
        if first == 0:
            parts.insert(0, HEAD)
            self._served.first_s = now_s
        is_end = number == last
        if is_end:
            parts.append(LAST_CHUNK)
        self._connection.transport.write(b"".join(parts))
        self._next = self._served.updates = number
        if is_end:
            self._served.last_s = now_s
            self._connection.answered()
        else:
            self._wait(dues[number])

    # -- faults -------------------------------------------------------------------------------

    def _fail(self) -> bool:
        """Injects the fault if it is due; returns whether it was."""
        transport, fault = self._connection.transport, self._served.fault
        assert fault is not None
        if fault in _REFUSALS:
            transport.write(error_answer(*_REFUSALS[fault], self._actor.script.retry_after_s))
            self._connection.answered()
            return True
        if fault is Fault.HANG_UP:
            self._connection.leave(transport.close)
            return True
        if fault is Fault.DRIP:
            self._drip(b"".join(self._updates))
            return True
        if self._next < len(self._updates) // 2:
            return False
        head = b"" if self._next else HEAD
        match fault:
            case Fault.RESET:
                transport.write(head)
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RESET)
                self._connection.leave(transport.abort)
            case Fault.SILENCE:
                update = self._updates[self._next]
                transport.write(head + chunk(update[: len(update) // 2]))
            case _:
                transport.write(head + chunk(_FAULTY_EVENTS[fault]) + LAST_CHUNK)
                self._connection.answered()
        return True

    def _drip(self, left: bytes) -> None:
        transport = self._connection.transport
        if self._next == 0:
            transport.write(HEAD)
            self._served.first_s = time.monotonic()
            self._next = 1
        transport.write(chunk(left[:DRIP_BYTES]))
        if left := left[DRIP_BYTES:]:
            self._timer = self._loop.call_later(DRIP_S, self._drip, left)
        else:
            transport.write(LAST_CHUNK)
            self._served.last_s = time.monotonic()
            self._served.updates = len(self._updates)
            self._connection.answered()


_FAULTY_EVENTS = {
    Fault.CUT_OFF: b": nothing more\n\n",
    Fault.MALFORMED: b'data: {"choices": [{"text": "half\n\n',
    Fault.STREAM_ERROR: event({"error": {"message": "scripted stream error", "code": 500}}),
}


def _content_length(head: bytes) -> int:
    lower = head.lower()
    start = lower.find(b"\r\ncontent-length:")
    if start < 0:
        return 0
    start += len(b"\r\ncontent-length:")
    end = lower.find(b"\r\n", start)
    return int(lower[start : end if end >= 0 else None])
