"""Sets of prompts in files that users give, whole and damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.loadtest.prompts import read_prompts
from outrider.loadtest.requests import Message


class WordTokenizer:
    """One id a word."""

    all_special_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def __len__(self) -> int:
        return 100


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_json_lines_are_understood_by_their_fields(tmp_path: Path) -> None:
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    said = {"role": "assistant", "content": "Hello you there"}
    path = written(
        tmp_path / "mine.jsonl",
        {"id": "a", "category": "talk", "messages": [system, asked, said, asked]},
        {"messages": [asked, asked, said]},
        {"turns": ["One", {"content": "Two"}]},
        {"prompt": "P", "output_tokens": 7},
        {"question": "Q", "question_id": 12},
        {"instruction": "Sum up.", "input": "Long text."},
        {"instruction": "Sing.", "input": ""},
        {"input": "I"},
        {"text": "Once upon"},
        {"token_ids": [5, 6]},
    )

    got = read_prompts(f"jsonl:{path}", tokenizer=WordTokenizer())

    assert [each.id for each in got] == [
        f"jsonl/{own}" for own in ("a", "2", "3", "4", "12", "6", "7", "8", "9", "10")
    ]
    assert got[0].category == "talk" and got[1].category == "jsonl"
    assert got[0].history == (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Hello you there"),
    )
    assert [each.turns for each in got[:8]] == [
        *(("Hi",), ("Hi", "Hi"), ("One", "Two"), ("P",), ("Q",)),
        *(("Sum up.\n\nLong text.",), ("Sing.",), ("I",)),
    ]
    assert [each.output_tokens for each in got[:4]] == [None, 3, None, 7]
    assert got[8].text == "Once upon" and got[9].token_ids == (5, 6)


def test_a_compressed_file_is_read_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n'))

    assert [each.turns for each in read_prompts(f"jsonl:{path}")] == [("a\u2028b",)]


def test_ids_that_are_met_again_are_numbered(tmp_path: Path) -> None:
    rows = [{"id": own, "prompt": "x"} for own in ("a", "a#2", "a", "a", "b")]
    path = written(tmp_path / "mine.jsonl", *rows)

    ids = [each.id for each in read_prompts(f"jsonl:{path}")]

    assert ids == ["jsonl/a", "jsonl/a#2", "jsonl/a#3", "jsonl/a#4", "jsonl/b"]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b"\xff\xfe",
        b"{}",
        b'{"prompt": 5}',
        b'{"prompt": "  "}',
        b'{"prompt": "\\ud800"}',
        b'{"turns": []}',
        b'{"turns": "Hi"}',
        b'{"turns": [null]}',
        b'{"messages": ["Hi"]}',
        b'{"messages": [{"role": "assistant", "content": "Hi"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        b'{"messages": []}',
        b'{"token_ids": []}',
        b'{"token_ids": [1.5]}',
        b'{"token_ids": [true]}',
        b'{"token_ids": [-1]}',
        b'{"prompt": "x", "output_tokens": 0}',
        b'{"prompt": "x", "output_tokens": "9"}',
        b'{"prompt": "x", "id": [1]}',
        b'{"prompt": "x", "category": {}, "id": {}}',
        b"[" * 100_000,
    ],
    ids=lambda line: str(line[:40]),
)
def test_a_damaged_row_is_named_by_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")

    with pytest.raises(ConfigError, match=r"mine\.jsonl:3\b") as raised:
        read_prompts(f"jsonl:{path}")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "damage",
    [b"", gzip.compress(b'{"prompt": "x"}' * 99)[:40], b"plain"],
    ids=["empty", "cut", "plain"],  # the bytes hold the time
)
def test_a_damaged_compressed_file_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(damage)

    with pytest.raises(ConfigError, match=r"mine\.jsonl\.gz (cannot be read|has no prompts)"):
        read_prompts(f"jsonl:{path}")


def test_messages_that_the_chat_template_refuses_are_named(tmp_path: Path) -> None:
    class Strict(WordTokenizer):
        special_tokens_map: dict[str, str] = {}
        chat_template = (
            "{% for message in messages %}{% if message.role != 'user' %}"
            "{{ raise_exception('only the user may speak') }}{% endif %}{{ message.content }} "
            "{% endfor %}"
        )

        def get_chat_template(self) -> str:
            return self.chat_template

    asked = {"role": "user", "content": "Hi there"}
    tool = {"role": "tool", "content": "42"}
    path = written(tmp_path / "mine.jsonl", {"messages": [asked]}, {"messages": [tool, asked]})

    with pytest.raises(ConfigError, match="refuses prompt jsonl/2 .only the user may speak"):
        read_prompts(f"jsonl:{path}", tokenizer=Strict(), max_prompt_tokens=5)


def test_token_ids_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", {"token_ids": [5, 100]})

    with pytest.raises(ConfigError, match="has token id 100 but the vocabulary has 100"):
        read_prompts(f"jsonl:{path}", vocab_size=100)


def test_sharegpt_keeps_what_the_user_says_and_the_length_of_the_answer(tmp_path: Path) -> None:
    talk = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello to you"},
        {"from": "human", "value": "Bye"},
        {"from": "gpt", "value": "Bye"},
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"id": "x_0", "conversations": talk}, {"conversations": talk[1:]}]))

    first, second = read_prompts(f"sharegpt:{path}", tokenizer=WordTokenizer())

    assert (first.id, first.turns, first.output_tokens) == ("sharegpt/x_0", ("Hi", "Bye"), 3)
    assert first.history == (Message("system", "Be kind."),)
    assert (second.id, second.history) == ("sharegpt/2", ())
    assert read_prompts(f"sharegpt:{path}")[0].output_tokens is None


def test_sharegpt_conversations_without_a_user_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talks = [
        [],
        [{"from": "gpt", "value": "So"}],
        [{"from": "human", "value": " "}],
        [{"from": "gpt", "value": "As I said"}, {"from": "human", "value": "Yes?"}],
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"id": str(i), "conversations": t} for i, t in enumerate(talks)]))

    (kept,) = read_prompts(f"sharegpt:{path}")

    assert (kept.id, kept.turns) == ("sharegpt/3", ("Yes?",))
    assert "skipped 3 of 4 conversations without a user message" in caplog.text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a JSON list"),
        ("[]", "has no prompts"),
        ("[3]", "entry 1 is 3"),
        ('[{"id": "a"}]', "entry 1: conversations is None"),
        ('[{"conversations": ["Hi"]}]', "entry 1: 'Hi' is not {from, value}"),
        (
            '[{"conversations": [{"from": "human", "value": 3}]}]',
            "entry 1: .* is not {from, value}",
        ),
        ('[{"conversations": [{"from": "human", "value": "\\ud800"}]}]', "entry 1: .* surrogate"),
    ],
)
def test_a_damaged_sharegpt_file_is_named_by_entry(
    tmp_path: Path, content: str, sentence: str
) -> None:
    path = tmp_path / "share.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=rf"share\.json.*{sentence}"):
        read_prompts(f"sharegpt:{path}")


def test_speed_bench_is_read_as_prepared_and_as_published(tmp_path: Path) -> None:
    said = [{"role": "user", "content": text} for text in ("First", "Then")]
    prepared = {"question_id": "f" * 32, "category": "coding", "messages": said, "source": "s"}
    published = {"question_id": "e" * 32, "category": "rag", "turns": ["One"], "multiturn": False}
    written(tmp_path / "b.jsonl", published)
    path = written(tmp_path / "a.jsonl", prepared)

    of_file = read_prompts(f"speed-bench:{path}")
    of_folder = read_prompts(f"speed-bench:{tmp_path}")

    assert [(p.id, p.category, p.turns) for p in of_folder] == [
        ("speed-bench/" + "f" * 32, "coding", ("First", "Then")),
        ("speed-bench/" + "e" * 32, "rag", ("One",)),
    ]
    assert of_file == of_folder[:1]


def test_speed_bench_before_its_texts_were_fetched_is_refused(tmp_path: Path) -> None:
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    path = written(tmp_path / "a.jsonl", {"question_id": "1", "category": "c", "turns": [masked]})

    with pytest.raises(ConfigError, match=r"a\.jsonl:1 has a placeholder .* prepare\.py"):
        read_prompts(f"speed-bench:{path}")


def test_speed_bench_in_another_form_is_refused_with_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    path = written(tmp_path / "a.json", {"prompt": "x"})
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match="is a parquet file; give JSON lines"):
        read_prompts(f"speed-bench:{tmp_path}/test.parquet")
    with pytest.raises(ConfigError, match=r"a\.json:1 has neither messages nor turns"):
        read_prompts(f"speed-bench:{path}")
    with pytest.raises(ConfigError, match=r"holds no \.jsonl file"):
        read_prompts(f"speed-bench:{tmp_path}/empty")
