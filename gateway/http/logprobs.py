"""Log-probabilities in the shapes of completions and of chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from outrider.text.outputs import Logprob, PositionLogprobs

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class Entry(NamedTuple):
    """One position: its token and the log-probabilities of it and others; None for the first token
    of a prompt."""

    token_id: int
    known: PositionLogprobs | None
    text: str = ""  # of the token, where `known` is None


class TokenNames:
    """Names of tokens: their text, or `token_id:N` if the client requests it."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids

    def name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text


def chat_logprobs(entries: Iterable[Entry], num_top: int, names: TokenNames) -> dict[str, Any]:
    content = []
    for entry in entries:
        known = entry.known or {}
        own = _of_chat(entry.token_id, known[entry.token_id], names)
        best = list(known.items())[:num_top]
        content.append(own | {"top_logprobs": [_of_chat(t, each, names) for t, each in best]})
    return {"content": content, "refusal": None}


def _of_chat(token_id: int, found: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id, found.decoded_token),
        "logprob": max(found.logprob, MIN_LOGPROB),
        "bytes": list(found.decoded_token.encode(errors="replace")),
    }


def completion_logprobs(entries: Sequence[Entry], names: TokenNames, offset: int) -> dict[str, Any]:
    """`offset` is where the first of them begins in the text."""
    tokens, own, tops, offsets = [], [], [], []
    for entry in entries:
        known = entry.known
        text = entry.text if known is None else known[entry.token_id].decoded_token
        tokens.append(names.name(entry.token_id, text))
        own.append(None if known is None else max(known[entry.token_id].logprob, MIN_LOGPROB))
        tops.append(None if known is None else _tops(known, names))
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": own,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _tops(known: PositionLogprobs, names: TokenNames) -> dict[str, float]:
    """By name; of tokens with equal text, the likeliest."""
    found: dict[str, float] = {}
    for token_id, each in known.items():
        found.setdefault(names.name(token_id, each.decoded_token), max(each.logprob, MIN_LOGPROB))
    return found


def prompt_logprobs(positions: Iterable[PositionLogprobs | None]) -> list[Any]:
    """In vLLM's shape: for each position null, or an object by token id."""
    return [
        position
        and {
            str(token_id): {
                "logprob": max(found.logprob, MIN_LOGPROB),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in position.items()
        }
        for position in positions
    ]


def num_chars(entries: Iterable[Entry]) -> int:
    """The length of their text, by which the offsets of completions advance."""
    return sum(
        len(entry.text if entry.known is None else entry.known[entry.token_id].decoded_token)
        for entry in entries
    )
