"""The instrument's arithmetic: whatever the figures, what must always hold of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from load_records import answered, failed, shift

from outrider.loadtest.records import RequestRecord, ShiftPhase
from outrider.loadtest.results.analysis import Analysis
from outrider.loadtest.results.measures import Measures, Slo, Spread
from outrider.loadtest.results.statistics import (
    block_interval,
    bootstrap_interval,
    holm,
    mean_of_rows,
    paired_ratio,
    per_request_ratio,
    percentile,
    percentile_of_rows,
    unpaired_blocks_ratio,
    unpaired_ratio,
)
from outrider.loadtest.results.tallies import Histogram

FEW = settings(max_examples=40, deadline=None)
FEWER = settings(max_examples=25, deadline=None)
RESAMPLES = 200

durations = st.floats(0.02, 1e6)
samples = st.lists(durations, min_size=1, max_size=60)
positive = st.floats(1e-3, 1e6)
pairs = st.lists(st.tuples(positive, positive), min_size=3, max_size=12)
anything = st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.just(0.0), max_size=8)


@pytest.fixture(autouse=True)
def nothing_warns() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sorted_percentile(values: list[float], percent: float) -> float:
    """Of its definition: linear between the two ranks it lies between."""
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


@given(samples, st.floats(0, 100), st.floats(0, 100))
@FEW
def test_percentiles_rise_stay_in_range_and_equal_their_definition(
    values: list[float], one: float, other: float
) -> None:
    low, high = (percentile(values, each) for each in sorted((one, other)))
    assert low is not None and high is not None
    slack = 1e-9 * max(values)
    assert min(values) - slack <= low <= high + slack <= max(values) + 2 * slack
    assert low == pytest.approx(sorted_percentile(values, min(one, other)), rel=1e-9)


@given(samples)
@FEW
def test_a_histogram_is_within_a_per_cent_of_the_values(values: list[float]) -> None:
    histogram = Histogram()
    given_ms = np.array(values)
    histogram.add(given_ms, Histogram.bins(given_ms))
    found, exact = histogram.spread(), Spread.of(values)
    assert found is not None and exact is not None
    for name in ("p50", "p90", "p95", "p99", "mean"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=0.01)
    assert (found.max, found.n) == (exact.max, exact.n)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
@FEW
def test_counts_spread_as_the_values_they_count(values: list[int]) -> None:
    distinct, counts = np.unique(values, return_counts=True)
    found, exact = Spread.of_counts(distinct.astype(np.float64), counts), Spread.of(values)
    assert found is not None and exact is not None
    for name in ("p50", "p90", "p95", "p99", "mean", "max", "n"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name))


@given(samples, st.integers(0, 1000))
@FEWER
def test_an_interval_holds_its_figure_and_depends_on_nothing_but_the_seed(
    values: list[float], seed: int
) -> None:
    for statistic in (mean_of_rows, percentile_of_rows(99)):
        found = bootstrap_interval(values, statistic, seed=seed, resamples=RESAMPLES)
        assert found is not None
        assert found == bootstrap_interval(values, statistic, seed=seed, resamples=RESAMPLES)
        if len(values) == 1:
            assert found.low is found.high is None
        else:
            assert found.low is not None and found.high is not None
            assert found.low <= found.value <= found.high
            assert min(values) * (1 - 1e-9) <= found.low
            assert found.high <= max(values) * (1 + 1e-9)


@given(st.lists(positive, min_size=2, max_size=30), st.floats(0.01, 100))
@FEWER
def test_intervals_scale_with_their_values(values: list[float], factor: float) -> None:
    plain = bootstrap_interval(values, seed=1, resamples=RESAMPLES)
    scaled = bootstrap_interval(np.array(values) * factor, seed=1, resamples=RESAMPLES)
    assert plain is not None and scaled is not None
    for name in ("value", "low", "high"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(plain, name))


def test_an_interval_narrows_as_values_are_added() -> None:
    rng = np.random.default_rng(11)
    widths = []
    for num in (20, 200, 2000):
        found = bootstrap_interval(rng.lognormal(0, 1, num), seed=3, resamples=500)
        assert found is not None and found.low is not None and found.high is not None
        widths.append(found.high - found.low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_intervals_hold_the_truth_about_as_often_as_they_say(sigma: float) -> None:
    """Normal, then lognormal values with a mean of e^(sigma^2 / 2)."""
    rng = np.random.default_rng(12)
    trials, held = 300, 0
    truth = 10.0 if sigma == 0 else math.exp(sigma**2 / 2)
    for trial in range(trials):
        values = rng.normal(10, 2, 60) if sigma == 0 else rng.lognormal(0, sigma, 60)
        found = bootstrap_interval(values, seed=trial, resamples=400)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert 0.90 <= held / trials <= 0.98


def test_intervals_by_block_hold_the_truth_where_blocks_differ() -> None:
    """Where those by request, which take every request for a witness of its own, do not."""
    rng = np.random.default_rng(13)
    trials, by_block, by_request = 80, 0, 0
    for trial in range(trials):
        blocks = [rng.normal(10 + rng.normal(0, 1), 1, 30) for _ in range(12)]
        wide = block_interval(blocks, seed=trial, resamples=RESAMPLES)
        narrow = bootstrap_interval(np.concatenate(blocks), seed=trial, resamples=RESAMPLES)
        for found in (wide, narrow):
            assert found is not None and found.low is not None and found.high is not None
            if found.low <= 10 <= found.high:
                by_block += found is wide
                by_request += found is narrow
    assert by_block / trials >= 0.85
    assert by_request / trials <= 0.7


@given(pairs, st.floats(0.1, 10))
@FEW
def test_ratios_invert_scale_and_keep_their_chance(
    given_pairs: list[tuple[float, float]], factor: float
) -> None:
    a, b = [one for one, _ in given_pairs], [other for _, other in given_pairs]
    found, turned = paired_ratio(a, b), paired_ratio(b, a)
    scaled = paired_ratio(a, [factor * each for each in b])
    assert found.value is not None and found.low is not None and found.high is not None
    assert turned.value == pytest.approx(1 / found.value, rel=1e-6)
    assert turned.low == pytest.approx(1 / found.high, rel=1e-6)
    assert turned.p == pytest.approx(found.p, abs=1e-6)
    assert turned.p_check == pytest.approx(found.p_check)
    assert scaled.value == pytest.approx(found.value / factor, rel=1e-6)
    assert found.low <= found.value * (1 + 1e-9) and found.value <= found.high * (1 + 1e-9)
    back = found.inverse()
    assert back.value == pytest.approx(turned.value) and back.low == pytest.approx(turned.low)


@given(st.lists(positive, min_size=3, max_size=20), st.integers(0, 100))
@FEWER
def test_nothing_differs_from_itself(values: list[float], seed: int) -> None:
    latencies_by_request = {str(index): value for index, value in enumerate(values)}
    for found in (
        paired_ratio(values, values),
        per_request_ratio(
            latencies_by_request, latencies_by_request, seed=seed, resamples=RESAMPLES
        ),
        unpaired_ratio(values, values, seed=seed, resamples=RESAMPLES),
        unpaired_ratio(values, values, percentile_of_rows(99), seed=seed, resamples=RESAMPLES),
        unpaired_blocks_ratio(values, values),
    ):
        assert found.value == pytest.approx(1)
        assert found.p is not None and found.p > 0.05


def test_arms_without_a_difference_are_seldom_told_apart() -> None:
    rng = np.random.default_rng(14)
    trials = 500
    mistaken = mistaken_flips = 0
    for _ in range(trials):
        mood = rng.lognormal(0, 0.5, 6)
        a, b = (mood * rng.lognormal(0, 0.05, 6) for _ in range(2))
        found = paired_ratio(a.tolist(), b.tolist())
        assert found.p is not None and found.p_check is not None
        mistaken += found.p < 0.05
        mistaken_flips += found.p_check < 0.05
    assert 0.01 <= mistaken / trials <= 0.08
    assert mistaken_flips / trials <= 0.08


def test_arms_with_a_difference_are_told_apart_however_the_machine_swings() -> None:
    rng = np.random.default_rng(15)
    mood = rng.lognormal(0, 0.5, 8)
    a, b = 1.2 * mood * rng.lognormal(0, 0.02, 8), mood * rng.lognormal(0, 0.02, 8)
    assert (paired_ratio(a.tolist(), b.tolist()).p or 1) < 0.001
    assert (unpaired_blocks_ratio(a.tolist(), b.tolist()).p or 0) > 0.05


@given(st.lists(st.none() | st.floats(0, 1), max_size=12))
@FEW
def test_holm_never_lowers_a_chance_and_keeps_their_order(ps: list[float | None]) -> None:
    corrected = holm(ps)
    known = [(p, c) for p, c in zip(ps, corrected, strict=True) if p is not None]
    assert [c is None for c in corrected] == [p is None for p in ps]
    for p, c in known:
        assert c is not None and p <= c <= 1
        assert c <= min(1.0, p * len(known)) or any(other <= p < c for other, _ in known)
    in_order = [c for _, c in sorted(known, key=lambda pair: pair[0])]
    assert in_order == sorted(in_order, key=lambda c: c if c is not None else 0)


@given(anything, anything)
@example([1e100, 1e99, 1.0], [5e-324, 1.0, 5e-324])
@example([0.0, 0.0, 0.0], [float("nan")] * 3)
@FEW
def test_no_input_crashes_or_warns(a: list[float], b: list[float]) -> None:
    tame = [each if not abs(each) > 1e100 or math.isinf(each) else 1.0 for each in a]
    other = [each if not abs(each) > 1e100 or math.isinf(each) else 1.0 for each in b]
    num = min(len(tame), len(other))
    percentile(tame, 50)
    bootstrap_interval(tame, seed=1, resamples=20)
    block_interval([tame, other], seed=1, resamples=20)
    paired_ratio(tame[:num], other[:num])
    unpaired_ratio(tame, other, seed=1, resamples=20)
    unpaired_blocks_ratio(tame, other)
    per_request_ratio(
        {str(index): each for index, each in enumerate(tame)},
        {str(index): each for index, each in enumerate(other)},
        seed=1,
        resamples=20,
    )


@st.composite
def requests(draw: st.DrawFn) -> RequestRecord:
    """Of any fate, at any time around a window from 0 to 10 s."""
    at = draw(st.floats(-3, 13))
    lag = draw(st.floats(0, 1))
    phase = (
        ShiftPhase.MEASURED
        if 0 <= at < 10
        else ShiftPhase.WARM_UP
        if at < 0
        else ShiftPhase.COOL_DOWN
    )
    fate = draw(st.sampled_from(["ok", "ok", "ok", "reset", "http 429", "timeout"]))
    if fate != "ok":
        return failed(None if fate == "timeout" else fate, intended_s=at, lag_s=lag, phase=phase)
    tokens = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    gaps = draw(st.lists(st.floats(0.001, 2), min_size=len(tokens), max_size=len(tokens)))
    return answered(
        intended_s=at,
        lag_s=lag,
        update_s=tuple(np.cumsum(gaps).tolist()),
        update_tokens=tuple(tokens),
        phase=phase,
        category=draw(st.sampled_from(["code", "text"])),
        prompt_tokens=draw(st.none() | st.integers(1, 5000)),
    )


crowds = st.lists(requests(), min_size=1, max_size=12)


def figures(records: list[RequestRecord], slo: Slo | None = None) -> Measures:
    return Analysis(records, [shift()], slo=slo).of("off", "rate 2")


@given(crowds)
@FEW
def test_the_books_balance_in_the_whole_and_in_every_part(records: list[RequestRecord]) -> None:
    analysis = Analysis(records, [shift()])
    whole = analysis.of("off", "rate 2")
    assert whole.sent == sum(record.phase is ShiftPhase.MEASURED for record in records)
    assert whole.sent == whole.ok + whole.failed + whole.timed_out
    for parts in (analysis.by_category("off", "rate 2"), analysis.by_length("off", "rate 2")):
        for name in ("sent", "ok", "failed", "timed_out"):
            total = sum(getattr(each, name) for each in parts.values())
            assert total == getattr(whole, name)


@given(crowds)
@FEW
def test_throughput_does_not_depend_on_how_updates_are_cut(records: list[RequestRecord]) -> None:
    """Four tokens at once, or four updates of one at the same moment."""
    cut = [
        replace(
            record,
            update_s=np.repeat(record.update_s, record.update_tokens).tolist(),
            update_tokens=[1] * sum(record.update_tokens),
        )
        if record.update_s
        else record
        for record in records
    ]
    plain, again = figures(records), figures(cut)
    assert again.output_tokens_s == pytest.approx(plain.output_tokens_s)
    assert (again.requests_s, again.ttft, again.e2e) == (
        plain.requests_s,
        plain.ttft,
        plain.e2e,
    )


@given(crowds)
@FEW
def test_a_delayed_client_adds_to_the_latency_it_would_hide(records: list[RequestRecord]) -> None:
    found = figures(records)
    assume(found.ttft is not None)
    assert found.ttft is not None and found.ttft_from_send is not None
    assert found.ttft.p50 >= found.ttft_from_send.p50 - 1e-6
    assert found.ttft.mean >= found.ttft_from_send.mean - 1e-6


@given(crowds, st.floats(1, 5000), st.floats(1, 2000), st.floats(1, 1.5))
@FEW
def test_goodput_is_a_share_and_rises_with_the_limits(
    records: list[RequestRecord], ttft: float, tpot: float, looser: float
) -> None:
    strict = figures(records, Slo(ttft, tpot)).goodput
    loose = figures(records, Slo(ttft * looser, tpot * looser)).goodput
    none = figures(records, Slo()).goodput
    assert strict is not None and loose is not None and none is not None
    if strict.share is None or loose.share is None or none.share is None:
        assert figures(records).sent == 0
    else:
        assert 0 <= strict.share <= loose.share <= none.share <= 1
    assert none.met == figures(records).ok
