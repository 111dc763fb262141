"""Tokens a round, counted by category and prompt length."""

from __future__ import annotations

import pytest

from outrider.acceptance_tables import length_group, params_at_depth, tables
from outrider.text.outputs import CompletionOutput, RequestMetrics, RequestOutput, Speculation


def output(tokens: int, rounds: int, drafted: int, accepted: int) -> RequestOutput:
    done = CompletionOutput(0, seed=0)
    done.speculation = Speculation(rounds, drafted, accepted, [False] * tokens)
    return RequestOutput("r", None, [], [done], RequestMetrics(0.0))


def test_tokens_and_rounds_are_added_before_they_are_divided() -> None:
    outputs = [output(10, 10, 20, 0), output(30, 10, 20, 15), output(8, 2, 6, 6)]
    found = tables(outputs, ["a", "a", "b"], [10, 256, 257], (256, 1200))

    assert found["all"]["tokens_a_round"] == pytest.approx(48 / 22, abs=1e-4)
    assert found["by_category"]["a"] == {
        "prompts": 2,
        "tokens": 40,
        "tokens_a_round": 2.0,
        "acceptance": 0.375,
    }
    assert list(found["by_prompt_length"]) == ["up to 256", "up to 1200"]
    assert found["by_prompt_length"]["up to 1200"]["tokens_a_round"] == 4


@pytest.mark.parametrize(
    ("length", "group"),
    [(1, "up to 256"), (256, "up to 256"), (257, "up to 1200"), (1201, "above 1200")],
)
def test_ends_belong_to_the_groups_they_name(length: int, group: str) -> None:
    assert length_group(length, (256, 1200)) == group


def test_requests_fix_their_depth_unless_nothing_is_drafted() -> None:
    first, second = params_at_depth(2, 5, 64, 0.7)
    [plain] = params_at_depth(1, 0, 64, 0.0, ignore_eos=True)

    assert (first.num_speculative_tokens, first.fix_depth, first.temperature) == (5, True, 0.7)
    assert first.seed != second.seed
    assert (plain.num_speculative_tokens, plain.fix_depth, plain.ignore_eos) == (None, False, True)
