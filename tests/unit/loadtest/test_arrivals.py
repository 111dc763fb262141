"""Patterns of arrivals: their texts, their rates and their shapes."""

from __future__ import annotations

import math
import pickle
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from outrider.errors import ConfigError
from outrider.loadtest.arrivals import (
    Arrivals,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Spike,
    read_arrivals,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("poisson", Poisson(4)),
        ("constant", Constant(4)),
        ("gamma:0.3", Gamma(4, 0.3)),
        ("ramp:1-10", Ramp(1, 10)),
        ("ramp:.5-2.5", Ramp(0.5, 2.5)),
        ("spike:2-20@30s+10s", Spike(2, 20, 30, 10)),
        (" Spike:2-20@1.5m+500ms ", Spike(2, 20, 90, 0.5)),
    ],
)
def test_a_pattern_is_read_from_its_text(text: str, expected: Arrivals) -> None:
    assert read_arrivals(text, rate=4) == expected


@pytest.mark.parametrize(
    "text", ["", "posson", "gamma", "gamma:x", "ramp:1", "ramp:1e3-2", "spike:2-20", "poisson:3"]
)
def test_a_text_that_is_no_pattern_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood; write poisson, gamma:BURSTINESS"):
        read_arrivals(text, rate=4)


def test_a_pattern_without_rates_of_its_own_needs_one() -> None:
    with pytest.raises(ConfigError, match="poisson arrivals need a rate"):
        read_arrivals("poisson")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 1e9])
@pytest.mark.parametrize("text", ["poisson", "constant", "gamma:1"])
def test_a_rate_that_cannot_be_is_refused(text: str, rate: float) -> None:
    with pytest.raises(ConfigError, match=r"the rate is .* requests a second; give"):
        read_arrivals(text, rate=rate)


@pytest.mark.parametrize(
    "text", ["ramp:0-10", "ramp:1-nan", "ramp:-1-5", "spike:0-3@1s+1s", "spike:1-inf@1s+1s"]
)
def test_a_rate_inside_a_pattern_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="requests a second; give"):
        read_arrivals(text)


@pytest.mark.parametrize("text", ["gamma:0", "gamma:-1", "gamma:nan", "gamma:1000000"])
def test_a_burstiness_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the burstiness is"):
        read_arrivals(text, rate=1)


@pytest.mark.parametrize("text", ["spike:1-2@-1s+1s", "spike:1-2@inf+1s", "spike:1-2@1s+0s"])
def test_a_spike_that_never_is_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the spike"):
        read_arrivals(text)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_a_duration_that_cannot_be_is_refused(duration_s: float) -> None:
    with pytest.raises(ConfigError, match="the duration is"):
        Poisson(1).offsets(duration_s, seed=0)


@pytest.mark.parametrize("times", [(1.0, 0.5), (-1.0,), (math.nan,), (0.0, math.inf)])
def test_a_replay_of_times_out_of_order_is_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="give times from 0 in order"):
        Replay(times)


def test_a_seed_means_the_same_arrivals_on_every_machine() -> None:
    first = list(islice(Poisson(2).offsets(100, seed=7), 3))

    assert first == pytest.approx(
        [0.3485296935099462, 1.5929811154080427, 1.7178994694085614], rel=1e-9
    )
    assert list(islice(Poisson(2).offsets(100, seed=8), 3)) != first
    assert list(islice(Poisson(2).offsets(100, seed=-7), 3)) != first


def test_a_year_of_a_million_a_second_is_made_one_by_one() -> None:
    offsets = Poisson(1e6).offsets(365 * 24 * 3600, seed=0)

    assert len(list(islice(offsets, 5))) == 5


def test_constant_arrivals_are_spaced_evenly_from_zero() -> None:
    assert list(Constant(4).offsets(1, seed=0)) == [0, 0.25, 0.5, 0.75]


def test_a_replay_ends_with_the_duration() -> None:
    assert list(Replay((0.0, 1.0, 1.0, 2.0)).offsets(2, seed=0)) == [0, 1, 1]


# 10,000 arrivals are expected of each: five deviations of their number are 500.
@pytest.mark.parametrize(
    "arrivals",
    [Poisson(50), Constant(50), Gamma(50, 4), Ramp(10, 90), Ramp(90, 10), Spike(40, 140, 60, 20)],
    ids=str,
)
def test_the_number_of_arrivals_is_what_the_rate_says(arrivals: Arrivals) -> None:
    num = len(list(arrivals.offsets(200, seed=1)))

    assert arrivals.expected(200) == pytest.approx(10_000)
    assert abs(num - 10_000) < 500


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gaps_vary_as_the_burstiness_says(burstiness: float) -> None:
    at = list(Gamma(50, burstiness).offsets(400, seed=3))
    gaps = [later - earlier for earlier, later in pairwise(at)]

    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_vary_as_much_as_they_are_long() -> None:
    at = list(Poisson(50).offsets(400, seed=3))
    gaps = [later - earlier for earlier, later in pairwise(at)]

    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("arrivals", "quarters"),
    [
        (Ramp(10, 90), (1000, 2000, 3000, 4000)),
        (Ramp(90, 10), (4000, 3000, 2000, 1000)),
        (Spike(40, 140, 50, 20), (2000, 4000, 2000, 2000)),
    ],
    ids=str,
)
def test_arrivals_fall_where_the_rate_is(arrivals: Arrivals, quarters: tuple[int, ...]) -> None:
    at = list(arrivals.offsets(200, seed=2))

    for quarter, expected in enumerate(quarters):
        num = sum(quarter * 50 <= each < (quarter + 1) * 50 for each in at)
        assert abs(num - expected) < 5 * math.sqrt(expected)


def test_a_spike_beyond_the_end_changes_nothing() -> None:
    late = Spike(5, 500, 60, 10)

    assert late.expected(60) == 300
    assert list(late.offsets(60, seed=0)) == list(Poisson(5).offsets(60, seed=0))


def test_a_pattern_travels_to_another_process() -> None:
    spike = Spike(2, 20, 3, 1)

    copy = pickle.loads(pickle.dumps(spike))

    assert copy == spike
    assert list(copy.offsets(10, seed=4)) == list(spike.offsets(10, seed=4))
