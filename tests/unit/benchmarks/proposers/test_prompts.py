"""Which prompts proposers are compared on."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from outrider.benchmarks.prompts import read_questions
from outrider.benchmarks.proposers.prompts import (
    ALL_GROUPS,
    HELD_OUT,
    BenchPrompt,
    first_of_each_group,
    select_prompts,
)
from outrider.errors import ConfigError
from outrider.train.sources import EVALUATION_SETS


class CharTokenizer:
    """One id a character; a chat is framed by brackets."""

    special_tokens_map: dict[str, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]

    def get_chat_template(self) -> str:
        return "{% for message in messages %}[{{ message.content }}]{% endfor %}"


TOKENIZER = CharTokenizer()


def text_of(prompt: BenchPrompt) -> str:
    return "".join(map(chr, prompt.ids))


def test_groups_take_turns_and_each_has_its_first_prompts() -> None:
    prompts = select_prompts(["qa", "mbpp"], 2, TOKENIZER, 10**6)

    first = [question for question in read_questions() if question.group == "qa"][:2]
    assert [prompt.group for prompt in prompts] == ["qa", "mbpp", "qa", "mbpp"]
    assert [text_of(prompts[0]), text_of(prompts[2])] == [f"[{each.turns[0]}]" for each in first]


def test_every_group_has_prompts() -> None:
    prompts = select_prompts(ALL_GROUPS, 3, TOKENIZER, 10**6)

    assert Counter(prompt.group for prompt in prompts) == dict.fromkeys(ALL_GROUPS, 3)


def test_prompts_that_are_too_long_are_passed_over() -> None:
    longest = 700
    prompts = select_prompts(["rag", "oasst"], 4, TOKENIZER, longest)

    unlimited = select_prompts(["rag", "oasst"], 4, TOKENIZER, 10**6)
    assert (
        max(len(prompt.ids) for prompt in prompts)
        <= longest
        < max(len(prompt.ids) for prompt in unlimited)
    )


def test_texts_to_complete_are_no_chat() -> None:
    [prompt] = select_prompts(["humaneval"], 1, TOKENIZER, 10**6)

    assert text_of(prompt).startswith("from typing import List")


def test_no_training_may_see_the_sets_that_are_held_out() -> None:
    names = {re.sub("[^a-z]", "", name) for name in (*HELD_OUT, "spec-bench")}

    assert names == set(EVALUATION_SETS)


def test_a_smaller_selection_is_the_beginning_of_each_group() -> None:
    prompts = select_prompts(["qa", "mbpp"], 3, TOKENIZER, 10**6)

    assert first_of_each_group(prompts, 1) == prompts[:2]
    assert first_of_each_group(prompts, 5) == prompts


def test_unknown_groups_and_no_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="'poetry' is unknown; choose from mt_bench"):
        select_prompts(["poetry"], 1, TOKENIZER, 100)
    with pytest.raises(ConfigError, match="0 prompts of each group"):
        select_prompts(["qa"], 0, TOKENIZER, 100)
