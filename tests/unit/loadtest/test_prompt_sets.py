"""The bundled sets of prompts, and what all sets have in common."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from outrider.benchmarks.prompts import GROUPS
from outrider.errors import ConfigError
from outrider.loadtest.bundled_data import DATA
from outrider.loadtest.prompts import read_prompts


class WordTokenizer:
    """One id a word: its length."""

    all_special_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]

    def __len__(self) -> int:
        return 1000


@pytest.mark.parametrize(
    ("name", "num", "num_categories", "first_id"),
    [
        ("spec-bench", 480, 6, "spec-bench/81"),
        ("mt-bench", 80, 8, "mt-bench/81"),
        ("vicuna", 80, 9, "vicuna/1"),
        ("humaneval", 164, 1, "humaneval/0"),
        ("gsm8k", 1319, 1, "gsm8k/0"),
        ("mbpp", 974, 1, "mbpp/1"),
        ("arena-hard", 500, 1, "arena-hard/328c149ed45a41c0b9d6f14659e63599"),
        ("oasst", 419, 1, "oasst/7d05acb7-9360-458c-8a1d-c0b6492b8f8a"),
        ("eagle", 400, 5, "eagle/alpaca-0"),
    ],
)
def test_a_bundled_set_is_read_whole(
    name: str, num: int, num_categories: int, first_id: str
) -> None:
    prompts = read_prompts(name)

    assert len({prompt.id for prompt in prompts}) == len(prompts) == num
    assert len({prompt.category for prompt in prompts}) == num_categories
    assert prompts[0].id == first_id
    for prompt in prompts:
        assert bool(prompt.turns) != bool(prompt.text)
        assert all(turn.strip() for turn in prompt.turns)
        assert prompt.is_natural


def test_every_folder_of_data_names_its_source_and_licence() -> None:
    for folder in DATA.iterdir():
        source = (folder / "SOURCE.txt").read_text(encoding="utf-8")
        assert "commit" in source and "icence" in source, folder.name


def test_conversations_keep_all_that_the_user_says() -> None:
    assert Counter(len(prompt.turns) for prompt in read_prompts("mt-bench")) == {2: 80}
    assert {len(prompt.turns) for prompt in read_prompts("oasst")} == {1, 2, 3}


def test_tasks_and_categories_of_spec_bench_are_chosen_by_name() -> None:
    prompts = read_prompts("spec-bench:translation+mt-bench")
    writing = read_prompts("spec-bench:writing+rag")

    assert Counter(p.category for p in prompts) == {"translation": 80, "mt_bench": 80}
    assert Counter(p.category for p in writing) == {"writing": 10, "rag": 80}


def test_a_category_is_found_however_it_is_written() -> None:
    assert len(read_prompts("vicuna:Common_Sense")) == len(read_prompts("vicuna:common-sense")) > 0


def test_an_unknown_category_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"spec-bench has no category 'poetry'; .*translation"):
        read_prompts("spec-bench:poetry")


def test_a_limit_takes_categories_in_turns() -> None:
    prompts = read_prompts("spec-bench", limit=8)

    assert [prompt.category for prompt in prompts] == [*GROUPS, *GROUPS[:2]]
    assert prompts[0].id == "spec-bench/81" and prompts[6].id == "spec-bench/82"


def test_a_limit_goes_on_with_the_categories_that_have_more() -> None:
    prompts = read_prompts("spec-bench:writing+rag", limit=50)

    assert Counter(prompt.category for prompt in prompts) == {"writing": 10, "rag": 40}
    assert len(read_prompts("vicuna", limit=10_000)) == 80


def test_prompts_over_the_length_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = WordTokenizer()
    whole = read_prompts("spec-bench")

    short = read_prompts("spec-bench", tokenizer=tokenizer, max_prompt_tokens=100)

    fitting = [p.id for p in whole if sum(len(turn.split()) for turn in p.turns) <= 100]
    assert [prompt.id for prompt in short] == fitting
    assert f"skipped {480 - len(fitting)} prompts longer than 100 tokens" in caplog.text


def test_a_limit_is_filled_with_prompts_that_are_short_enough() -> None:
    prompts = read_prompts("spec-bench", limit=60, max_prompt_tokens=1000)

    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(GROUPS, 10)


def test_a_length_that_no_prompt_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="all 80 prompts are longer than 1 tokens"):
        read_prompts("vicuna", max_prompt_tokens=1)


def test_the_answers_of_a_set_tell_the_length_of_the_output() -> None:
    with_tokenizer = read_prompts("gsm8k", tokenizer=WordTokenizer(), limit=1)[0]
    without = read_prompts("gsm8k", limit=1)[0]

    assert with_tokenizer.output_tokens == 28  # words of the worked answer
    assert without.output_tokens is None


@pytest.mark.parametrize("spec", ["", "specbench", "spec_bench", ":", "jsonl,gsm8k"])
def test_an_unknown_set_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"are unknown; choose from spec-bench\[:TASK"):
        read_prompts(spec)


@pytest.mark.parametrize("option", ["limit", "max_prompt_tokens"])
def test_a_limit_below_one_is_refused(option: str) -> None:
    limits = {option: 0}
    with pytest.raises(ConfigError, match=f"{option} is 0; give at least 1"):
        read_prompts("vicuna", **limits)


@pytest.mark.parametrize("name", ["jsonl", "sharegpt", "speed-bench"])
def test_a_set_in_a_file_needs_one_that_can_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a file; write {name}:PATH"):
        read_prompts(name)
    with pytest.raises(ConfigError, match="none.json cannot be read"):
        read_prompts(f"{name}:{tmp_path}/none.json")


@pytest.mark.parametrize("name", ["jsonl", "sharegpt", "speed-bench"])
@pytest.mark.parametrize("path", ["a\0b", "~nobody-at-all/x", "x" * 5000])
def test_a_path_that_cannot_be_is_refused_in_a_sentence(name: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|unknown home folder"):
        read_prompts(f"{name}:{path}")
