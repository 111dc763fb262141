"""Prompts of a dataset, and the requests made of them."""

from __future__ import annotations

from dataclasses import dataclass

USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One entry of a dataset: a conversation's user turns, plain text, or token ids.

    Exactly one of `turns`, `text` and `token_ids` is set.
    """

    id: str  # unique in its dataset and stable across runs
    category: str
    turns: tuple[str, ...] = ()  # user messages; each is sent after the reply to the last
    history: tuple[Message, ...] = ()  # messages before the first turn
    text: str | None = None  # completed without a chat template
    token_ids: tuple[int, ...] | None = None
    output_tokens: int | None = None  # the length of the dataset's own reply
    is_natural: bool = True  # False: random tokens, whose acceptance is meaningless


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, independent of the target's protocol.

    Exactly one of `messages`, `text` and `token_ids` is set.
    """

    id: str  # prompt id and turn: equal in every arm, so replies can be paired
    category: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int = 64
    ignores_eos: bool = False  # generate exactly `max_tokens`
    temperature: float = 0.0
    seed: int | None = None
