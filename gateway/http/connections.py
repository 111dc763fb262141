"""How long a client may take, and how much it may send, before a request reaches the routes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.config import ServerConfig
from outrider.gateway.bounds import most_connections
from outrider.gateway.http.errors import RETRY_AFTER_S, error_body

MAX_HEADER_BYTES = 64 * 2**10
MIN_BODY_BYTES_PER_S = 32 * 2**10  # slower clients hold a place that others could use
WRITE_TIMEOUT_S = 120.0  # for a client that reads nothing of what it has asked for
KEEP_ALIVE_S = 75
BODY_SLACK_BYTES = 256 * 2**10  # so that the routes can tell what is wrong, in their own words
LINGER_S = 1.0  # to read a refusal in, before the connection is cut under what is still sent


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """What all connections of a process keep to."""

    max_connections: int
    max_body_bytes: int
    header_timeout_s: float
    write_timeout_s: float = WRITE_TIMEOUT_S

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionBounds:
        return cls(most_connections(config), config.max_body_bytes, config.header_timeout_s)


class _Phase(Enum):
    IDLE = auto()  # between requests, or while one is answered
    HEADERS = auto()
    BODY = auto()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which has no limits of its own. Refusals are in the shape of all errors."""

    bounds: ConnectionBounds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.IDLE
        self._is_refused = False
        self._is_surplus = False
        self._num_bytes = 0  # of the phase
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.bounds.max_connections
        self._is_surplus = len(self.connections) > most
        if len(self.connections) > 2 * most:  # too many even to be told so
            transport.abort()
            return
        self._enter(_Phase.HEADERS, self.bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADERS, self.bounds.header_timeout_s)
        if self._phase is _Phase.HEADERS:
            self._num_bytes += len(data)
        super().data_received(data)
        if self._phase is _Phase.HEADERS and self._num_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes; send fewer.")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.bounds.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    # -- what the parser finds ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_bytes = 0

    def on_headers_complete(self) -> None:
        if self._is_surplus:
            sentence = "the server has as many connections as it can hold; try again later."
            self._refuse(503, sentence)
            return
        most = self.bounds.max_body_bytes
        expected = min(_content_length(self.headers, most), most)
        allowed_s = self.bounds.header_timeout_s + expected / MIN_BODY_BYTES_PER_S
        self._enter(_Phase.BODY, allowed_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._num_bytes += len(body)
        most = self.bounds.max_body_bytes
        if self._num_bytes <= most + BODY_SLACK_BYTES:
            super().on_body(body)
            return
        self._refuse(
            413,
            f"the body has {self._num_bytes} bytes or more; it may have {most} "
            "(server.max_body_bytes), so send less at once.",
        )

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._enter(_Phase.IDLE, None)
        super().on_message_complete()

    # -- refusals -----------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self._refuse(400, "this is not HTTP/1.1; send a request of that.")

    def _enter(self, phase: _Phase, limit_s: float | None) -> None:
        self._phase = phase
        self._num_bytes = 0
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if limit_s is None else self.loop.call_later(limit_s, self._late)

    def _late(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_our_fault = self.flow.read_paused or (self._phase is _Phase.HEADERS and is_answering)
        if is_our_fault:  # the client cannot send on while we do not read
            self._reading = self.loop.call_later(self.bounds.header_timeout_s, self._late)
        elif self._phase is _Phase.HEADERS:
            limit_s = self.bounds.header_timeout_s
            self._refuse(
                408, f"the headers took more than {limit_s:g} s (server.header_timeout_s)."
            )
        else:
            self._refuse(
                408, f"the body came slower than {MIN_BODY_BYTES_PER_S} bytes/s; send it faster."
            )

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer if that can still be done, and hang up soon: what is still being sent would cut
        the connection before the client has read why."""
        self._is_refused = True
        cycle = self.cycle
        is_told = cycle is not None and cycle.response_started and self._phase is _Phase.BODY
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            is_told = is_told or cycle.response_started
        self._enter(_Phase.IDLE, None)
        if self.transport.is_closing():
            return
        if not is_told:
            self.transport.write(_response(status, sentence))
        self._reading = self.loop.call_later(LINGER_S, self.transport.close)


def protocol_of(bounds: ConnectionBounds) -> type[BoundedProtocol]:
    """The class uvicorn makes one of for each connection."""
    return type("ProtocolOfServer", (BoundedProtocol,), {"bounds": bounds})


def _content_length(headers: list[tuple[bytes, bytes]], unknown: int) -> int:
    found = [value for name, value in headers if name == b"content-length"]
    return int(found[0]) if found and found[0].isdigit() else unknown


def _response(status: int, sentence: str) -> bytes:
    body = json.dumps(error_body(status, sentence)).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        lines.append(f"retry-after: {RETRY_AFTER_S}")
    return "\r\n".join([*lines, "", ""]).encode() + body
