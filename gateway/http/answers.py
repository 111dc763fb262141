"""One answer to a request: of one prompt or several, whole or as it comes about.

An answer runs while it is sent, as a response of its own kind: what goes wrong before the first
byte is an HTTP status like that of any other route, and a client that leaves ends the request.
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
from outrider.gateway.http.choices import Choice, SharedPrompt, Told, Wanted
from outrider.gateway.http.errors import with_field
from outrider.gateway.http.fields import WARNING
from outrider.gateway.http.labels import REQUEST_ID
from outrider.gateway.http.logprobs import prompt_logprobs
from outrider.gateway.http.summary import request_metrics, speculation_stats, usage
from outrider.gateway.reading import Upload
from outrider.gateway.session import Session
from outrider.logs import request_context
from outrider.text.outputs import OutputDelta

# Tokens with log-probabilities of an answer that is written between two turns of the event loop.
MAX_INLINE_POSITIONS = 256
POSITION_LEVEL = 5  # of an answer: choices, the choice, logprobs, content, the token


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read and checked as far as that goes without a tokenizer."""

    calls: Sequence[Call]  # one for each prompt
    upload: Upload  # which all prompts came with
    num_samples: int  # of each
    wanted: Wanted
    answer_id: str
    label: str  # the client's name for it, or ""
    model: str
    fingerprint: str
    field_names: frozenset[str]
    warning: str = ""  # of fields that were ignored, for a header

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


Take = Callable[[Choice, OutputDelta], Awaitable[None]]


class Running:
    """The sessions of a request under way, and the choices their texts become."""

    def __init__(self, sessions: list[Session], asked: Asked) -> None:
        self.sessions = sessions
        self.choices: list[Choice] = []
        for session in sessions:
            prompt = SharedPrompt(session)
            for sample in range(asked.num_samples):
                choice = Choice(len(self.choices), sample, session, prompt, asked.wanted)
                self.choices.append(choice)
        self._num_samples = asked.num_samples

    async def run(self, take: Take) -> None:
        """Hand every delta over as it comes, and go on only when it has been taken."""
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
        # Closed here and now rather than when it is collected: leaving cancels the request.
        async with contextlib.aclosing(self.sessions[number].deltas()) as deltas:
            async for delta in deltas:
                await take(choices[delta.index], delta)


class Answer(Response, ABC):
    """Runs the request and sends what comes of it, until it is done or the client has left."""

    def __init__(self, gateway: Gateway, asked: Asked) -> None:
        super().__init__()
        self._gateway = gateway
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._asked
        with request_context(
            f"{asked.label}/{asked.answer_id}" if asked.label else asked.answer_id
        ):
            working = asyncio.create_task(self._work(send))
            watching = asyncio.create_task(self._watch(receive, send))
            try:
                await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await _end(working, watching)
                await self._cut_off(send)
                raise
            await _end(watching, *(() if working.done() else (working,)))
            if not working.cancelled():
                working.result()

    async def _work(self, send: Send) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(self._gateway.session(call))
                    for call in self._asked.calls
                ]
                self._asked.upload.release()
                await self._send(Running(sessions, self._asked), send)
        except OutriderError as error:
            await self._fail(with_field(error, self._asked.field_names), send)

    @abstractmethod
    async def _send(self, running: Running, send: Send) -> None:
        """Run the sessions and send the answer, an error before its first byte excepted."""

    async def _fail(self, error: OutriderError, send: Send) -> None:
        raise error

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has left."""
        await left(receive)

    async def _cut_off(self, send: Send) -> None:
        """The server ends before the answer does."""

    def _headers_of(self, content_type: bytes) -> list[tuple[bytes, bytes]]:
        name = self._asked.label or self._asked.answer_id
        headers = [(b"content-type", content_type), (REQUEST_ID, name.encode())]
        if self._asked.warning:
            headers.append((WARNING.lower().encode(), self._asked.warning.encode()))
        return headers


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class WholeAnswer(Answer):
    """An answer in one piece."""

    async def _send(self, running: Running, send: Send) -> None:
        told: dict[int, Told] = {}

        async def take(choice: Choice, delta: OutputDelta) -> None:
            if not choice.is_plain:
                told.setdefault(choice.index, Told()).add(choice.take(delta))

        await running.run(take)
        if sum(each.num_positions for each in told.values()) <= MAX_INLINE_POSITIONS:
            content = _json(self._body(running, told)).encode()
        else:  # which takes seconds if there are many
            content = await asyncio.to_thread(self._written, running, told)
        headers = self._headers_of(b"application/json")
        headers.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _written(self, running: Running, told: dict[int, Told]) -> bytes:
        return "".join(in_pieces(self._body(running, told), POSITION_LEVEL)).encode()

    def _body(self, running: Running, told: dict[int, Told]) -> dict[str, Any]:
        wanted, sessions = self._asked.wanted, running.sessions
        body = self._asked.head("chat.completion" if wanted.is_chat else "text_completion")
        body["choices"] = choices = []
        for choice in running.choices:
            shown: dict[str, Any] = {"index": choice.index, "text": choice.text}
            if wanted.is_chat:
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                shown = {"index": choice.index, "message": message}
            each = told.get(choice.index, Told())
            choices.append(shown | choice.details(each, is_first=True, is_last=True))
        body["usage"] = usage(sessions)
        body["speculation_stats"] = speculation_stats(sessions)
        body["metrics"] = request_metrics(sessions)
        if wanted.is_chat and wanted.token_ids:
            body["prompt_token_ids"] = list(sessions[0].prepared.spec.prompt_ids)
        if wanted.is_chat and wanted.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(told[0].prompt_positions)
        return body


def in_pieces(value: Any, levels: int) -> Iterator[str]:
    """The JSON of a value, that of each member so many levels down by itself: as long as one is
    encoded no other thread runs."""
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
