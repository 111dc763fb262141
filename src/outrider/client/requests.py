"""The messages a client sends, checked before they are sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from outrider.client.batches import plain_prompt
from outrider.errors import RequestError
from outrider.gateway.conversations import put_conversation
from outrider.gateway.convert import put_params
from outrider.gateway.results import Completion
from outrider.proto import generation_pb2
from outrider.scheduler.params import SamplingParams
from outrider.text.messages import Conversation

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Prompts: TypeAlias = list[str] | list[list[int]] | list[dict[str, Any]]
Params: TypeAlias = Any  # SamplingParams, or with several prompts one for each
Completions: TypeAlias = list[Completion]
ChatMessage: TypeAlias = Mapping[str, Any]

Put: TypeAlias = Callable[[generation_pb2.GenerateRequest], None]
"""Writes the prompt into a request."""

_OF_THE_REQUEST = ("model", "request_id", "priority", "cache_salt", "want_text_spans", "resumable")


def prompt_request(
    prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
) -> generation_pb2.GenerateRequest:
    """The message `Client.generate` sends, for those who bring a connection of their own."""
    return make_request(put_prompt(prompt), params, overrides)


def chat_request(
    messages: Sequence[ChatMessage], params: SamplingParams | None = None, **overrides: Any
) -> generation_pb2.GenerateRequest:
    """The message `Client.chat` sends, likewise."""
    return make_request(put_chat(messages, overrides), params, overrides)


def make_request(
    put: Put, params: SamplingParams | None, overrides: dict[str, Any]
) -> generation_pb2.GenerateRequest:
    """Raises before anything is sent if it cannot be right."""
    own = {name: overrides.pop(name) for name in _OF_THE_REQUEST if name in overrides}
    given = _given(params) | overrides
    checked = SamplingParams.from_mapping(given)
    try:
        request = generation_pb2.GenerateRequest(**own)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request has a wrong {', '.join(own)}: {error}.") from None
    try:
        put(request)
        put_params(request, checked, given)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RequestError(
            f"the request holds half a character ({half!r}); give whole ones."
        ) from None
    return request


def _given(params: SamplingParams | None) -> dict[str, Any]:
    if params is None:
        return {}
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def put_prompt(given: Prompt) -> Put:
    prompt = plain_prompt(given)

    def put(request: generation_pb2.GenerateRequest) -> None:
        if isinstance(prompt, str):
            request.text = prompt
            return
        try:
            request.token_ids.ids.extend(prompt)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"the prompt must be text or a list of token ids >= 0: {error}."
            ) from None
        request.token_ids.SetInParent()

    return put


def put_chat(messages: Sequence[ChatMessage], overrides: dict[str, Any]) -> Put:
    conversation = Conversation(
        messages,
        overrides.pop("chat_template", None),
        overrides.pop("add_generation_prompt", True),
        overrides.pop("chat_template_kwargs", None) or {},
    )

    def put(request: generation_pb2.GenerateRequest) -> None:
        put_conversation(request.chat, conversation)

    return put
