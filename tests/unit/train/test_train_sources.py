"""Given prompts and documents, and what must never be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.train.sources import read_documents, read_prompts

BENCH = Path(__file__).resolve().parents[3] / "loadtest" / "data"


@pytest.mark.parametrize(
    "name",
    [
        "humaneval/HumanEval.jsonl.gz",
        "mbpp/mbpp.jsonl.gz",
        "arena_hard/question.jsonl.gz",
        "oasst_multiturn/oasst1_en.jsonl.gz",
        "spec_bench/question.jsonl",
        "eagle_bench/humaneval.jsonl",
    ],
)
def test_prompts_kept_for_evaluation_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="kept for evaluation; train on other prompts"):
        read_prompts([str(BENCH / name)])


def test_a_link_to_such_prompts_is_refused_too(tmp_path: Path) -> None:
    link = tmp_path / "mine.jsonl"
    link.symlink_to(BENCH / "eagle_bench" / "humaneval.jsonl")
    with pytest.raises(ConfigError, match=r"'humaneval.jsonl', which is kept for evaluation"):
        read_prompts([str(link)])


def test_documents_kept_for_evaluation_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "Arena-Hard.txt").write_text("text")
    with pytest.raises(ConfigError, match="kept for evaluation"):
        read_documents(str(tmp_path))


def test_a_prompt_is_the_first_turn_in_any_of_the_usual_forms(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one"},
        {"turns": ["two", "later"], "category": "maths"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "three"}]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts([str(path)]).items == [("mine", "one"), ("maths", "two"), ("mine", "three")]


def test_a_row_without_a_prompt_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(ConfigError, match=r"mine.jsonl:2 has none of prompt, turns and messages"):
        read_prompts([str(path)])


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{n}"}) for n in range(50)))
    pool = read_prompts([str(path)])
    held_out, trained = set(pool.part(True)), set(pool.part(False))
    assert len(held_out) == 3 and held_out.isdisjoint(trained)
    assert held_out | trained == set(pool.items)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which has no text"):
        read_documents(str(tmp_path))
