"""Spec-Bench prompts: 480 questions in six groups, the usual benchmark of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.input_files import json_rows
from outrider.loadtest.prompts.bundled import MT_BENCH, SPEC_BENCH, group_of

GROUPS = (MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True, slots=True)
class Question:
    question_id: int
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """The task the question belongs to, one of `GROUPS`."""
        return group_of(self.category)


def read_questions(path: Path = SPEC_BENCH) -> list[Question]:
    """All questions in the order of the file."""
    rows = [row for _, row in json_rows(path, "JSON lines of {question_id, category, turns}")]
    return [Question(row["question_id"], row["category"], tuple(row["turns"])) for row in rows]


def select_questions(
    questions: Iterable[Question], per_group: int, groups: Sequence[str] = GROUPS
) -> list[Question]:
    """The first `per_group` questions of each group, interleaved, so that drift over a run affects
    all groups alike."""
    by_group: dict[str, list[Question]] = {name: [] for name in GROUPS}
    for question in questions:
        by_group[question.group].append(question)
    for name in groups:
        if name not in by_group:
            raise ConfigError(f"group {name!r} is unknown; choose from {', '.join(GROUPS)}.")
        if not 1 <= per_group <= len(by_group[name]):
            raise ConfigError(
                f"per_group is {per_group} but group {name!r} has {len(by_group[name])} questions; "
                f"give 1 to {len(by_group[name])}."
            )
    return [by_group[name][i] for i in range(per_group) for name in groups]


def encode_question(question: Question, tokenizer: Any, *, chat: bool = True) -> list[int]:
    """Token ids of the first turn, with the chat template or as bare text.

    Later turns would need the model's answer to the first.
    """
    text = question.turns[0]
    if chat:
        messages = [{"role": "user", "content": text}]
        from outrider.text.rendering import render  # imports Jinja, which only chats need

        text = render(tokenizer.get_chat_template(), messages, True, tokenizer.special_tokens_map)
    return list(tokenizer.encode(text, add_special_tokens=not chat))
