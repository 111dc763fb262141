"""What is asked of a server: prompts as their readers give them, and one request of them."""

from __future__ import annotations

from dataclasses import dataclass

USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One entry of a set of prompts: a conversation's user turns, bare text, or token ids.

    Exactly one of `turns`, `text` and `token_ids` is given.
    """

    id: str  # unique in its set, and the same in every run
    category: str
    turns: tuple[str, ...] = ()  # what the user says, each after the answer to the one before
    history: tuple[Message, ...] = ()  # said before the first turn
    text: str | None = None  # continued as it is, without a chat template
    token_ids: tuple[int, ...] | None = None
    output_tokens: int | None = None  # the length of the answer where the prompt comes from
    is_natural: bool = True  # False: made-up tokens, whose acceptance says nothing


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what every target is given, whatever its protocol.

    Exactly one of `messages`, `text` and `token_ids` is given.
    """

    id: str  # the prompt's, with its turn: the same in every arm, so that answers can be paired
    category: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int = 64
    ignores_eos: bool = False  # exactly `max_tokens` long
    temperature: float = 0.0
    seed: int | None = None
