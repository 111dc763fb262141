"""Log-probabilities in the shapes of completions and of chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from outrider.text.outputs import Logprob, PositionLogprobs

LEAST = -9999.0  # in place of minus infinity, which JSON has not


class Entry(NamedTuple):
    """One position: which token stands there, and what is known of it and others. Of the first of
    a prompt nothing is."""

    token_id: int
    known: PositionLogprobs | None
    text: str = ""  # of the token, where nothing is known


class TokenNames:
    """How tokens are called: as text, or as numbers where the client asks for it."""

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
        "logprob": max(found.logprob, LEAST),
        "bytes": list(found.decoded_token.encode(errors="replace")),
    }


def completion_logprobs(entries: Sequence[Entry], names: TokenNames, offset: int) -> dict[str, Any]:
    """`offset` is where in the text the first of them begins."""
    tokens, own, tops, offsets = [], [], [], []
    for entry in entries:
        known = entry.known
        text = entry.text if known is None else known[entry.token_id].decoded_token
        tokens.append(names.name(entry.token_id, text))
        own.append(None if known is None else max(known[entry.token_id].logprob, LEAST))
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
    """By name; of tokens that are the same as text, the likeliest."""
    found: dict[str, float] = {}
    for token_id, each in known.items():
        found.setdefault(names.name(token_id, each.decoded_token), max(each.logprob, LEAST))
    return found


def prompt_logprobs(positions: Iterable[PositionLogprobs | None]) -> list[Any]:
    """As vLLM tells them: for each position null, or an object by token ids."""
    return [
        position
        and {
            str(token_id): {
                "logprob": max(found.logprob, LEAST),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in position.items()
        }
        for position in positions
    ]


def num_chars(entries: Iterable[Entry]) -> int:
    """How far the offsets of completions go on behind these."""
    return sum(
        len(entry.text if entry.known is None else entry.known[entry.token_id].decoded_token)
        for entry in entries
    )
