"""Streamed responses as server-sent events.

Most chunks carry a few letters of text, thousands of times a second. So the constant parts are
encoded once, and only the text each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from json.encoder import encode_basestring
from typing import Any

from starlette.types import Receive, Send

from outrider.api_types.errors import UnavailableError
from outrider.errors import OutriderError
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.answers import (
    ParsedRequest,
    ResponseWriter,
    RunningRequest,
    wait_for_disconnect,
)
from outrider.gateway.http.choices import Choice
from outrider.gateway.http.errors import SERVER_FAILED, body_of, error_body
from outrider.gateway.http.logprobs import prompt_logprobs
from outrider.gateway.http.summary import request_metrics, speculation_stats, usage
from outrider.text.outputs import OutputDelta

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = "data: [DONE]\n\n"
_DELTA_OBJECT = {True: "chat.completion.chunk", False: "text_completion"}


class Chunks:
    """Makes the events of one stream."""

    def __init__(
        self, parsed: ParsedRequest, *, wants_usage: bool, wants_usage_always: bool
    ) -> None:
        self._options = parsed.options
        self._wants_usage = wants_usage
        self._wants_usage_always = wants_usage_always
        is_chat = parsed.options.is_chat
        # Without the closing brace: more fields follow.
        self._head = "data: " + _json(parsed.head(_DELTA_OBJECT[is_chat]))[:-1] + ',"choices":['
        self._before_text = ',"delta":{"content":' if is_chat else ',"text":'
        self._after_text = "}," if is_chat else ","
        num_choices = len(parsed.calls) * parsed.num_samples
        self._heads = [
            f'{self._head}{{"index":{index}{self._before_text}' for index in range(num_choices)
        ]
        self._end = ',"usage":null}\n\n' if wants_usage else "}\n\n"
        self._plain_end = f'{self._after_text}"logprobs":null,"finish_reason":null}}]{self._end}'
        self._begun: set[int] = set()

    def first(self, running: RunningRequest) -> str:
        """The chunks before any text: in chat, the role."""
        if not self._options.is_chat:
            return ""
        more: dict[str, Any] = {}
        if self._options.token_ids:
            more["prompt_token_ids"] = list(running.sessions[0].prepared.spec.prompt_ids)
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        parts = []
        for choice in running.choices:
            parts.append(f'{self._head}{{"index":{choice.index},{role}{self._with(more)}')
            more = {}
        return "".join(parts)

    def of(self, running: RunningRequest, choice: Choice, delta: OutputDelta) -> str:
        """The chunk of a delta; empty if it has no content."""
        is_last = delta.finish_reason is not None
        if choice.is_plain and not is_last and not self._wants_usage_always:
            if not delta.text:
                return ""
            return f"{self._heads[choice.index]}{encode_basestring(delta.text)}{self._plain_end}"
        taken = choice.take(delta)
        if taken.is_empty and not delta.text and not is_last:
            return ""
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        details = _json(choice.details(taken, is_first=is_first, is_last=is_last))[1:]
        more: dict[str, Any] = {}
        if taken.prompt_positions and self._options.is_chat:
            more["prompt_logprobs"] = prompt_logprobs(taken.prompt_positions)
        if self._wants_usage_always:
            more["usage"] = usage(running.sessions)
        if self._options.speculation and not self._wants_usage and is_over(running):
            more["speculation_stats"] = speculation_stats(running.sessions)
        text = encode_basestring(delta.text)
        return f"{self._heads[choice.index]}{text}{self._after_text}{details}]{self._with(more)}"

    def last(self, running: RunningRequest) -> str:
        if not self._wants_usage:
            return _DONE
        sessions = running.sessions
        more = {"usage": usage(sessions), "speculation_stats": speculation_stats(sessions)}
        if (metrics := request_metrics(sessions)) is not None:
            more["metrics"] = metrics
        return f"{self._head}]{self._with(more)}{_DONE}"

    def _with(self, more: dict[str, Any]) -> str:
        """The end of a chunk, with additional fields."""
        if not more:
            return self._end
        if self._wants_usage:
            more = {"usage": None} | more
        return f",{_json(more)[1:]}\n\n"


class StreamedResponse(ResponseWriter):
    """The output as server-sent events; the first waits for the first token or for `KEEP_ALIVE_S`,
    before proxies time out."""

    def __init__(
        self,
        gateway: Gateway,
        parsed: ParsedRequest,
        *,
        wants_usage: bool,
        wants_usage_always: bool,
    ) -> None:
        super().__init__(gateway, parsed)
        self._chunks = Chunks(
            parsed, wants_usage=wants_usage, wants_usage_always=wants_usage_always
        )
        self._keep_alive_s = KEEP_ALIVE_S
        self._has_started = False
        self._sending = asyncio.Lock()
        self._last_s = asyncio.get_running_loop().time()

    async def _send(self, running: RunningRequest, send: Send) -> None:
        chunks = self._chunks
        first = chunks.first(running)

        async def take(choice: Choice, delta: OutputDelta) -> None:
            nonlocal first
            chunk = chunks.of(running, choice, delta)
            if chunk:
                if first:
                    chunk, first = first + chunk, ""
                await self._write(chunk.encode(), send)

        await running.run(take)
        await self._write(chunks.last(running).encode(), send, is_last=True)

    async def _write(self, data: bytes, send: Send, *, is_last: bool = False) -> None:
        async with self._sending:
            if not self._has_started:
                self._has_started = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [
                            *self._headers_of(b"text/event-stream; charset=utf-8"),
                            (b"cache-control", b"no-cache"),
                            (b"x-accel-buffering", b"no"),
                        ],
                    }
                )
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._last_s = asyncio.get_running_loop().time()

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has disconnected; until then send keep-alive comments."""
        clock = asyncio.get_running_loop().time
        disconnected = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            while True:
                wait_s = self._keep_alive_s
                if not self._sending.locked():  # locked: the client does not read
                    wait_s = max(wait_s - (clock() - self._last_s), 0.0)
                await asyncio.wait((disconnected,), timeout=wait_s)
                if disconnected.done():
                    return
                if clock() - self._last_s >= self._keep_alive_s and not self._sending.locked():
                    await self._write(_KEEP_ALIVE, send)
        finally:
            disconnected.cancel()

    async def _work(self, send: Send) -> None:
        try:
            await super()._work(send)
        except Exception as error:
            if not self._has_started or isinstance(error, OutriderError):
                raise
            self._gateway.fail(error)
            await self._write_event(error_body(500, SERVER_FAILED), send)

    async def _fail(self, error: OutriderError, send: Send) -> None:
        if not self._has_started:
            raise error
        await self._write_event(body_of(error), send)

    async def _on_shutdown(self, send: Send) -> None:
        if self._has_started:
            stopped = UnavailableError("the server was stopped; send the request again.")
            with contextlib.suppress(Exception):
                await self._write_event(body_of(stopped), send)

    async def _write_event(self, body: dict[str, Any], send: Send) -> None:
        await self._write(f"data: {json.dumps(body)}\n\n".encode(), send, is_last=True)


def is_over(running: RunningRequest) -> bool:
    return all(session.output.finished for session in running.sessions)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
