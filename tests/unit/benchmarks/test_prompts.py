"""The Spec-Bench reader."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.benchmarks.prompts import (
    GROUPS,
    Question,
    encode_question,
    read_questions,
    select_questions,
)
from outrider.errors import ConfigError


class CharTokenizer:
    """One id a character; a chat is framed by brackets."""

    special_tokens_map: dict[str, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]

    def get_chat_template(self) -> str:
        return (
            "{% if add_generation_prompt %}{% for m in messages %}[{{ m.role }}:{{ m.content }}]"
            "{% endfor %}{% endif %}"
        )


def test_the_copied_file_holds_eighty_questions_of_each_group() -> None:
    counts = Counter(question.group for question in read_questions())

    assert counts == dict.fromkeys(GROUPS, 80)


def test_mt_bench_categories_are_one_group_with_two_turns() -> None:
    mt_bench = [question for question in read_questions() if question.group == "mt_bench"]

    assert len({question.category for question in mt_bench}) == 8
    assert {len(question.turns) for question in mt_bench} == {2}


def test_selection_takes_the_first_of_each_group_in_turns() -> None:
    questions = read_questions()

    chosen = select_questions(questions, 2, ["qa", "rag"])

    first_qa = [question for question in questions if question.group == "qa"][:2]
    assert [question.group for question in chosen] == ["qa", "rag", "qa", "rag"]
    assert [chosen[0], chosen[2]] == first_qa


def test_an_unknown_group_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'poetry' is unknown; choose from mt_bench"):
        select_questions(read_questions(), 1, ["poetry"])


def test_more_questions_than_a_group_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="per_group is 81 but .* has 80"):
        select_questions(read_questions(), 81)


def test_a_chat_prompt_goes_through_the_template_and_a_raw_one_does_not() -> None:
    question = Question(1, "qa", ("Hi?", "And?"))

    as_chat = encode_question(question, CharTokenizer())
    as_text = encode_question(question, CharTokenizer(), chat=False)

    assert "".join(map(chr, as_chat)) == "[user:Hi?]"
    assert "".join(map(chr, as_text)) == "Hi?"
