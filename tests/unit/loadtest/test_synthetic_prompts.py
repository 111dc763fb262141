"""Prompts made to a length: random, sonnets, shared beginnings, and those of a trace."""

from __future__ import annotations

import pickle
from itertools import takewhile
from typing import Any

import pytest

from outrider.checkpoints.resolve import BUNDLED_TARGET
from outrider.errors import ConfigError
from outrider.loadtest.prompts import prompts_for_trace, read_prompts
from outrider.loadtest.traces import TraceRow, read_trace
from outrider.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED_TARGET)


def ids_of(prompt: Any) -> tuple[int, ...]:
    assert prompt.token_ids is not None
    return tuple(prompt.token_ids)


def test_random_tokens_have_the_lengths_asked_for_and_are_marked_as_made_up() -> None:
    fixed = read_prompts("random:64:10", vocab_size=1000)
    varied = read_prompts("random:4-9", vocab_size=1000, limit=200)

    assert [len(ids_of(each)) for each in fixed] == [64] * 10
    assert {len(ids_of(each)) for each in varied} == set(range(4, 10))
    assert not any(each.is_natural for each in fixed + varied)
    assert {125 <= token < 875 for each in varied for token in ids_of(each)} == {True}
    assert len({each.id for each in varied}) == 200


def test_random_tokens_are_equal_for_equal_seeds_only() -> None:
    first, again = (read_prompts("random:8:3", vocab_size=500, seed=1) for _ in range(2))

    assert first == again
    assert first != read_prompts("random:8:3", vocab_size=500, seed=2)


def test_random_tokens_are_never_special(tokenizer: Any) -> None:
    (prompt,) = read_prompts("random:200000:1", tokenizer=tokenizer)

    drawn = set(ids_of(prompt))
    assert drawn.isdisjoint(tokenizer.all_special_ids)
    assert max(drawn) < len(tokenizer)
    assert len(drawn) > 0.9 * len(tokenizer)


def test_random_tokens_need_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="give a tokenizer or the vocabulary's size"):
        read_prompts("random:8")


@pytest.mark.parametrize(
    "spec",
    [
        *("random:", "random:x", "random:0", "random:9-4", "random:1:0", "random:-5"),
        *("random:99999999", "random:" + "9" * 5000, "random:1.5"),
        *("sonnet:", "sonnet:5", "sonnet:many", "sonnet:64:0"),
        *("shared-prefix:", "shared-prefix:100", "shared-prefix:0+5", "shared-prefix:5+5:0"),
    ],
    ids=lambda spec: spec[:20],
)
def test_a_length_that_cannot_be_is_refused_in_a_sentence(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"write|give \d+ to \d+") as raised:
        read_prompts(spec, vocab_size=100)
    assert len(str(raised.value).splitlines()) == 1


def test_sonnets_come_near_the_length_and_never_above(tokenizer: Any) -> None:
    for length in (64, 500):
        prompts = read_prompts(f"sonnet:{length}:20", tokenizer=tokenizer)
        for prompt in prompts:
            num = len(tokenizer.encode(prompt.turns[0]))
            assert length - 20 <= num <= length
        assert len({prompt.turns for prompt in prompts}) == 20


def test_prompts_of_a_group_share_their_beginning_and_nothing_else(tokenizer: Any) -> None:
    prompts = read_prompts("shared-prefix:50+10:3", tokenizer=tokenizer, limit=9)

    assert [prompt.category for prompt in prompts[:4]] == [f"prefix {i}" for i in (0, 1, 2, 0)]
    for one in prompts:
        assert len(ids_of(one)) == 60 and one.is_natural
        for other in prompts:
            expected = 50 if one.category == other.category else 0
            if one is not other:
                assert common(ids_of(one)[:52], ids_of(other)[:52]) in (expected, expected + 1)
                assert (ids_of(one)[:50] == ids_of(other)[:50]) == (expected == 50)


def test_without_a_tokenizer_a_shared_beginning_is_text() -> None:
    one, other, again = read_prompts("shared-prefix:100+40:2", limit=3)

    assert one.text is not None and other.text is not None and again.text is not None
    assert len(one.text.split()) == 75 + 30
    assert one.text.split()[:75] == again.text.split()[:75] != other.text.split()[:75]
    assert one.text.split()[75:] != again.text.split()[75:]


def common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_prompts_of_a_trace_share_exactly_what_their_prefix_ids_say(tokenizer: Any) -> None:
    rows = read_trace("mooncake")[:300]
    prompts = prompts_for_trace(rows, tokenizer=tokenizer, length_scale=1 / 32, name="mooncake")

    made = [ids_of(prompt) for prompt in prompts]
    assert prompts.block_tokens == 16
    for row, ids in zip(rows, made, strict=True):
        assert len(ids) == -(-row.prompt_tokens // 32)
    for one in range(0, 300, 7):
        for other in range(one + 1, 300, 11):
            blocks = common(rows[one].prefix_ids, rows[other].prefix_ids)
            shared = min(blocks * 16, len(made[one]), len(made[other]))
            # The two tokens that tell a block may have the first in common.
            assert shared <= common(made[one], made[other]) <= shared + 1


def test_a_block_is_decided_by_its_id_and_the_seed_alone(tokenizer: Any) -> None:
    row = TraceRow(0.0, 700, 5, (11, 12), 4)
    other = TraceRow(0.0, 512, 5, (12,), 9)

    (ids,) = map(ids_of, prompts_for_trace([row], tokenizer=tokenizer))
    (block,) = map(ids_of, prompts_for_trace([other], tokenizer=tokenizer))
    (reseeded,) = map(ids_of, prompts_for_trace([other], tokenizer=tokenizer, seed=1))

    assert len(ids) == 700 and ids[512:] == block[:188]
    assert reseeded[:2] != block[:2] and reseeded[2:] != block[2:]


def test_rows_without_prefixes_share_nothing() -> None:
    rows = read_trace("azure-code")[:200]

    prompts = prompts_for_trace(rows, length_scale=0.05)

    starts = {" ".join((prompt.text or "").split()[:2]) for prompt in prompts}
    assert len(starts) == 200
    assert prompts[-1].id == "trace/199"
    assert prompts[2].output_tokens == rows[2].output_tokens


def test_prompts_are_cut_to_the_longest_allowed_and_counted(tokenizer: Any) -> None:
    rows = [TraceRow(0.0, 100, 50, (), 0), TraceRow(1.0, 2000, 700, (1, 2, 3, 4), 1)]

    prompts = prompts_for_trace(
        rows, tokenizer=tokenizer, max_prompt_tokens=600, max_output_tokens=64
    )

    assert [len(ids_of(prompt)) for prompt in prompts] == [100, 600]
    assert [prompts.length(index) for index in (0, 1)] == [100, 600]
    assert [prompt.output_tokens for prompt in prompts] == [50, 64]
    assert prompts.num_clamped == 1
    assert prompts.describe().endswith("1 cut to 600 tokens.")


def test_prompts_of_a_trace_travel_to_another_process_and_are_a_sequence() -> None:
    prompts = prompts_for_trace(read_trace("mooncake")[:5], length_scale=0.01)

    copy = pickle.loads(pickle.dumps(prompts))

    assert list(copy) == list(prompts) == prompts[:]
    assert len(prompts) == 5 and prompts[-1] == prompts[4]
    with pytest.raises(IndexError):
        prompts[5]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_lengths_that_cannot_be_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="length_scale is"):
        prompts_for_trace([], length_scale=scale)
