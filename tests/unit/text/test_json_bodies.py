"""Bodies of requests: what a child process makes of them, and what it refuses."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.text.json_bodies import MAX_ENTRIES, answer, check_counts, question
from outrider.text.subprocess_pool import SubprocessPool

KNOWN = ["prompt", "messages", "tokens", "stop", "allowed_token_ids", "chat_template_kwargs"]


@pytest.fixture(scope="module")
def children() -> Iterator[SubprocessPool]:
    made = SubprocessPool("body", 60.0, 256 * 2**20)
    yield made
    made.close()


def _asked(body: Any, max_model_len: int = 512) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return question(data, KNOWN, max_model_len, vocab_size=1000)


def _refused(body: Any) -> str:
    found = answer(_asked(body))
    assert "fields" not in found
    return str(found["refused"])


def test_a_child_gives_back_what_was_sent(children: SubprocessPool) -> None:
    ids, halves = list(range(1000)), "half \ud800, whole \U0001f600"
    sent = {
        "prompt": [ids, [1, 2], "text"],
        "tokens": ids,
        "stop": [halves, "\n"],
        "messages": [{"role": "user", "content": halves, "name": "me"}],
        "unknown": {"a": [1, 2.5, None, True]},
        "big": 10**30,
    }
    found = children.ask(_asked(sent))["fields"]
    assert found == sent | {
        "prompt": [array("I", ids), [1, 2], "text"],
        "tokens": array("I", ids),
        "big": 1e30,
    }


def test_numbers_that_are_no_token_ids_stay_as_they_are() -> None:
    for ids in ([1.0] * 100, [True] * 100, [-1] * 100, [2**32] * 100):
        assert answer(_asked({"prompt": ids}))["fields"] == {"prompt": ids}


def test_parts_become_one_text_and_what_is_not_used_is_cut() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    deep: Any = [[[[[1]]]]]
    sent = {
        "messages": [{"role": "user", "content": parts, "extra": list(range(10_000))}],
        "metadata": {str(number): deep for number in range(1000)},
    }
    found = answer(_asked(sent))["fields"]
    assert found["messages"] == [{"role": "user", "content": "a\nb", "extra": list(range(16))}]
    assert found["metadata"] == {str(number): [[[]]] for number in range(16)}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[" * 100_000, "lists and objects; with this model it may have 20512"),
        (b'{"a": [' + b"[]," * 30_000 + b"[]]}", "30003 lists and objects"),
        (
            b'{"a": [' + b"1," * 200_000 + b"1]}",
            "200002 values; .* it may have 106536",
        ),
        (b"{}x", "is not JSON"),
        (b"[" * 15_000 + b"]" * 15_000, "nested too deeply"),
        ({"messages": [{}] * 10_001}, "10001 messages"),
        ({"messages": [{str(at): [] for at in range(65)}]}, r"messages\[0\] has 65 fields"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"messages\[0\]\.content\[0\] is 1"),
        ({"stop": [""] * (MAX_ENTRIES + 1)}, "stop has 4097 entries"),
        ({"prompt": [""] * (MAX_ENTRIES + 1)}, "prompt has 4097 entries"),
        ({"allowed_token_ids": [1] * 5000}, "allowed_token_ids has 5000 entries"),
        ({"chat_template_kwargs": {"a": "b" * 20_000}}, "chat_template_kwargs has 20009 char"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is in the body twice"),
        (b'{"a": NaN}', "NaN"),
    ],
)
def test_what_is_too_much_or_wrong_is_one_sentence(body: Any, sentence: str) -> None:
    assert re.search(sentence, _refused(body)), _refused(body)


def test_what_a_text_holds_is_not_counted() -> None:
    text = json.dumps({"prompt": '[[{{,,\\"\\\\"[' * 100_000, "stop": ["\\", '"', "["]}).encode()
    check_counts(text, 5, 3)
    with pytest.raises(RequestError, match="lists and objects"):
        check_counts(text, 5, 1)


def test_as_many_token_ids_as_all_prompts_may_have_pass(children: SubprocessPool) -> None:
    prompts = [[7] * 511] * 128
    found = children.ask(_asked({"prompt": prompts}))["fields"]
    assert found["prompt"] == [array("I", each) for each in prompts]
