"""Checks the messages of a conversation, from any protocol, and normalizes them for chat
templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from outrider.errors import RequestError

Message: TypeAlias = Mapping[str, Any]

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # of a message
MAX_MESSAGE_FIELDS = 64
MAX_KWARGS_CHARS = 16 * 2**10
KNOWN_ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, and the field with the text."""
# Names that `transformers` or we pass to templates, or that are its own parameters.
RESERVED_KWARGS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "raise_exception", "strftime_now"),
    }
)
_SHOWN_CHARS = 80
# A lookahead at each quote, because texts may contain apostrophes; words are short.
_NAMED = re.compile(r"""(?=['"]([^'"]{1,80})['"])|\.(\w{1,80})\b""")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt before the chat template is applied."""

    messages: Sequence[Message]
    template: str | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def template_messages(messages: Any, template: str) -> list[dict[str, Any]]:
    """The messages with each `content` as one text and only roles that the template knows.

    Besides the usual roles, those the template names are accepted; a template without `developer`
    gets `system` instead. Raises `RequestError`.
    """
    check_conversation(messages)
    named = _named_in(template)
    return [_read(f"messages[{at}]", message, named) for at, message in enumerate(messages)]


def check_conversation(messages: Any) -> None:
    """Check that it is a list of messages, neither empty nor too long."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {_shown(messages)}; it must be a list of "
            "{'role': ..., 'content': ...}, as [{'role': 'user', 'content': 'Hello'}]."
        )
    if not messages:
        raise RequestError("the conversation is empty; give at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"the conversation has {len(messages)} messages; it may have {MAX_MESSAGES}, so "
            "leave out the oldest."
        )


def check_fields(place: str, message: Message) -> None:
    """Bound the number of fields: each costs memory and time."""
    if len(message) > MAX_MESSAGE_FIELDS:
        raise RequestError(
            f"{place} has {len(message)} fields; it may have {MAX_MESSAGE_FIELDS}, so leave out "
            "those that are empty."
        )


def content_text(place: str, content: Any, role: str) -> str:
    """The content as one text; parts are joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        if len(content) > MAX_PARTS:
            raise RequestError(
                f"{place}.content has {len(content)} parts; it may have {MAX_PARTS}, so put some "
                "together."
            )
        return "\n".join(
            _part_text(f"{place}.content[{at}]", part) for at, part in enumerate(content)
        )
    shown = "null" if content is None else _shown(content)
    raise RequestError(f"{place}.content is {shown}; it must be text or a list of text parts.")


def checked_kwargs(given: Any) -> dict[str, Any]:
    """Further template variables: a small JSON object without reserved names."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(f"chat_template_kwargs is {_shown(given)}; it must be an object.")
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_KWARGS:
            raise RequestError(
                f"chat_template_kwargs names {_shown(name)}, which is not the request's to set "
                "there; leave it out."
            )
    try:
        text = json.dumps(dict(given), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"chat_template_kwargs holds what JSON cannot ({error}); give plain values."
        ) from None
    if len(text) > MAX_KWARGS_CHARS:
        raise RequestError(
            f"chat_template_kwargs has {len(text)} characters as JSON; it may have "
            f"{MAX_KWARGS_CHARS}, so shorten it."
        )
    plain: dict[str, Any] = json.loads(text)
    return plain


def kwargs_from_json(text: str) -> dict[str, Any]:
    """The kwargs of a protocol that sends them as JSON text; empty is none."""
    if not text:
        return {}
    if len(text) > MAX_KWARGS_CHARS:
        raise RequestError(
            f"template_kwargs_json has {len(text)} characters; it may have {MAX_KWARGS_CHARS}, so "
            "shorten it."
        )
    try:
        return checked_kwargs(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"template_kwargs_json is no JSON ({error}); give an object, as "
            '{"enable_thinking": false}.'
        ) from None


def _read(place: str, message: Any, named: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{place} is {_shown(message)}; it must be {{'role': ..., 'content': ...}}."
        )
    role = _role(place, message.get("role"), named)
    if "content" not in message and role != "assistant":
        raise RequestError(f"{place} has no content; give it text.")
    read = {"role": role, "content": content_text(place, message.get("content"), role)}
    for name, value in message.items():
        if name in read or value is None or value in ([], {}, ""):
            continue
        if name == "tool_calls":
            raise RequestError(f"{place}.tool_calls is not supported; leave it out.")
        if name != "name" and name not in named:
            raise RequestError(
                f"{place}.{_cut(str(name))} is not supported, as the chat template does nothing "
                "with it; leave it out."
            )
        if not isinstance(value, str):
            raise RequestError(f"{place}.{name} is {_shown(value)}; it must be text.")
        read[name] = value
    return read


def _role(place: str, role: Any, named: frozenset[str]) -> str:
    if not isinstance(role, str) or not (role in KNOWN_ROLES or role in named):
        shown = "missing" if role is None else _shown(role)
        known = ", ".join(map(repr, KNOWN_ROLES[:-1])) + f" or {KNOWN_ROLES[-1]!r}"
        raise RequestError(f"{place}.role is {shown}; it must be {known}.")
    return "system" if role == "developer" and role not in named else role


def _part_text(place: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{place} is {_shown(part)}; it must be {{'type': 'text', ...}}.")
    if kind not in TEXT_PARTS:
        raise RequestError(
            f"{place} is a part of type {_shown(kind)}, which this model cannot read; give text "
            "only."
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{place}.{TEXT_PARTS[kind]} is {_shown(text)}; it must be text.")
    return text


@lru_cache(maxsize=8)
def _named_in(template: str) -> frozenset[str]:
    """The words that a template has as a string or an attribute, and so knows. Collected once:
    names from clients are then looked up, not searched for in the template."""
    return frozenset(text or attribute for text, attribute in _NAMED.findall(template))


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
