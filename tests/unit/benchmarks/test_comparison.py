"""Rates, paired ratios and agreement of texts."""

from __future__ import annotations

import pytest

from outrider.benchmarks.peers.comparison import TimedCall, speed_ratio, summarise, typical_runs
from outrider.benchmarks.peers.protocol import Generation


def sample(
    variant: str, case: str, seconds: float, tokens: list[int] | None = None, **counts: int
) -> TimedCall:
    texts = [tokens if tokens is not None else [1, 2, 3, 4]]
    return TimedCall(variant, case, "qa", Generation(texts, seconds, **counts))


def test_the_median_of_repeated_runs_counts() -> None:
    runs = [sample("a", "x", seconds) for seconds in (9.0, 2.0, 3.0)]

    assert typical_runs(runs, "a")["x"].seconds == 3.0


def test_total_rate_weighs_by_time_and_median_rate_by_prompt() -> None:
    runs = [sample("a", "x", 1.0), sample("a", "y", 2.0), sample("a", "z", 4.0)]

    summary = summarise(runs, "a", "a")

    assert summary.total_tokens_per_s == pytest.approx(12 / 7)
    assert summary.median_tokens_per_s == pytest.approx(2.0)


def test_acceptance_and_tokens_per_round_come_from_the_sums() -> None:
    runs = [
        sample("a", "x", 1.0, rounds=1, drafted=3, accepted=3),
        sample("a", "y", 1.0, rounds=3, drafted=9, accepted=1),
    ]

    summary = summarise(runs, "a", "a")

    assert summary.tokens_per_round == 2.0
    assert summary.acceptance == pytest.approx(1 / 3)


def test_an_engine_that_does_not_count_has_no_acceptance() -> None:
    summary = summarise([sample("a", "x", 1.0)], "a", "a")

    assert summary.acceptance is None and summary.tokens_per_round is None


def test_agreement_counts_equal_texts_and_the_common_start() -> None:
    runs = [
        sample("plain", "x", 1.0, [1, 2, 3, 4]),
        sample("plain", "y", 1.0, [1, 2, 3, 4]),
        sample("other", "x", 1.0, [1, 2, 3, 4]),
        sample("other", "y", 1.0, [1, 2, 9, 4]),
    ]

    summary = summarise(runs, "other", "plain")

    assert summary.same_text == 0.5
    assert summary.common_prefix == 0.75


def test_a_ratio_is_taken_over_the_cases_both_ran() -> None:
    runs = [sample("a", "x", 1.0), sample("b", "x", 3.0), sample("b", "y", 100.0)]

    ratio = speed_ratio(runs, "a", "b")

    assert ratio is not None
    assert ratio.value == pytest.approx(3.0) and ratio.cases == 1


def test_variants_without_a_common_case_have_no_ratio() -> None:
    assert speed_ratio([sample("a", "x", 1.0), sample("b", "y", 1.0)], "a", "b") is None


def test_an_equal_gain_on_every_prompt_has_no_spread_however_long_the_prompts() -> None:
    runs = [
        sample(variant, str(case), cost * (1 + case))
        for case in range(10)
        for variant, cost in (("a", 1.0), ("b", 2.0))
    ]

    ratio = speed_ratio(runs, "a", "b")

    assert ratio is not None
    assert ratio.low == pytest.approx(2.0) and ratio.high == pytest.approx(2.0)


def test_the_interval_holds_the_ratio_and_is_reproducible() -> None:
    runs = [sample("a", str(case), 1.0) for case in range(10)]
    runs += [sample("b", str(case), 1.0 + case / 3) for case in range(10)]

    ratio = speed_ratio(runs, "a", "b")

    assert ratio is not None and ratio == speed_ratio(runs, "a", "b")
    assert 1.0 < ratio.low < ratio.value < ratio.high < 4.0
