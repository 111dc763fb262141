"""Time and size limits of a connection, before a request reaches the routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from outrider.config import ServerConfig
from outrider.gateway.connection_slots import UNKNOWN_IDLE_S, ConnectionSlot
from outrider.gateway.http.access import ON_KNOWN
from outrider.gateway.http.errors import RETRY_AFTER_S, error_body

MAX_HEADER_BYTES = 64 * 2**10
MAX_HEADERS = 128
_HEADER_OVERHEAD = 4  # a colon, a space and the end of the line
MIN_BODY_BYTES_PER_S = 32 * 2**10  # slower clients hold budget that others could use
WRITE_TIMEOUT_S = 120.0  # for a client that reads nothing of its response
WRITE_BUFFER_BYTES = 64 * 2**10  # beyond it, writes wait for the client
KEEP_ALIVE_S = 75
BODY_SLACK_BYTES = 256 * 2**10  # beyond the limit, so that the routes report the size
DRAIN_S = 5.0  # to read the rest of a body that was answered early, so that the client sees why
LINGER_S = 1.0  # for the client to read an error before the connection closes


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The limits of each connection of a process."""

    max_body_bytes: int
    header_timeout_s: float
    write_timeout_s: float = WRITE_TIMEOUT_S

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionBounds:
        return cls(config.max_body_bytes, config.header_timeout_s)


class _Phase(Enum):
    IDLE = auto()  # between requests, or while a response is sent
    HEADERS = auto()
    BODY = auto()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; violations get an error in OpenAI's shape.

    A connection without a valid key so far has a keep-alive timeout of seconds.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        *,
        bounds: ConnectionBounds,
        slot: ConnectionSlot,
    ) -> None:
        super().__init__(config, server_state, {})
        self.bounds = bounds
        self._slot = slot
        self.timeout_keep_alive = KEEP_ALIVE_S if slot.is_known else UNKNOWN_IDLE_S
        self._phase = _Phase.IDLE
        self._is_refused = False
        self._stays_open = True  # after the request
        self._num_bytes = 0  # of the phase
        self._num_bytes_before = 0  # at the last check of its rate
        self._was_paused = False  # by us, at the last check
        self._num_header_bytes = 0
        self._num_headers = 0
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._slot.close = self._make_room
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)  # TLS has a larger default
        self._enter(_Phase.HEADERS, self.bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._slot.release()
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
        # The parser reports a line only once it is complete.
        if self._phase is _Phase.HEADERS and self._num_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # not idle: the response is still being sent
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            return
        super().timeout_keep_alive_handler()

    def _watch_writing(self) -> None:
        """Abort the connection of a client that has read nothing since the last check."""
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < before:
                self._watch_writing()
            else:
                self.transport.abort()

        self._writing = self.loop.call_later(self.bounds.write_timeout_s, check)

    # -- callbacks of the parser --------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[ON_KNOWN] = self._mark_known
        self._num_bytes = 0
        self._num_header_bytes = 0
        self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        if self._takes_header(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        is_taken = self._takes_header(len(name) + len(value) + _HEADER_OVERHEAD)
        # Trailers are ignored.
        if is_taken and self._phase is not _Phase.BODY:
            super().on_header(name, value)

    def _takes_header(self, num_bytes: int) -> bool:
        """Count parsed headers: one read may hold all of them and more."""
        self._num_header_bytes += num_bytes
        is_much = self._num_header_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS
        if is_much and not self._is_refused:
            self._refuse_headers()
        return not self._is_refused

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        if self._slot.is_surplus:
            sentence = "all connections that the server allows are in use; try again later."
            self._refuse(503, sentence)
            return
        self._slot.set_busy(True)
        self._enter(_Phase.BODY, self.bounds.header_timeout_s)
        super().on_headers_complete()
        # Closing while the client still sends its body would reset the connection and lose the
        # response.
        self._stays_open, self.cycle.keep_alive = self.cycle.keep_alive, True

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._num_bytes += len(body)
        limit = self.bounds.max_body_bytes
        if self._num_bytes <= limit + BODY_SLACK_BYTES:
            super().on_body(body)
            return
        self._refuse(
            413,
            f"the body has {self._num_bytes} bytes or more; it may have {limit} "
            "(server.max_body_bytes), so send less at once.",
        )

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._enter(_Phase.IDLE, None)
        if not self._stays_open:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if not is_last:
            return
        self._slot.set_busy(False)
        if self._phase is _Phase.BODY and self.cycle.response_complete and not self._is_refused:
            self._set_timer(DRAIN_S, self.transport.close)

    def _mark_known(self) -> None:
        self._slot.mark_known()
        self.timeout_keep_alive = KEEP_ALIVE_S

    def _make_room(self) -> None:
        """Abort for a new connection: a TLS shutdown waits for the client, and the socket would
        outlive its slot."""
        self._is_refused = True
        self.transport.abort()

    # -- refusals -----------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self._refuse(400, "this is not HTTP/1.1; send an HTTP/1.1 request.")

    def _enter(self, phase: _Phase, limit_s: float | None) -> None:
        self._phase = phase
        self._num_bytes = self._num_bytes_before = 0
        self._set_timer(limit_s, self._late)

    def _set_timer(self, limit_s: float | None, act: Callable[[], None]) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if limit_s is None else self.loop.call_later(limit_s, act)

    def _late(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        was_paused, self._was_paused = self._was_paused, self.flow.read_paused
        is_our_fault = (
            was_paused or self._was_paused or (self._phase is _Phase.HEADERS and is_answering)
        )
        # Not late: we have paused reading, or the body still arrives at the minimum rate.
        if is_our_fault or (self._phase is _Phase.BODY and self._is_arriving(is_answering)):
            self._num_bytes_before = self._num_bytes
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

    def _is_arriving(self, is_answering: bool) -> bool:
        """Whether the body came at half the minimum rate or faster since the last check: networks
        are bursty."""
        if not is_answering and not self._slot.is_known:  # no route reads it
            return False
        min_bytes = MIN_BODY_BYTES_PER_S * self.bounds.header_timeout_s / 2
        return self._num_bytes - self._num_bytes_before >= min_bytes

    def _refuse_headers(self) -> None:
        self._refuse(
            431,
            f"the headers have more than {MAX_HEADER_BYTES} bytes, or are more than {MAX_HEADERS}; "
            "send fewer.",
        )

    def _refuse(self, status: int, sentence: str) -> None:
        """Send the error if no response has started, and close after `LINGER_S`: closing at once,
        while the client still sends, would reset the connection before it reads the error."""
        self._is_refused = True
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_started and self._phase is _Phase.BODY
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            is_answered = is_answered or cycle.response_started
        self._enter(_Phase.IDLE, None)
        if self.transport.is_closing():
            return
        if not is_answered:
            self.transport.write(_response(status, sentence))
        self._reading = self.loop.call_later(LINGER_S, self.transport.close)


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
