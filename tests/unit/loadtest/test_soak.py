"""Leaks are told from noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.loadtest.results.soak import SoakVerdict, Trend, TrendKind, soak_verdict, theil_sen
from outrider.loadtest.runs import ServerSample

HALF_HOUR = 1800


def _samples(
    memory: np.ndarray, handles: int = 50, threads: int = 9, server: str = "s"
) -> list[ServerSample]:
    return [
        ServerSample(
            float(at), server, None, 1, anonymous_mb=float(mb), handles=handles, threads=threads
        )
        for at, mb in enumerate(memory)
    ]


def _memory(verdict: SoakVerdict) -> Trend:
    return next(trend for trend in verdict.trends if trend.measure == "memory")


def _noise(seed: int, size: int, sd: float, likeness: float) -> np.ndarray:
    """Each value resembles the one before, as caches and collectors make them."""
    draws = np.random.default_rng(seed).normal(0, sd * np.sqrt(1 - likeness**2), size)
    values = np.zeros(size)
    for i in range(1, size):
        values[i] = likeness * values[i - 1] + draws[i]
    return values


# How far values resemble the one a second before, and the most noise, in MB, to see through: what
# goes up and down over minutes hides a leak from a run of half an hour.
NOISES = [(0.0, 6.0), (0.9, 3.0), (0.97, 1.5)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 1), st.sampled_from(NOISES))
def test_a_leak_of_a_megabyte_a_minute_is_told_from_noise(
    seed: int, share: float, noise: tuple[float, float]
) -> None:
    likeness, most = noise
    sd = share * most
    leak = np.arange(HALF_HOUR) / 60
    trend = _memory(soak_verdict(_samples(900 + leak + _noise(seed, HALF_HOUR, sd, likeness))))
    assert trend.course is TrendKind.GROWS
    assert trend.slope is not None
    assert trend.slope.low <= trend.slope.an_hour <= trend.slope.high
    assert 48 < trend.slope.an_hour < 72


def test_flat_noise_is_called_a_leak_in_two_of_a_hundred_runs_at_most() -> None:
    calls = 0
    for seed in range(150):
        noise = _noise(seed, 600, sd=3, likeness=(0.0, 0.9, 0.97)[seed % 3])
        calls += _memory(soak_verdict(_samples(900 + noise))).course is TrendKind.GROWS
    assert calls <= 3


def test_the_interval_holds_the_true_slope_as_often_as_it_says() -> None:
    leak = np.arange(HALF_HOUR) / 60
    held = 0
    for seed in range(60):
        noise = _noise(seed, HALF_HOUR, sd=6, likeness=(0.0, 0.9, 0.97)[seed % 3])
        slope = _memory(soak_verdict(_samples(900 + leak + noise))).slope
        assert slope is not None
        held += slope.low <= 60 <= slope.high
    assert held >= 58


def test_what_is_flat_says_what_growth_it_rules_out() -> None:
    trend = _memory(soak_verdict(_samples(900 + _noise(3, HALF_HOUR, 3, 0.9))))
    assert trend.course is TrendKind.FLAT and trend.slope is not None
    bound = max(-trend.slope.low, trend.slope.high)
    assert f"s: memory flat to within {bound:.3g} MB an hour, from " in trend.sentence


def test_a_collector_s_saw_teeth_are_flat() -> None:
    teeth = np.arange(HALF_HOUR) % 97 * 0.5
    assert _memory(soak_verdict(_samples(900 + teeth))).course is TrendKind.FLAT


def test_a_cache_that_fills_levels_off() -> None:
    filling = 900 + np.minimum(np.arange(HALF_HOUR), 800) * 0.1
    trend = _memory(soak_verdict(_samples(filling + _noise(1, HALF_HOUR, 0.2, 0)), warm_up_s=0))
    assert trend.course is TrendKind.LEVELS_OFF
    assert "no longer in the second half" in trend.sentence


def test_a_leak_that_begins_late_is_found() -> None:
    late = 900 + np.maximum(np.arange(HALF_HOUR) - 1000, 0) / 60
    trend = _memory(soak_verdict(_samples(late + _noise(1, HALF_HOUR, 0.5, 0.5))))
    assert trend.course is TrendKind.GROWS


def test_a_start_that_fills_memory_is_warm_up() -> None:
    memory = np.concatenate([np.linspace(0, 900, 300), np.full(1500, 900.0)])
    assert _memory(soak_verdict(_samples(memory))).course is TrendKind.FLAT


def test_sentences_tell_the_growth_with_its_interval_and_what_is_flat() -> None:
    verdict = soak_verdict(_samples(100 + np.arange(HALF_HOUR) * (3.1 / 3600)))
    assert not verdict.is_flat
    assert verdict.sentences == [
        "s: memory grows by 3.1 MB an hour (3.1 to 3.1), from 100.4 to 101.5 MB, at most 101.5 MB.",
        "s: handles flat, from 50 to 50, at most 50.",
        "s: threads flat, from 9 to 9, at most 9.",
    ]


def test_handles_that_leak_are_told_and_servers_are_told_apart() -> None:
    flat = _samples(np.full(HALF_HOUR, 500.0), server="b")
    leaking = _samples(np.full(HALF_HOUR, 500.0), server="a")
    for at, sample in enumerate(leaking):
        sample.handles = 20 + at // 60
    verdict = soak_verdict([*flat, *leaking])
    grown = [(trend.server, trend.measure) for trend in verdict.trends if trend.course != "flat"]
    assert grown == [("a", "handles")]
    assert len(verdict.trends) == 6


def test_memory_that_is_given_back_falls() -> None:
    trend = _memory(soak_verdict(_samples(900 - np.arange(HALF_HOUR) / 60)))
    assert trend.course is TrendKind.FALLS
    assert "falls by 60 MB an hour" in trend.sentence


@pytest.mark.parametrize("count", [1, 5, 50])
def test_a_short_run_tells_nothing(count: int) -> None:
    verdict = soak_verdict(_samples(np.arange(count) * 10.0))
    assert {trend.course for trend in verdict.trends} == {TrendKind.TOO_SHORT}
    assert verdict.is_flat and "is too short to tell" in verdict.sentences[0]


def test_what_nobody_tells_has_no_trend() -> None:
    assert soak_verdict([ServerSample(float(at), "far", None) for at in range(99)]).trends == ()
    assert soak_verdict([]).sentences == []


@given(st.integers(0, 2**31), st.floats(-50, 50))
def test_outliers_do_not_move_the_slope(seed: int, an_hour: float) -> None:
    rng = np.random.default_rng(seed)
    times = np.arange(60.0) * 30
    values = an_hour * times / 3600
    values[rng.choice(60, 12, replace=False)] += rng.uniform(0, 1e4, 12)
    slope = theil_sen(times, values)
    assert slope.low - 1e-6 <= an_hour <= slope.high + 1e-6
