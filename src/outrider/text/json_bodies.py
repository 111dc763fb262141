"""Parses JSON request bodies strictly; large ones in a subprocess.

Parsing holds the GIL, and the result may take twenty times the body's memory. So a subprocess
counts the values before it parses them; its answer drops what no request needs and packs long lists
of token ids into arrays.
"""

from __future__ import annotations

import gc
import json
import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from outrider.errors import FieldRefusedError, RequestError, shown
from outrider.text.messages import (
    MAX_MESSAGES,
    check_conversation,
    check_fields,
    checked_kwargs,
    content_text,
)

MAX_PROMPTS = 128
MAX_ENTRIES = 4096  # of a list or an object that is not a prompt, messages or allowed tokens
_LEAST_PACKED = 64
_MAX_CUT_ENTRIES, _MAX_CUT_LEVELS = 16, 3
_HUGE_NUMBER = re.compile(rb"[0-9]{19}")


def parse(body: bytes | bytearray, parse_int: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The body's JSON object; raises `RequestError` if it is not one."""
    try:
        found = json.loads(
            body, parse_int=parse_int, parse_constant=_refuse, object_pairs_hook=_unique
        )
    except RecursionError:
        raise RequestError("the body is nested too deeply; send a flatter one.") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON ({error}); send an object.") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body is {shown(found)}; it must be a JSON object.")
    return found


def _refuse(constant: str) -> NoReturn:
    raise RequestError(f"the body holds {constant}, which is not JSON; send finite numbers.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    raise FieldRefusedError(name[:64], f"{shown(name)} is in the body twice; send it once.")


# -- in a subprocess ----------------------------------------------------------------------------


def question(
    body: bytes | bytearray, known: list[str], max_model_len: int, vocab_size: int
) -> dict[str, Any]:
    """The subprocess's task for a body; `known` are the request's field names."""
    return {
        "body": body,
        "known": known,
        "max_values": MAX_PROMPTS * max_model_len + vocab_size + 4 * MAX_MESSAGES,
        "max_containers": 2 * MAX_MESSAGES + max_model_len,
        "max_allowed": vocab_size,
    }


def answer(task: Mapping[str, Any]) -> dict[str, Any]:
    """The body's fields, or the error's message and field."""
    gc.disable()  # JSON has no cycles, and collections would take most of the time
    body: bytes = task["body"]
    try:
        check_counts(body, task["max_values"], task["max_containers"])
        found = parse(body, _bounded_int if _HUGE_NUMBER.search(body) else None)
        known = frozenset(task["known"])
        return {
            "fields": {
                name: _compact(name, value, task["max_allowed"]) if name in known else _cut(value)
                for name, value in found.items()
            }
        }
    except RequestError as refused:
        return {"refused": str(refused), "param": getattr(refused, "param", "")}
    finally:
        gc.enable()


def check_counts(body: bytes, max_values: int, max_containers: int) -> None:
    """Count values and containers outside of strings, without parsing."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(plain.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    num_values = num_containers + outside.count(b",")
    for what, count, limit in (
        ("lists and objects", num_containers, max_containers),
        ("values", num_values, max_values),
    ):
        if count > limit:
            raise RequestError(
                f"the body has {count} {what}; with this model it may have {limit}, so send less "
                "at once."
            )


def _bounded_int(digits: str) -> int | float:
    """An integer beyond 64 bits, which no field accepts, as a float that msgpack can encode."""
    value = int(digits)
    return value if -(2**63) <= value < 2**64 else float(digits[:300])


def _compact(name: str, value: Any, max_allowed: int) -> Any:
    """A known field of a request."""
    limit = MAX_ENTRIES
    match name:
        case "messages" if isinstance(value, list):
            return _messages(value)
        case "chat_template_kwargs":
            return checked_kwargs(value)
        case "prompt" | "tokens" if isinstance(value, list):
            value = _packed(value)
            if isinstance(value, array):
                return value
            if len(value) <= MAX_PROMPTS:
                return [_packed(each) if isinstance(each, list) else each for each in value]
        case "allowed_token_ids":
            limit = max(max_allowed, MAX_ENTRIES)
    if isinstance(value, list | dict) and len(value) > limit:
        raise RequestError(
            f"{name} has {len(value)} entries, or some that are no token ids; it may have {limit}, "
            "so send fewer."
        )
    return value


def _packed(ids: list[Any]) -> Any:
    if len(ids) < _LEAST_PACKED or set(map(type, ids)) != {int}:
        return ids
    try:
        return array("I", ids)
    except OverflowError:
        return ids


def _messages(messages: list[Any]) -> list[Any]:
    check_conversation(messages)
    return [
        _message(f"messages[{at}]", each) if isinstance(each, dict) else _cut(each)
        for at, each in enumerate(messages)
    ]


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    check_fields(place, message)
    read = {name: value if name == "content" else _cut(value) for name, value in message.items()}
    if isinstance(read.get("content"), list):
        read["content"] = content_text(place, read["content"], str(read.get("role")))
    return read


def _cut(value: Any, levels: int = _MAX_CUT_LEVELS) -> Any:
    """Truncated to what an error message shows."""
    if isinstance(value, list):
        return [_cut(each, levels - 1) for each in value[:_MAX_CUT_ENTRIES]] if levels else []
    if isinstance(value, dict):
        few = list(value.items())[:_MAX_CUT_ENTRIES] if levels else ()
        return {name: _cut(each, levels - 1) for name, each in few}
    return value
