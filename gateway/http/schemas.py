"""Request schemas of OpenAI's API, with vLLM's extra fields and our own.

Types are checked here. Values are checked once, by `SamplingParams`: its fields are passed through
unchanged, and null is the same as leaving a field out.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from outrider.errors import FieldRefusedError, shown
from outrider.gateway.http.errors import naming_fields
from outrider.gateway.http.fields import (
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    Refusal,
    check_extras,
    unknown_of,
)
from outrider.scheduler.params import SamplingParams
from outrider.text.input_processor import ProcessorInput
from outrider.text.json_bodies import MAX_PROMPTS
from outrider.text.messages import Conversation, check_conversation, check_fields

_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))

_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_Prompts = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _TEXTS, _NUMBERS, {"type": "array", "items": _NUMBERS}]}
    ),
]
_Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]})]
_Biases = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number"}},
                {"type": "null"},
            ]
        }
    ),
]
_TokenIds = Annotated[Any, WithJsonSchema({"anyOf": [_NUMBERS, {"type": "null"}]})]

# Fail at the first wrong entry: errors of a million entries would take seconds to collect.
_Texts = Annotated[list[str] | None, FailFast()]
_Messages = Annotated[list[dict[str, Any]], FailFast()]


def _unless_packed(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Arrays packed by the parser's child process hold whole numbers already."""
    return value if isinstance(value, array) else check(value)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """Optional contents of a stream."""

    include_usage: bool | None = Field(None, description="End with a chunk that counts tokens.")
    continuous_usage_stats: bool | None = Field(
        None, description="Count tokens in every chunk as well."
    )


class GenerationRequest(_Strict):
    """The fields that completions and chat share."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED

    model: str | None = Field(None, description="A name the model is served under, or any of them.")
    n: int | None = Field(None, description="Texts for each prompt; 1 if left out.")
    best_of: int | None = Field(None, description="The same number as n, if given at all.")
    max_tokens: int | None = Field(None, description="Maximum tokens of a text.")
    max_completion_tokens: int | None = Field(None, description="Another name of max_tokens.")
    stream: bool | None = Field(None, description="Stream the text as it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")

    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = Field(None, description="Sample from this share of the probability mass.")
    top_k: int | None = Field(
        None, description="Sample from the k likeliest tokens; 0 or -1 is all."
    )
    min_p: float | None = Field(
        None, description="Minimum probability, relative to the likeliest token."
    )
    presence_penalty: float | None = Field(None, description="-2 to 2.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    repetition_penalty: float | None = Field(None, description="From 0.01 to 100; 1 is none.")
    logit_bias: _Biases = Field(None, description="Added to logits, by token id, -100 to 100.")
    allowed_token_ids: _TokenIds = Field(None, description="Only these tokens are sampled.")
    bad_words: _Texts = Field(None, description="Words that are never generated.")
    seed: int | None = Field(None, description="The same seed gives the same text.")

    stop: _Stop = Field(None, description="Stop strings; the text ends before the first.")
    stop_token_ids: _TokenIds = Field(None, description="Stop tokens; the text ends at the first.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string.")
    ignore_eos: bool | None = Field(None, description="Continue past the EOS token.")
    min_tokens: int | None = Field(None, description="Minimum tokens of a text.")
    skip_special_tokens: bool | None = Field(None, description="Leave them out of the text.")

    prompt_logprobs: int | None = Field(
        None, description="Log-probabilities of the prompt's tokens and of this many top tokens."
    )
    return_token_ids: bool | None = Field(None, description="Return token ids beside the text.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Return tokens in logprobs as 'token_id:N'."
    )
    priority: int | None = Field(
        None, description="Lower runs sooner, -100 to 100; default 0. A key may have limits."
    )
    cache_salt: str | None = Field(
        None, description="Share prefix-cache blocks only with requests of the same salt."
    )
    request_id: str | None = Field(None, description="A label for the log, like X-Request-Id.")

    speculation: str | None = Field(
        None, description="The proposer: 'draft', 'ngram', or 'off'; never changes the text."
    )
    num_speculative_tokens: int | None = Field(None, description="Maximum depth of a round.")
    fix_depth: bool | None = Field(None, description="Always draft num_speculative_tokens.")
    return_speculation: bool | None = Field(
        None, description="Return the origin and the round of every piece of text."
    )

    @model_validator(mode="after")
    def checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Checks beyond the types of single fields."""
        check_extras(self.model_extra or {}, self.refused)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldRefusedError(
                "best_of",
                f"best_of is {self.best_of} but n is {self.n or 1}; choosing the best of several "
                "texts is not supported, so leave it out.",
            )
        if self.max_completion_tokens is not None and self.max_tokens not in (
            None,
            self.max_completion_tokens,
        ):
            raise FieldRefusedError(
                "max_completion_tokens",
                f"max_completion_tokens is {self.max_completion_tokens} but max_tokens is "
                f"{self.max_tokens}; they mean the same, so give one of them.",
            )
        if self.stream_options is not None and not self.stream:
            raise FieldRefusedError(
                "stream_options",
                "stream_options is given without stream; set stream to true or leave it out.",
            )

    def params(self) -> dict[str, Any]:
        """The given sampling parameters, by the names of `SamplingParams`."""
        given = {
            name: value
            for name in self.model_fields_set
            if name in _SAMPLING_FIELDS and (value := getattr(self, name)) is not None
        }
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        return given

    @property
    def unknown(self) -> list[str]:
        """Names of fields that are neither OpenAI's nor vLLM's nor ours."""
        return unknown_of(self.model_extra or {}, self.refused)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """A request of /v1/completions."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED | REFUSED_IN_COMPLETIONS

    prompt: _Prompts = Field(
        description=f"Text or token ids, or a list of either: up to {MAX_PROMPTS}."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        None, description="Log-probabilities of the tokens and of this many top tokens."
    )

    def check(self) -> None:
        super().check()
        self.prompts()

    def prompts(self) -> list[ProcessorInput]:
        """A list of prompts; token ids are checked against the vocabulary later."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not isinstance(given, list | array):
            raise FieldRefusedError(
                "prompt",
                f"prompt is {shown(given)}; it must be text, a list of token ids, or a list of "
                "either.",
            )
        if not given:
            raise FieldRefusedError("prompt", "prompt is empty; give at least one token.")
        if isinstance(given, array) or isinstance(given[0], int):
            return [given]
        if len(given) > MAX_PROMPTS:
            raise FieldRefusedError(
                "prompt",
                f"prompt is a list of {len(given)} prompts; it may have {MAX_PROMPTS}, so send "
                "the others in another request.",
            )
        for number, each in enumerate(given):
            if not isinstance(each, str | list | array):
                raise FieldRefusedError(
                    "prompt",
                    f"prompt[{number}] is {shown(each)}; it must be text or a list of token ids.",
                )
        return given


