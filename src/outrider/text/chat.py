"""Renders conversations through a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.text.messages import checked_kwargs, template_messages
from outrider.text.templates import TemplateProcesses
from outrider.text.tokenizer import Tokenizer

# Larger conversations take a template long, so they are rendered in a subprocess.
MAX_INLINE_CHARS, MAX_INLINE_MESSAGES = 64 * 2**10, 256
MAX_TEMPLATE_BYTES = 2**20
MAX_REQUEST_TEMPLATE_CHARS = 128 * 2**10  # of a template in a request
_MAX_ERROR_CHARS = 300


class ChatTemplate:
    """The model's chat template, or `own` instead. Thread-safe.

    With `processes`, templates in requests are untrusted and run there, as do long conversations;
    without, templates are the user's own and run here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        own: str | None = None,
        processes: TemplateProcesses | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._processes = processes
        self._default: str | None = own
        if own is None and tokenizer is not None and tokenizer.chat_template:
            self._default = _template_of(tokenizer)

    @property
    def exists(self) -> bool:
        return self._tokenizer is not None and self._default is not None

    def render(
        self,
        messages: Any,
        template: str | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises `RequestError` with the template's own message if it refuses."""
        chosen = self._default if template is None else template
        if self._tokenizer is None or chosen is None:
            raise RequestError("the model has no chat template; give one or use generate().")
        if self._processes is not None and len(chosen) > MAX_REQUEST_TEMPLATE_CHARS and template:
            raise RequestError(
                f"the chat template has {len(chosen)} characters; one that comes with a request "
                f"may have {MAX_REQUEST_TEMPLATE_CHARS}, so shorten it."
            )
        read = template_messages(messages, chosen)
        further = checked_kwargs(kwargs)
        special_tokens = self._tokenizer.special_tokens_map
        for name in further.keys() & special_tokens.keys():
            raise RequestError(
                f"chat_template_kwargs names {name!r}, which is the tokenizer's; leave it out."
            )
        try:
            if self._processes is not None and (template is not None or _is_long(read)):
                return self._processes.render(
                    chosen, read, add_generation_prompt, {**special_tokens, **further}
                )
            from outrider.text.rendering import render  # imports Jinja, for conversations only

            return render(chosen, read, add_generation_prompt, {**special_tokens, **further})
        except OutriderError:
            raise
        # A template is a program, and may raise anything.
        except Exception as error:
            raise RequestError(
                f"the chat template refuses the conversation ({_one_line(error)}); "
                "give messages as {'role': ..., 'content': ...} in an order it accepts."
            ) from error


def read_template(path: str) -> str:
    """Read and compile the template in a file; raises `ConfigError`."""
    try:
        data = Path(path).read_bytes()
        if len(data) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"it has more than {MAX_TEMPLATE_BYTES} bytes")
        text = data.decode()
        from outrider.text.rendering import compiled

        compiled(text)
    except OSError as error:
        raise ConfigError(
            f"server.chat_template is {path!r}, which cannot be read ({error.strerror}); name a "
            "Jinja file."
        ) from None
    # Jinja's own exceptions: naming them would import Jinja before it is needed.
    except Exception as error:
        raise ConfigError(
            f"server.chat_template is {path!r}, which is no chat template ({error}); correct it or "
            "leave it out."
        ) from None
    return text


def _one_line(error: Exception) -> str:
    """The error in one printable line: a template's message may hold anything."""
    text = str(error)[:_MAX_ERROR_CHARS] or type(error).__name__
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _template_of(tokenizer: Tokenizer) -> str | None:
    """The template for conversations without tools, if the model has several."""
    try:
        found: str = tokenizer.get_chat_template()
    except ValueError:
        return None
    return found


def _is_long(messages: list[dict[str, Any]]) -> bool:
    num_chars = sum(len(message["content"]) for message in messages)
    return len(messages) > MAX_INLINE_MESSAGES or num_chars > MAX_INLINE_CHARS
