"""Conversations between protobuf messages and our own types, in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import RequestError
from outrider.proto import generation_pb2
from outrider.text.messages import (
    Conversation,
    check_conversation,
    checked_kwargs,
    content_text,
    kwargs_from_json,
)


def conversation_from_proto(chat: generation_pb2.Conversation) -> Conversation:
    check_conversation(chat.messages)  # bounds their number first
    return Conversation(
        [_message(f"messages[{at}]", each) for at, each in enumerate(chat.messages)],
        chat.template if chat.HasField("template") else None,
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        kwargs_from_json(chat.template_kwargs_json),
    )


def _message(place: str, message: generation_pb2.ChatMessage) -> dict[str, Any]:
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        if message.content:
            raise RequestError(f"{place} has both content and parts; give one of them.")
        read["content"] = [
            _part(f"{place}.parts[{at}]", part) for at, part in enumerate(message.parts)
        ]
    if message.name:
        read["name"] = message.name
    return read


def _part(place: str, part: generation_pb2.ContentPart) -> str:
    if not part.HasField("text"):
        raise RequestError(f"{place} holds no text, which is all this model can read; give text.")
    return part.text


def put_conversation(chat: generation_pb2.Conversation, given: Conversation) -> None:
    """Raises `RequestError` if it holds what the protocol's messages cannot."""
    check_conversation(given.messages)
    for at, message in enumerate(given.messages):
        _put_message(f"messages[{at}]", chat.messages.add(), message)
    if given.template is not None:
        chat.template = given.template
    if not given.add_generation_prompt:
        chat.add_generation_prompt = False
    if kwargs := checked_kwargs(given.template_kwargs):
        chat.template_kwargs_json = json.dumps(kwargs)


def tokenize_request(
    prompt: Any, add_special_tokens: bool, chat_options: dict[str, Any]
) -> generation_pb2.TokenizeRequest:
    """`chat_options` are those of a conversation, by the names that `Client.chat` has for them."""
    request = generation_pb2.TokenizeRequest()
    conversation = Conversation(
        prompt,
        chat_options.pop("chat_template", None),
        chat_options.pop("add_generation_prompt", True),
        chat_options.pop("chat_template_kwargs", None) or {},
    )
    for name in chat_options:
        raise RequestError(f"unknown option {name!r} of tokenize(); leave it out.")
    if isinstance(prompt, str):
        request.text = prompt
        if not add_special_tokens:
            request.add_special_tokens = False
    else:
        put_conversation(request.chat, conversation)
    return request


def detokenize_request(
    token_ids: Any, skip_special_tokens: bool
) -> generation_pb2.DetokenizeRequest:
    try:
        return generation_pb2.DetokenizeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
    except (TypeError, ValueError) as error:
        raise RequestError(f"token_ids must be a list of token ids >= 0: {error}.") from None


def _put_message(place: str, put: generation_pb2.ChatMessage, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} is {message!r}; give {{'role': ..., 'content': ...}}.")
    role = message.get("role")
    for name, value in message.items():
        if name in ("role", "name") and isinstance(value, str):
            setattr(put, name, value)
        elif name == "content":
            put.content = content_text(place, value, str(role))
        elif value is not None and value not in ([], {}, ""):
            raise RequestError(
                f"{place} has {name!r} as {value!r}; give {{'role': ..., 'content': ...}} and "
                "perhaps a name, all of them text."
            )
