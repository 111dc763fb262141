"""Incremental detokenization and stop strings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from outrider.text.plain_tokenizer import PlainTokenizer
from outrider.text.stop_automaton import StopAutomaton

# Enough tokens of context for a tokenizer to decide on spaces and joined bytes.
_CONTEXT = 6
# No character has more bytes, hence tokens: text further back is final.
_CHARACTER = 4
_MANY_UNFINISHED = 32
_UNFINISHED = "\ufffd"  # a decoder's output for incomplete characters


class Detokenizer:
    """Incremental decoding: releases text as soon as no later token can change it."""

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_ids = plain_decode(tokenizer)
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._context = 0  # tokens from here on are decoded together
        self._read = len(self._ids)  # the text of tokens before this one is released

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            # Bounds the work: long runs of such tokens must not be decoded again for each token.
            if self._is_skipped(token_id):
                self._ids.pop()
            elif len(self._ids) - self._read > _MANY_UNFINISHED:
                return self._decided(known, text)
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decided(self, known: str, text: str) -> str:
        """The text of tokens too far back to become part of a later character."""
        end = len(self._ids) - _CHARACTER
        decided = self._decode(self._ids[self._context : end])
        if len(decided) <= len(known) or not text.startswith(decided):
            return ""
        self._context, self._read = self._read, end
        return decided[len(known) :]

    def flush(self) -> str:
        """The rest of the text after the last token, incomplete characters included."""
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        self._context = self._read = len(self._ids)
        return text[len(known) :]

    def _is_skipped(self, token_id: int) -> bool:
        if not self._skip or self._decode([token_id]):
            return False
        return bool(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return self._decode_ids(ids, skip_special_tokens=self._skip)


@lru_cache(maxsize=16)
def plain_decode(tokenizer: Any) -> Callable[..., str]:
    """`tokenizer.decode` for a list of ids, without the argument checks, which take three quarters
    of its time, twice per token."""
    if isinstance(tokenizer, PlainTokenizer):
        plain: Callable[..., str] = tokenizer.backend_tokenizer.decode
        return plain
    kind = type(tokenizer)
    # Already imported if the tokenizer is from there.
    fast: Any = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerFast", None)
    is_usual = fast is not None and issubclass(kind, fast) and kind._decode is fast._decode
    if is_usual and not tokenizer.clean_up_tokenization_spaces:
        backend: Callable[..., str] = tokenizer.backend_tokenizer.decode
        return backend
    own: Callable[..., str] = tokenizer.decode
    return own


class StopStrings:
    """Finds the first stop string in a growing text, and holds back text that may begin one."""

    def __init__(self, stops: StopAutomaton, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""  # held-back text, as long as the state's depth

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to release, and the stop string if one is complete.

        Of several, the one that begins first, then the shortest. Text after a stop string is never
        returned, the stop string itself only with `include`.
        """
        if self._stops.is_empty:
            return text, None
        found = self._find(text)
        text, self._held = self._held + text, ""
        if found is not None:
            start, end = found
            self._state = 0
            return text[: end if self._include else start], text[start:end]
        shown = len(text) - self._stops.depth[self._state]
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The held-back text, once it can no longer become a stop string."""
        text, self._held, self._state = self._held, "", 0
        return text

    def _find(self, text: str) -> tuple[int, int] | None:
        """The position of the first stop string in held-back and new text."""
        stops, state = self._stops, self._state
        found: tuple[int, int] | None = None
        for end, letter in enumerate(text, start=len(self._held) + 1):
            state = stops.step(state, letter)
            start = end - stops.matched[state]
            if start < (found[0] if found else end):
                found = start, end
            if found and end - stops.depth[state] >= found[0]:
                break  # no partial match began earlier
        self._state = state
        return found
