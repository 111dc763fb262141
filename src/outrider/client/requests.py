"""Builds and checks the messages a client sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from outrider.api_types.conversations import put_conversation
from outrider.api_types.convert import put_params
from outrider.api_types.results import Completion
from outrider.errors import RequestError
from outrider.proto import generation_pb2
from outrider.scheduler.params import SamplingParams
from outrider.text.messages import Conversation
from outrider.text.prompts import Prompt

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
    """The message `Client.generate` sends, for callers with their own channel."""
    return make_request(put_prompt(prompt), params, overrides)


def chat_request(
    messages: Sequence[ChatMessage], params: SamplingParams | None = None, **overrides: Any
) -> generation_pb2.GenerateRequest:
    """The message `Client.chat` sends, likewise."""
    return make_request(put_chat(messages, overrides), params, overrides)


def make_request(
    put: Put, params: SamplingParams | None, overrides: dict[str, Any]
) -> generation_pb2.GenerateRequest:
    """Build a request; raises if it is invalid."""
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


def _plain_prompt(prompt: Any) -> Any:
    """Text or token ids, unpacked from the mapping that `LLM` accepts too."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not {"prompt", "prompt_token_ids"}.issuperset(prompt):
        raise RequestError(
            f"a prompt given as a mapping has the keys {sorted(map(str, prompt))}; it must have "
            "either 'prompt' or 'prompt_token_ids'."
        )
    return next(iter(prompt.values()))


def put_prompt(given: Prompt) -> Put:
    prompt = _plain_prompt(given)

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
