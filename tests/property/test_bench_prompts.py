"""Whatever a file holds, its reader gives prompts or says in a sentence what is wrong."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.loadtest.prompts import prompts_for_trace, read_prompts
from outrider.loadtest.traces import TraceRow, read_trace

NAMES = st.sampled_from(
    [
        *("messages", "turns", "prompt", "text", "instruction", "input", "token_ids", "id"),
        *("category", "output_tokens", "conversations", "from", "value", "role", "content"),
        *("timestamp", "input_length", "output_length", "hash_ids"),
    ]
)
WORDS = st.sampled_from(["user", "assistant", "system", "human", "gpt"]) | st.text(max_size=5)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(NAMES, VALUES, max_size=5) | VALUES, max_size=4)
CONTENT = st.one_of(
    ROWS.map(lambda rows: "\n".join(json.dumps(row) for row in rows).encode()),
    ROWS.map(lambda rows: json.dumps(rows).encode()),
    st.binary(max_size=60),
    st.binary(max_size=30).map(b"TIMESTAMP,ContextTokens,GeneratedTokens\n".__add__),
)


@settings(max_examples=80, deadline=None)
@given(CONTENT)
def test_no_file_breaks_a_reader(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.jsonl"
        path.write_bytes(content)
        for name in ("jsonl", "sharegpt", "speed-bench"):
            try:
                prompts = read_prompts(f"{name}:{path}")
            except ConfigError as error:
                assert "any.jsonl" in str(error) and len(str(error).splitlines()) == 1
            else:
                for prompt in prompts:
                    given_as = (bool(prompt.turns), bool(prompt.text), bool(prompt.token_ids))
                    assert sum(given_as) == 1
                    "".join([*prompt.turns, prompt.text or "", prompt.id]).encode()
        try:
            assert read_trace(str(path))
        except ConfigError as error:
            assert "any.jsonl" in str(error) and len(str(error).splitlines()) == 1


PATHS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(PATHS, min_size=2, max_size=6), st.integers(1, 512), st.integers(0, 5))
def test_prompts_begin_alike_exactly_as_far_as_their_prefixes(
    paths: list[list[int]], last_block: int, seed: int
) -> None:
    # An id stands for a whole beginning, as a hash does: different ways to it are different ids.
    known: dict[tuple[int, ...], int] = {}
    rows = []
    for number, path in enumerate(paths):
        ways = [tuple(path[: end + 1]) for end in range(len(path))]
        ids = tuple(known.setdefault(way, len(known)) for way in ways)
        rows.append(TraceRow(0.0, 512 * (len(ids) - 1) + last_block, 1, ids, number))

    texts = [
        (prompt.text or "").split()
        for prompt in prompts_for_trace(rows, length_scale=1 / 16, seed=seed)
    ]

    block_words = 24  # 512 / 16 tokens
    for one, row in zip(texts, rows, strict=True):
        for other, other_row in zip(texts, rows, strict=True):
            pairs = zip(row.prefix_ids, other_row.prefix_ids, strict=False)
            alike = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
            if alike is None:
                shorter = min(len(one), len(other))
                assert one[:shorter] == other[:shorter]
            else:
                start = alike * block_words
                assert one[:start] == other[:start]
                # Two words tell blocks apart; one may be all that the last has.
                if min(len(one), len(other)) >= start + 2:
                    assert one[start : start + 2] != other[start : start + 2]
