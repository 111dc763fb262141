"""The prompts of the comparison: Spec-Bench's groups, and evaluation sets never trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from outrider.benchmarks.prompts import GROUPS, Question, encode_question, read_questions
from outrider.errors import ConfigError
from outrider.loadtest.prompts.bundled import SETS

HELD_OUT = ("humaneval", "mbpp", "arena-hard", "oasst")
ALL_GROUPS = (*GROUPS, *HELD_OUT)
LENGTHS = (256, 1200)
"""Upper ends of the reported length groups: acceptance may be lower behind longer prompts."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    group: str
    ids: tuple[int, ...]


def select_prompts(
    groups: Sequence[str], per_group: int, tokenizer: Any, longest: int
) -> list[BenchPrompt]:
    """The first `per_group` prompts of each group with at most `longest` tokens, groups
    interleaved; all prompts of a smaller group."""
    for name in groups:
        if name not in ALL_GROUPS:
            raise ConfigError(f"group {name!r} is unknown; choose from {', '.join(ALL_GROUPS)}.")
    if per_group < 1:
        raise ConfigError(f"{per_group} prompts of each group are too few; give 1 or more.")

    def fitting(name: str) -> Iterator[BenchPrompt]:
        return (each for each in _encoded_prompts(name, tokenizer) if len(each.ids) <= longest)

    chosen = [list(islice(fitting(name), per_group)) for name in groups]
    return [own[turn] for turn in range(per_group) for own in chosen if turn < len(own)]


def first_of_each_group(prompts: Sequence[BenchPrompt], per_group: int) -> list[BenchPrompt]:
    """The first `per_group` of each group, in the same order."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.group] = seen.get(prompt.group, 0) + 1
        if seen[prompt.group] <= per_group:
            kept.append(prompt)
    return kept


def _encoded_prompts(group: str, tokenizer: Any) -> Iterator[BenchPrompt]:
    if group in GROUPS:
        for question in read_questions():
            if question.group == group:
                yield BenchPrompt(group, tuple(encode_question(question, tokenizer)))
        return
    for found in SETS[group]():
        prompt = found.prompt
        text = prompt.turns[0] if prompt.text is None else prompt.text
        # A bare text is continued as it is, without the chat template.
        ids = encode_question(Question(0, group, (text,)), tokenizer, chat=prompt.text is None)
        yield BenchPrompt(group, tuple(ids))
