"""What the events of an OpenAI-compatible stream say, written into a reply.

An event is no token: under speculation it carries several. Tokens are counted from ids where the
server sends them (vLLM: `return_token_ids`), else from the usage of each event (vLLM:
`continuous_usage_stats`; llama.cpp: `timings_per_token`), else from the usage at the end, else by
a tokeniser, else by nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from outrider.bench.load.plain import plain
from outrider.bench.load.records import CountedBy, Speculated
from outrider.bench.load.targets.base import Reply, TargetFault
from outrider.bench.load.targets.sse import EventSplitter, EventTooLongError

MAX_MESSAGE_CHARS = 300
MAX_ANSWER_BYTES = 256 * 2**20
_MAX_FINISH_CHARS = 40
_MAX_NUMBER = 10**9  # of tokens or rounds; more is no number of them
_DONE = b"[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")

# What servers call the same number.
_ROUNDS = ("rounds", "num_drafts", "spec_verify_ct")
_DRAFTED = ("drafted", "drafted_tokens", "num_draft_tokens", "draft_n")
_ACCEPTED = ("accepted", "accepted_tokens", "num_accepted_tokens", "draft_n_accepted")

# Half the time of `json.loads`, which looks for other encodings of bytes and for blanks.
_decode = json.JSONDecoder().raw_decode

CountTokens = Callable[[str], int]


class Answer:
    """Reads one stream; `is_done` once the server has said that this was all."""

    __slots__ = (
        *("_counts_each", "_count", "_reply", "_size", "_splitter", "_sum", "_told"),
        "is_done",
    )

    def __init__(self, reply: Reply, count_tokens: CountTokens | None) -> None:
        self.is_done = False
        self._reply = reply
        self._count = count_tokens
        self._splitter = EventSplitter()
        self._size = 0  # bytes so far
        self._counts_each = True  # every update so far came with its number of tokens
        self._told: dict[int, int] = {}  # by choice: tokens told by usage so far
        self._sum: int | None = None  # of the answer, as usage tells it

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
                return  # what comes behind it is none of the answer, however the network cuts it
            self._take(event)

    def end(self) -> None:
        """The stream has ended: settle the counts, or raise if it ended too soon."""
        rest = self._splitter.end()
        if rest == _DONE:
            self.is_done = True
        elif rest is not None and not self.is_done:
            # Without the blank line after it an event may be whole, or cut.
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
        """Count what has arrived; also for an answer that failed."""
        reply = self._reply
        if len(reply.update_tokens) != len(reply.update_s):  # some came without their number
            reply.update_tokens.clear()
            reply.output_tokens = len(reply.token_ids)
        elif reply.counted_by is CountedBy.IDS:
            return
        if self._sum is not None or self._told:
            told = sum(self._told.values()) if self._sum is None else self._sum
            reply.output_tokens, reply.counted_by = told, CountedBy.USAGE
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
                raise TypeError("its text is none")
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
                    raise TypeError("its token_ids are none")
                reply.token_ids += ids
                reply.counted_by = CountedBy.IDS
                reply.update(len(ids))
            return
        if self._counts_each and (total := _running_total(usage, event)) is not None:
            index = choice.get("index", 0)
            new = total - self._told.get(index, 0)
            self._told[index] = total
            if new > 0:
                reply.update(new)
        elif text or (delta and delta.get("tool_calls")):
            self._counts_each = False
            reply.update(None)

    def _take_usage(self, usage: dict[str, Any], is_last: bool) -> None:
        reply = self._reply
        reply.prompt_tokens = _number(usage, "prompt_tokens")
        if details := usage.get("prompt_tokens_details"):
            reply.cached_tokens = _number(details, "cached_tokens")
        if is_last or not self._counts_each:
            self._sum = _number(usage, "completion_tokens")
        if "speculation" in usage:
            self._take_speculation(usage["speculation"])

    def _take_extras(self, event: dict[str, Any]) -> None:
        if timings := event.get("timings"):
            if not self._counts_each and self._sum is None:
                self._sum = _number(timings, "predicted_n")
            if "draft_n" in timings:
                self._take_speculation(timings)
        if speculation := event.get("speculation"):
            self._take_speculation(speculation)

    def _take_speculation(self, told: Any) -> None:
        if isinstance(told, dict):
            by_accepted = _numbers(told.get("rounds_by_accepted"))
            self._reply.speculated = Speculated(
                rounds=_first(told, _ROUNDS),
                drafted=_first(told, _DRAFTED),
                accepted=_first(told, _ACCEPTED),
                rounds_by_accepted=by_accepted,
            )


def error_text(error: Any) -> str:
    """What a server says about an error, whatever shape it has, cut to a length one can print."""
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
    """Tokens of a choice so far, if the server tells them with every event."""
    told = _number(usage, "completion_tokens") if usage else None
    if told is None and (timings := event.get("timings")):
        told = _number(timings, "predicted_n")
    return told


def _first(told: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((n for name in names if (n := _number(told, name)) is not None), 0)


def _number(told: dict[str, Any], name: str) -> int | None:
    value = told.get(name)
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER  # True is an int, too


def _numbers(value: Any) -> list[int]:
    return value if isinstance(value, list) and all(map(_is_number, value)) else []


def _whole(text: str) -> str:
    """With a character that was sent in two halves put together; half of one is replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
