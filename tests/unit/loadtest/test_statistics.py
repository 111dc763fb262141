"""Statistics against sums done by hand and published tables."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from outrider.loadtest.results import draws, statistics
from outrider.loadtest.results.statistics import (
    block_interval,
    bootstrap_interval,
    holm,
    paired_ratio,
    per_request_ratio,
    percentile,
    percentile_of_rows,
    unpaired_blocks_ratio,
    unpaired_ratio,
)

NAN = float("nan")


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([10, 20, 30, 40], 50) == 25
    assert percentile([10, 20, 30, 40], 90) == pytest.approx(37)
    assert percentile([NAN, 7], 99) == 7


def test_pairs_by_hand() -> None:
    """Ratios 2, 1, 4: logarithms ln 2 x (1, 0, 2), mean ln 2, error ln 2 / sqrt 3."""
    found = paired_ratio([2, 3, 8], [1, 3, 2])
    assert found.value == pytest.approx(2)
    assert found.n == 3
    reach = 4.302653 * math.log(2) / math.sqrt(3)  # Student's t with 2 degrees
    assert found.low == pytest.approx(2 * math.exp(-reach), rel=1e-5)
    assert found.high == pytest.approx(2 * math.exp(reach), rel=1e-5)
    assert found.p == pytest.approx(0.2254, abs=1e-4)  # t = sqrt 3
    assert found.p_check == pytest.approx(0.5)  # of 4: (1,0,2) and (1,-0,2)


def test_two_pairs_are_too_few_to_say() -> None:
    found = paired_ratio([2, 2], [1, 1])
    assert found.value == pytest.approx(2)
    assert found.low is found.p is None
    assert found.remark == "too few blocks to say"
    assert not found.is_known


def test_pairs_without_a_ratio_are_left_out() -> None:
    found = paired_ratio([2, 0, None, 5, 2, 2], [1, 1, 1, NAN, 1, 1])
    assert found.n == 3
    assert found.value == pytest.approx(2)


def test_pairs_that_all_differ_alike_leave_no_doubt() -> None:
    found = paired_ratio([3, 3, 3, 3], [2, 2, 2, 2])
    assert (found.low, found.high, found.p) == (found.value, found.value, 0)
    assert found.p_check == pytest.approx(1 / 8)


def test_many_pairs_are_flipped_by_drawing() -> None:
    rng = np.random.default_rng(5)
    a = np.exp(rng.normal(0.5, 0.1, 40)).tolist()
    far, near = paired_ratio(a, [1.0] * 40), paired_ratio(a, a)
    assert far.p_check == pytest.approx(1 / (draws.FLIPS + 1))
    assert near.p_check == 1


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, None, 0.03]) == [
        pytest.approx(0.03),
        pytest.approx(0.06),
        None,
        pytest.approx(0.06),
    ]
    assert holm([]) == []


def test_common_asks_are_paired_and_others_left_out() -> None:
    a = {str(index): 2.0 * (index + 1) for index in range(10)} | {"only a": 1.0}
    b = {str(index): 1.0 * (index + 1) for index in range(10)} | {"only b": 900.0}
    found = per_request_ratio(a, b, seed=1)
    assert (found.n, found.kind) == (10, "asks")
    assert [found.value, found.low, found.high] == pytest.approx([2, 2, 2])
    assert found.p == 0


def test_unpaired_samples_are_told_apart() -> None:
    rng = np.random.default_rng(2)
    slow, quick = rng.normal(120, 10, 400), rng.normal(100, 10, 400)
    found = unpaired_ratio(slow, quick, percentile_of_rows(50), seed=3)
    assert found.value == pytest.approx(1.2, rel=0.03)
    assert found.low is not None and found.low > 1.1
    assert found.p == pytest.approx(2 / 2001)
    assert found.p_check is not None and found.p_check < 1e-6


def test_unpaired_blocks_by_hand() -> None:
    """Logarithms ln 2 x (0, 1, 2) and (0, 0, 0): error ln 2 / sqrt 3, and 2 degrees are left."""
    found = unpaired_blocks_ratio([1, 2, 4], [1, 1, 1])
    assert found.value == pytest.approx(2)
    assert found.p == pytest.approx(0.2254, abs=1e-4)
    assert found.high == pytest.approx(2 * math.exp(4.302653 * math.log(2) / math.sqrt(3)))
    assert unpaired_blocks_ratio([1, 2], [1, 1, 1]).remark == "too few blocks to say"
    assert unpaired_blocks_ratio([2, 2, 2], [2, 2, 2]).p == 1


def test_blocks_that_differ_widen_an_interval() -> None:
    rng = np.random.default_rng(4)
    blocks = [rng.normal(centre, 1, 100) for centre in (90, 95, 100, 105, 110)]
    by_block = block_interval(blocks, seed=1, resamples=300)
    by_request = bootstrap_interval(np.concatenate(blocks), seed=1, resamples=300)
    assert by_block is not None and by_block.low is not None and by_block.high is not None
    assert by_request is not None and by_request.low is not None and by_request.high is not None
    assert by_block.high - by_block.low > 3 * (by_request.high - by_request.low)


def test_a_bootstrap_holds_few_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def mean(table: draws.Floats) -> draws.Floats:
        seen.append(table.size)
        return statistics.mean_of_rows(table)

    monkeypatch.setattr(draws, "CHUNK", 1000)
    assert bootstrap_interval(np.arange(300.0), mean, seed=1, resamples=100) is not None
    assert max(seen) <= 1000
    assert sum(seen) == 300 * 101


@pytest.mark.parametrize("values", [[], [NAN], [NAN, float("inf")]])
def test_nothing_gives_nothing(values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert percentile(values, 50) is None
        assert bootstrap_interval(values, seed=1) is None
        assert block_interval([values, []], seed=1) is None
        assert paired_ratio(values, values).value is None
        assert unpaired_ratio(values, [1, 2], seed=1).value is None
        assert per_request_ratio({}, {"a": 1}, seed=1).value is None


def test_one_value_and_zeros_have_defined_results() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = bootstrap_interval([5], seed=1)
        assert one is not None and (one.value, one.low, one.high) == (5, None, None)
        assert unpaired_ratio([0, 0, 0], [1, 2, 3], seed=1).remark == "no ratio to zero"
        assert unpaired_ratio([5], [5, 6, 7], seed=1).remark == "too few requests to say"
        same = unpaired_ratio([5, 5, 5, 5], [5, 5, 5, 5], seed=1)
        assert (same.value, same.p) == (1, 1)
        assert paired_ratio([0, 0, 0], [0, 0, 0]).value is None
