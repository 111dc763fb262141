"""Which prompts proposers are compared on."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from outrider.bench.prompts import read_questions
from outrider.bench.proposers.prompts import (
    ALL_GROUPS,
    HELD_OUT,
    Ask,
    first_of_each,
    select_asks,
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


def text_of(ask: Ask) -> str:
    return "".join(map(chr, ask.ids))


def test_groups_take_turns_and_each_has_its_first_prompts() -> None:
    asks = select_asks(["qa", "mbpp"], 2, TOKENIZER, 10**6)

    first = [question for question in read_questions() if question.group == "qa"][:2]
    assert [ask.group for ask in asks] == ["qa", "mbpp", "qa", "mbpp"]
    assert [text_of(asks[0]), text_of(asks[2])] == [f"[{each.turns[0]}]" for each in first]


def test_every_group_has_prompts() -> None:
    asks = select_asks(ALL_GROUPS, 3, TOKENIZER, 10**6)

    assert Counter(ask.group for ask in asks) == dict.fromkeys(ALL_GROUPS, 3)


def test_prompts_that_are_too_long_are_passed_over() -> None:
    longest = 700
    asks = select_asks(["rag", "oasst"], 4, TOKENIZER, longest)

    unlimited = select_asks(["rag", "oasst"], 4, TOKENIZER, 10**6)
    assert max(len(ask.ids) for ask in asks) <= longest < max(len(ask.ids) for ask in unlimited)


def test_texts_to_complete_are_no_chat() -> None:
    [ask] = select_asks(["humaneval"], 1, TOKENIZER, 10**6)

    assert text_of(ask).startswith("from typing import List")


def test_no_training_may_see_the_sets_that_are_held_out() -> None:
    names = {re.sub("[^a-z]", "", name) for name in (*HELD_OUT, "spec-bench")}

    assert names == set(EVALUATION_SETS)


def test_a_smaller_selection_is_the_beginning_of_each_group() -> None:
    asks = select_asks(["qa", "mbpp"], 3, TOKENIZER, 10**6)

    assert first_of_each(asks, 1) == asks[:2]
    assert first_of_each(asks, 5) == asks


def test_unknown_groups_and_no_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="'poetry' is unknown; choose from mt_bench"):
        select_asks(["poetry"], 1, TOKENIZER, 100)
    with pytest.raises(ConfigError, match="0 prompts of each group"):
        select_asks(["qa"], 0, TOKENIZER, 100)
