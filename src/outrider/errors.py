"""All exceptions that Outrider raises deliberately.

A message names the field, the value and the remedy in one sentence, so that a command can print
it unchanged. `exit_code` is the command line's exit code.
"""

from __future__ import annotations

import reprlib
from typing import Any

MAX_SHOWN_CHARS = 60

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_SHOWN_CHARS
_repr.maxlevel = 2


def shown(value: Any) -> str:
    """A value of a request, shortened for an error message."""
    try:
        text = _repr.repr(value)
    except ValueError:  # a number with too many digits to be written
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


class OutriderError(Exception):
    """Base of all errors a user can cause or must see. `retry_after_s` is when to retry, if
    known."""

    exit_code = 1
    retry_after_s: float | None = None

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class ConfigError(OutriderError):
    """A configuration value, flag, environment variable or file is wrong."""

    exit_code = 2


class RequestError(OutriderError):
    """A request cannot be served as it is: bad parameter, empty or over-long prompt."""

    exit_code = 2


class FieldRefusedError(RequestError):
    """A field of the request is wrong or not supported; `param` is its name."""

    def __init__(self, param: str, sentence: str) -> None:
        super().__init__(sentence)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt, or a prompt with the requested output, exceeds the model's context. Message and
    code are OpenAI's: clients match on them."""

    code = "context_length_exceeded"

    def __init__(self, max_model_len: int, however: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, {however}"
        )


class UnknownParameterError(RequestError, TypeError):
    """An unknown keyword argument: a TypeError to Python, a bad request to us."""


class ModelError(OutriderError):
    """A checkpoint is missing, damaged, of an unknown kind, or does not match its draft or
    target."""


class CapacityError(OutriderError):
    """There is too little memory, or no free slot, for what was requested."""


class EngineDeadError(OutriderError):
    """The step loop has stopped; nothing more will be generated."""
