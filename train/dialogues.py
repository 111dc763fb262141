"""The markup of a chat template around the turns, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.text.chat import ChatTemplate
from outrider.text.tokenizer import Tokenizer

# No template contains these words, so they show where it puts the turns.
_FIRST, _ANSWER, _SECOND = "Xfirstturnq", "Xansweredq", "Xsecondturnq"


@dataclass(frozen=True, slots=True)
class Template:
    """Markup `before` the first user turn, `after` each user turn, and `between` an answer and the
    next turn. `ends` are the tokens that end a turn."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    between: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> Template | None:
        """None if the target has no chat template."""
        chat = ChatTemplate(tokenizer)
        if not chat.exists:
            return None
        first = {"role": "user", "content": _FIRST}
        answer = {"role": "assistant", "content": _ANSWER}
        second = {"role": "user", "content": _SECOND}
        before, after = _split(chat, [first], _FIRST)
        try:
            between = _split(chat, [first, answer, second], _SECOND)[0].partition(_ANSWER)[2]
        except OutriderError:
            between = ""  # the template takes a single turn only

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        after_ids = encode(after)
        ends = {*eos_ids, *after_ids[:1]}
        return cls(encode(before), after_ids, encode(between), tuple(sorted(ends)))


def _split(chat: ChatTemplate, messages: list[dict[str, Any]], mark: str) -> tuple[str, str]:
    try:
        before, found, after = chat.render(messages).partition(mark)
    except RequestError as error:
        raise ConfigError(f"the target's chat template cannot be used: {error}") from None
    if not found:
        raise ConfigError(
            "the target's chat template drops the user's message; give --documents only."
        )
    return before, after