class ChatRequest(GenerationRequest):
    """A request of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED | REFUSED_IN_CHAT

    messages: _Messages = Field(description="The conversation, oldest first.")
    logprobs: bool | None = Field(None, description="Return log-probabilities of tokens.")
    top_logprobs: int | None = Field(
        None, description="And of this many top tokens; needs logprobs."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Append the assistant's header to the prompt; default true."
    )
    chat_template: str | None = Field(
        None, description="A chat template; only where the server allows it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Additional variables of the template."
    )
    reasoning_effort: str | None = Field(None, description="Passed to the template as a variable.")

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise FieldRefusedError(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true or "
                "leave it out.",
            )
        with naming_fields(("messages",)):
            check_conversation(self.messages)  # bounds their number before the loop
        for number, message in enumerate(self.messages):
            for name, refusal in REFUSED_IN_MESSAGES.items():
                refusal.check(f"messages[{number}].{name}", message.get(name))

    def params(self) -> dict[str, Any]:
        given = super().params()
        given.pop("logprobs", None)
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given

    def conversation(self) -> Conversation:
        more = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            more.setdefault("reasoning_effort", self.reasoning_effort)
        return conversation_of(self.messages, self.chat_template, self.add_generation_prompt, more)


class TokenizeRequest(_Strict):
    """A request of /tokenize: text, or a conversation."""

    model: str | None = Field(None, description="A name the model is served under.")
    prompt: str | None = Field(None, description="Text.")
    messages: Annotated[list[dict[str, Any]] | None, FailFast()] = Field(
        None, description="Or a conversation."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add special tokens such as BOS to text; default true."
    )
    add_generation_prompt: bool | None = Field(None, description="As for chat.")
    chat_template: str | None = Field(None, description="As for chat.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As for chat.")


class DetokenizeRequest(_Strict):
    """A request of /detokenize."""

    model: str | None = Field(None, description="A name the model is served under.")
    tokens: Annotated[list[int], FailFast(), WrapValidator(_unless_packed)] = Field(
        description="Token ids."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave them out of the text; default false."
    )


def conversation_of(
    messages: list[dict[str, Any]],
    template: str | None,
    add_generation_prompt: bool | None,
    more: Mapping[str, Any] | None,
) -> Conversation:
    """Empty fields of messages are dropped, except role and content."""
    check_conversation(messages)
    kept = []
    for at, message in enumerate(messages):
        check_fields(f"messages[{at}]", message)
        kept.append(
            {
                name: value
                for name, value in message.items()
                if name in ("role", "content") or not (value is None or value in ([], {}, ""))
            }
        )
    return Conversation(kept, template, add_generation_prompt is not False, dict(more or {}))
