"""The response to a generation request: one prompt or several, complete or streamed.

The request runs while its response is sent: an error before the first byte is an HTTP status like
that of any other route, and a client that disconnects ends the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.gateway.calls import Call
from outrider.gateway.gateway import Gateway
from outrider.gateway.http.choices import Choice, ChoiceDelta, ChoiceOptions, SharedPrompt
from outrider.gateway.http.errors import with_field
from outrider.gateway.http.fields import WARNING
from outrider.gateway.http.labels import REQUEST_ID
from outrider.gateway.http.logprobs import prompt_logprobs
from outrider.gateway.http.summary import request_metrics, speculation_stats, usage
from outrider.gateway.session import Session
from outrider.gateway.upload_budget import Upload
from outrider.logs import request_context
from outrider.text.outputs import OutputDelta

# Tokens with log-probabilities of a response that is serialized on the event loop.
MAX_INLINE_POSITIONS = 256
POSITION_LEVEL = 5  # of nesting: choices, the choice, logprobs, content, the token


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, parsed and checked as far as possible without a tokenizer."""

    calls: Sequence[Call]  # one for each prompt
    upload: Upload  # of the body
    num_samples: int  # of each
    options: ChoiceOptions
    response_id: str
    label: str  # the client's name for it, or ""
    model: str
    fingerprint: str
    field_names: frozenset[str]
    warning: str = ""  # of fields that were ignored, for a header

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


Take = Callable[[Choice, OutputDelta], Awaitable[None]]


class RunningRequest:
    """The sessions of a running request, and their choices."""

    def __init__(self, sessions: list[Session], parsed: ParsedRequest) -> None:
        self.sessions = sessions
        self.choices: list[Choice] = []
        for session in sessions:
            prompt = SharedPrompt(session)
            for sample in range(parsed.num_samples):
                choice = Choice(len(self.choices), sample, session, prompt, parsed.options)
                self.choices.append(choice)
        self._num_samples = parsed.num_samples

    async def run(self, take: Take) -> None:
        """Pass each delta to `take` as it comes; the next one waits until `take` returns."""
        if len(self.sessions) == 1:
            await self._run_one(0, take)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self.sessions)):
                    group.create_task(self._run_one(number, take))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _run_one(self, number: int, take: Take) -> None:
        choices = self.choices[number * self._num_samples :]
        # Closed explicitly, not at garbage collection: closing cancels the request.
        async with contextlib.aclosing(self.sessions[number].deltas()) as deltas:
            async for delta in deltas:
                await take(choices[delta.index], delta)


class ResponseWriter(Response, ABC):
    """Runs the request and sends its output until it finishes or the client disconnects."""

    def __init__(self, gateway: Gateway, parsed: ParsedRequest) -> None:
        super().__init__()
        self._gateway = gateway
        self._parsed = parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parsed = self._parsed
        with request_context(
            f"{parsed.label}/{parsed.response_id}" if parsed.label else parsed.response_id
        ):
            working = asyncio.create_task(self._work(send))
            watching = asyncio.create_task(self._watch(receive, send))
            try:
                await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await _end(working, watching)
                await self._on_shutdown(send)
                raise
            await _end(watching, *(() if working.done() else (working,)))
            if not working.cancelled():
                working.result()

    async def _work(self, send: Send) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(self._gateway.session(call))
                    for call in self._parsed.calls
                ]
                self._parsed.upload.release()
                await self._send(RunningRequest(sessions, self._parsed), send)
        except OutriderError as error:
            await self._fail(with_field(error, self._parsed.field_names), send)

    @abstractmethod
    async def _send(self, running: RunningRequest, send: Send) -> None:
        """Run the sessions and send their output; raises errors that precede its first byte."""

    async def _fail(self, error: OutriderError, send: Send) -> None:
        raise error

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has disconnected."""
        await wait_for_disconnect(receive)

    async def _on_shutdown(self, send: Send) -> None:
        """The server stops before the response is complete."""

    def _headers_of(self, content_type: bytes) -> list[tuple[bytes, bytes]]:
        name = self._parsed.label or self._parsed.response_id
        headers = [(b"content-type", content_type), (REQUEST_ID, name.encode())]
        if self._parsed.warning:
            headers.append((WARNING.lower().encode(), self._parsed.warning.encode()))
        return headers


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class CompleteResponse(ResponseWriter):
    """The output as one JSON body."""

    async def _send(self, running: RunningRequest, send: Send) -> None:
        deltas: dict[int, ChoiceDelta] = {}

        async def take(choice: Choice, delta: OutputDelta) -> None:
            if not choice.is_plain:
                deltas.setdefault(choice.index, ChoiceDelta()).add(choice.take(delta))

        await running.run(take)
        if sum(each.num_positions for each in deltas.values()) <= MAX_INLINE_POSITIONS:
            content = _json(self._body(running, deltas)).encode()
        else:  # off the event loop: many positions take seconds
            content = await asyncio.to_thread(self._serialized, running, deltas)
        headers = self._headers_of(b"application/json")
        headers.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _serialized(self, running: RunningRequest, deltas: dict[int, ChoiceDelta]) -> bytes:
        return "".join(in_pieces(self._body(running, deltas), POSITION_LEVEL)).encode()

    def _body(self, running: RunningRequest, deltas: dict[int, ChoiceDelta]) -> dict[str, Any]:
        options, sessions = self._parsed.options, running.sessions
        body = self._parsed.head("chat.completion" if options.is_chat else "text_completion")
        body["choices"] = choices = []
        for choice in running.choices:
            shown: dict[str, Any] = {"index": choice.index, "text": choice.text}
            if options.is_chat:
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                shown = {"index": choice.index, "message": message}
            each = deltas.get(choice.index, ChoiceDelta())
            choices.append(shown | choice.details(each, is_first=True, is_last=True))
        body["usage"] = usage(sessions)
        body["speculation_stats"] = speculation_stats(sessions)
        body["metrics"] = request_metrics(sessions)
        if options.is_chat and options.token_ids:
            body["prompt_token_ids"] = list(sessions[0].prepared.spec.prompt_ids)
        if options.is_chat and options.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_positions)
        return body


def in_pieces(value: Any, levels: int) -> Iterator[str]:
    """The JSON of a value in pieces, split down to this level: one call of the encoder holds the
    GIL."""
    if not value or not levels or not isinstance(value, dict | list):
        yield _json(value)
        return
    is_object = isinstance(value, dict)
    before = "{" if is_object else "["
    for each in value:
        yield before
        if is_object:
            yield f"{_json(each)}: "
        yield from in_pieces(value[each] if is_object else each, levels - 1)
        before = ", "
    yield "}" if is_object else "]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
