"""Token ids to text, a token at a time, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Enough tokens of context for a tokenizer to decide on spaces and joined bytes.
_CONTEXT = 6
_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character yet


class Detokenizer:
    """Incremental decoding: text is handed out as soon as no later token can change it."""

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._context = 0  # tokens from here on are decoded together
        self._read = len(self._ids)  # tokens before this one have been handed out

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """What is left when no token follows, unfinished characters included."""
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        self._context = self._read = len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text


class StopStrings:
    """Finds the first stop string in a growing text, and holds back what may be part of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string if one is complete.

        Nothing behind a stop string is ever returned, and nothing of it unless `include`.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once it can no longer become a stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
