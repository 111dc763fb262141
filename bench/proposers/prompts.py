"""The prompts proposers are compared on: Spec-Bench's groups, and sets no training has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from outrider.bench.load.prompts.bundled import SETS
from outrider.bench.prompts import GROUPS, Question, encode_question, read_questions
from outrider.errors import ConfigError

HELD_OUT = ("humaneval", "mbpp", "arena-hard", "oasst")
ALL_GROUPS = (*GROUPS, *HELD_OUT)
LENGTHS = (256, 1200)
"""Upper ends of what is reported apart: drafts may guess badly behind longer prompts."""


@dataclass(frozen=True, slots=True)
class Ask:
    group: str
    ids: tuple[int, ...]


def select_asks(groups: Sequence[str], per_group: int, tokenizer: Any, longest: int) -> list[Ask]:
    """The first `per_group` prompts of each group that have at most `longest` tokens, groups taking
    turns; of a group that has fewer, all of them."""
    for name in groups:
        if name not in ALL_GROUPS:
            raise ConfigError(f"group {name!r} is unknown; choose from {', '.join(ALL_GROUPS)}.")
    if per_group < 1:
        raise ConfigError(f"{per_group} prompts of each group were asked for; ask for 1 or more.")
    chosen = [
        list(islice((ask for ask in _asks(name, tokenizer) if len(ask.ids) <= longest), per_group))
        for name in groups
    ]
    return [own[turn] for turn in range(per_group) for own in chosen if turn < len(own)]


def first_of_each(asks: Sequence[Ask], per_group: int) -> list[Ask]:
    """The first so many of each group, in the same order."""
    seen: dict[str, int] = {}
    kept = []
    for ask in asks:
        seen[ask.group] = seen.get(ask.group, 0) + 1
        if seen[ask.group] <= per_group:
            kept.append(ask)
    return kept


def _asks(group: str, tokenizer: Any) -> Iterator[Ask]:
    if group in GROUPS:
        for question in read_questions():
            if question.group == group:
                yield Ask(group, tuple(encode_question(question, tokenizer)))
        return
    for found in SETS[group]():
        prompt = found.prompt
        text = prompt.turns[0] if prompt.text is None else prompt.text
        # A prompt that is a text is to be gone on with as it is.
        ids = encode_question(Question(0, group, (text,)), tokenizer, chat=prompt.text is None)
        yield Ask(group, tuple(ids))
