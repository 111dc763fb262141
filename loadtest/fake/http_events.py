"""Response bytes of the fake OpenAI server, built once per response format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.loadtest.fake.script import Script

PROMPT_TOKENS, CACHED_TOKENS = 11, 3
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Options of a request that change the bytes of its response."""

    is_chat: bool
    has_usage: bool
    has_running_usage: bool
    num_updates: int


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def updates_of(script: Script, response_format: ResponseFormat) -> list[bytes]:
    """One event per update; the first includes the role event, the last the final events."""
    events = [
        _update(script, response_format, number) for number in range(response_format.num_updates)
    ]
    if not events:
        events = [b""]
    if response_format.is_chat:
        events[0] = (
            event(_frame(response_format, {"delta": {"role": "assistant", "content": ""}}))
            + events[0]
        )
    last = _frame(response_format, _piece(response_format, "") | {"finish_reason": "length"})
    if response_format.has_running_usage:
        last["usage"] = _usage(script, response_format.num_updates)
    events[-1] += event(last)
    if response_format.has_usage:
        frame = _frame(response_format, {}) | {
            "usage": _usage(script, response_format.num_updates),
            "choices": [],
        }
        events[-1] += event(frame)
    events[-1] += b"data: [DONE]\n\n"
    return events


def error_answer(status: int, reason: str, retry_after_s: float | None) -> bytes:
    body = json.dumps({"error": {"message": f"scripted {reason.lower()}", "code": status}}).encode()
    retry = b"" if retry_after_s is None else b"Retry-After: %g\r\n" % retry_after_s
    return whole_answer(b"%d %b" % (status, reason.encode()), body, retry)


def whole_answer(status: bytes, body: bytes, more_headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status,
        more_headers,
        len(body),
        body,
    )


def _update(script: Script, response_format: ResponseFormat, number: int) -> bytes:
    choice = _piece(response_format, script.word * script.tokens_per_update)
    if script.has_ids:
        choice["token_ids"] = script.token_ids(number)
    frame = _frame(response_format, choice)
    if response_format.has_running_usage:
        frame["usage"] = _usage(script, number + 1)
    return event(frame)


def _piece(response_format: ResponseFormat, text: str) -> dict[str, Any]:
    return {"delta": {"content": text}} if response_format.is_chat else {"text": text}


def _frame(response_format: ResponseFormat, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "fake-1",
        "object": "chat.completion.chunk" if response_format.is_chat else "text_completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "finish_reason": None} | choice],
    }


def _usage(script: Script, num_updates: int) -> dict[str, Any]:
    written = num_updates * script.tokens_per_update
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": written,
        "total_tokens": PROMPT_TOKENS + written,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
