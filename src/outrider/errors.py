"""Everything Outrider raises on purpose.

A message names the field, the value and the remedy in one sentence, so that a command can print
it as it is. `exit_code` is what the command line leaves with.
"""

from __future__ import annotations

import reprlib
from typing import Any

MAX_SHOWN_CHARS = 60

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_SHOWN_CHARS
_repr.maxlevel = 2


def shown(value: Any) -> str:
    """A value of a request, in a few words however much it is."""
    try:
        text = _repr.repr(value)
    except ValueError:  # a number with too many digits to be written
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


class OutriderError(Exception):
    """Base of all errors a user can cause or must hear about. `retry_after_s` is when the same may
    go well, where somebody knows."""

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
    """A prompt, or a prompt with the output asked for, is longer than the model's context. In the
    words and with the code that clients look for."""

    code = "context_length_exceeded"

    def __init__(self, max_model_len: int, however: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, {however}"
        )


class UnknownParameterError(RequestError, TypeError):
    """A keyword that nothing answers to: to Python a wrong call, to us a wrong request."""


class ModelError(OutriderError):
    """A checkpoint is missing, damaged, of an unknown kind, or does not fit its partner."""


class CapacityError(OutriderError):
    """There is too little memory for what was asked."""


class EngineDeadError(OutriderError):
    """The step loop has stopped; nothing more will be generated."""
