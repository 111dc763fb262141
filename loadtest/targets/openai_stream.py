"""Parses the events of an OpenAI-compatible stream into a reply.

An event is not a token: with speculation it carries several. Tokens are counted by the first
source available: token ids (vLLM: `return_token_ids`), usage of each event (vLLM:
`continuous_usage_stats`; llama.cpp: `timings_per_token`), final usage, a tokeniser.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from outrider.loadtest.plain import plain
from outrider.loadtest.records import CountedBy, RequestSpeculation
from outrider.loadtest.targets.base import Reply, TargetFault
from outrider.loadtest.targets.sse import EventSplitter, EventTooLongError

MAX_MESSAGE_CHARS = 300
MAX_ANSWER_BYTES = 256 * 2**20
_MAX_FINISH_CHARS = 40
_MAX_NUMBER = 10**9  # of tokens or rounds; larger values are invalid
_DONE = b"[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")

# Names of the same counter in different servers.
_ROUNDS = ("rounds", "num_drafts", "spec_verify_ct")
_DRAFTED = ("drafted", "drafted_tokens", "num_draft_tokens", "draft_n")
_ACCEPTED = ("accepted", "accepted_tokens", "num_accepted_tokens", "draft_n_accepted")

# Twice as fast as `json.loads`, which detects encodings and skips whitespace.
_decode = json.JSONDecoder().raw_decode

CountTokens = Callable[[str], int]


class OpenAiStreamParser:
    """Parses one stream; `is_done` after [DONE]."""

    __slots__ = (
        *("_has_counts", "_count", "_reply", "_size", "_splitter", "_total", "_reported"),
        "is_done",
    )

    def __init__(self, reply: Reply, count_tokens: CountTokens | None) -> None:
        self.is_done = False
        self._reply = reply
        self._count = count_tokens
        self._splitter = EventSplitter()
        self._size = 0  # bytes so far
        self._has_counts = True  # every update so far had a token count
        self._reported: dict[int, int] = {}  # tokens so far by usage, per choice
        self._total: int | None = None  # tokens of the reply by usage

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            raise TargetFault("malformed", f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        try:
            events = self._splitter.feed(data)
        except EventTooLongError as error:
            raise TargetFault("malformed", str(error)) from None
        for event in events:
            if event == _DONE:
                self.is_done = True
                return  # data after [DONE] is not part of the reply
            self._take(event)

    def end(self) -> None:
        """Ends the stream: settles the counts, or raises if it is truncated."""
        rest = self._splitter.end()
        if rest == _DONE:
            self.is_done = True
        elif rest is not None and not self.is_done:
            # Without a blank line after it, the last event may be complete or cut.
            try:
                self._take(rest)
            except TargetFault as fault:
                if fault.kind == "malformed":
                    raise TargetFault("cut off", "the stream ended within an event") from None
                raise
        self.settle()
        if not self.is_done and self._reply.finish is None:
            raise TargetFault("cut off", "the stream ended without a reason and without [DONE]")

    def settle(self) -> None:
        """Settles the token counts, also of a failed reply."""
        reply = self._reply
        if len(reply.update_tokens) != len(reply.update_s):  # some updates had no count
            reply.update_tokens.clear()
            reply.output_tokens = len(reply.token_ids)
        elif reply.counted_by is CountedBy.IDS:
            return
        if self._total is not None or self._reported:
            reported = sum(self._reported.values()) if self._total is None else self._total
            reply.output_tokens, reply.counted_by = reported, CountedBy.USAGE
        elif self._count is not None and reply.counted_by is not CountedBy.IDS:
            reply.output_tokens = self._count(_whole("".join(reply.pieces)))
            reply.counted_by = CountedBy.TOKENISER

    # -- one event ----------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        event = _parsed(data)
        try:
            self._take_parts(event)
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            raise _malformed(f"not of the protocol's shape ({error})", data) from None

    def _take_parts(self, event: dict[str, Any]) -> None:
        if "error" in event and event["error"]:
            raise TargetFault("stream error", error_text(event["error"]))
        choices = event.get("choices")
        usage = event.get("usage")
        if choices:
            for choice in choices:
                self._take_choice(choice, event, usage)
        if usage:
            self._take_usage(usage, is_last=not choices)
        if "timings" in event or "speculation" in event:
            self._take_extras(event)

    def _take_choice(self, choice: dict[str, Any], event: dict[str, Any], usage: Any) -> None:
        reply = self._reply
        delta = choice.get("delta")
        text = _text_of(delta) if delta is not None else choice.get("text")
        if text:
            if not isinstance(text, str):
                raise TypeError("its text is not a string")
            reply.pieces.append(text)
        finish = choice.get("finish_reason")
        if finish:
            reply.finish = plain(str(finish)[:_MAX_FINISH_CHARS])
        ids = choice.get("token_ids")
        if ids is None:
            ids = event.get("tokens")
        if isinstance(ids, list):
            if ids:
                if not all(type(each) is int and abs(each) <= _MAX_NUMBER for each in ids):
                    raise TypeError("its token_ids are not integers")
                reply.token_ids += ids
                reply.counted_by = CountedBy.IDS
                reply.update(len(ids))
            return
        if self._has_counts and (total := _running_total(usage, event)) is not None:
            index = choice.get("index", 0)
            new = total - self._reported.get(index, 0)
            self._reported[index] = total
            if new > 0:
                reply.update(new)
        elif text or (delta and delta.get("tool_calls")):
            self._has_counts = False
            reply.update(None)

    def _take_usage(self, usage: dict[str, Any], is_last: bool) -> None:
        reply = self._reply
        reply.prompt_tokens = _number(usage, "prompt_tokens")
        if details := usage.get("prompt_tokens_details"):
            reply.cached_tokens = _number(details, "cached_tokens")
        if is_last or not self._has_counts:
            self._total = _number(usage, "completion_tokens")
        if "speculation" in usage:
            self._take_speculation(usage["speculation"])

    def _take_extras(self, event: dict[str, Any]) -> None:
        if timings := event.get("timings"):
            if not self._has_counts and self._total is None:
                self._total = _number(timings, "predicted_n")
            if "draft_n" in timings:
                self._take_speculation(timings)
        if speculation := event.get("speculation"):
            self._take_speculation(speculation)

    def _take_speculation(self, reported: Any) -> None:
        if isinstance(reported, dict):
            by_accepted = _numbers(reported.get("rounds_by_accepted"))
            self._reply.speculated = RequestSpeculation(
                rounds=_first(reported, _ROUNDS),
                drafted=_first(reported, _DRAFTED),
                accepted=_first(reported, _ACCEPTED),
                rounds_by_accepted=by_accepted,
            )


def error_text(error: Any) -> str:
    """The message of an error of any shape, truncated."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        error = inner
    text = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
    return text[:MAX_MESSAGE_CHARS]


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        text = event.decode().strip()
        found, end = _decode(text)
        if end != len(text):
            raise ValueError("more than one value")
    except (ValueError, RecursionError) as error:
        raise _malformed(str(error), event) from None
    if not isinstance(found, dict):
        raise _malformed("not an object", event)
    return found


def _malformed(problem: str, event: bytes) -> TargetFault:
    start = event[:MAX_MESSAGE_CHARS].decode(errors="replace")
    return TargetFault("malformed", f"{problem}: {start}"[:MAX_MESSAGE_CHARS])


def _text_of(delta: dict[str, Any]) -> str | None:
    content = delta.get("content")
    if content:
        return content if isinstance(content, str) else str(content)
    for name in _TEXTS:
        if text := delta.get(name):
            return str(text)
    return None


def _running_total(usage: Any, event: dict[str, Any]) -> int | None:
    """Tokens of a choice so far, if the server reports them with every event."""
    reported = _number(usage, "completion_tokens") if usage else None
    if reported is None and (timings := event.get("timings")):
        reported = _number(timings, "predicted_n")
    return reported


def _first(reported: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((n for name in names if (n := _number(reported, name)) is not None), 0)


def _number(reported: dict[str, Any], name: str) -> int | None:
    value = reported.get(name)
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER  # True is an int, too


def _numbers(value: Any) -> list[int]:
    return value if isinstance(value, list) and all(map(_is_number, value)) else []


def _whole(text: str) -> str:
    """Joins surrogate pairs sent separately; replaces lone surrogates."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
