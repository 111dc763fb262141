"""Whatever the pattern: in order, inside the window, and shared out without loss."""

from __future__ import annotations

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.loadtest.arrivals import (
    Arrivals,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Replay,
    Spike,
    share_of,
)

RATES = st.floats(0.01, 200)
SECONDS = st.floats(0, 20)
ARRIVALS: st.SearchStrategy[Arrivals] = st.one_of(
    st.builds(Poisson, RATES),
    st.builds(Constant, RATES),
    st.builds(Gamma, RATES, st.floats(0.05, 50)),
    st.builds(Ramp, RATES, RATES),
    st.builds(Spike, RATES, RATES, SECONDS, st.floats(0.01, 20)),
    st.builds(Replay, st.lists(SECONDS, max_size=50).map(lambda at: tuple(sorted(at)))),
)
DURATIONS = st.floats(0.001, 10)
SEEDS = st.integers(-(2**40), 2**40)


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, DURATIONS, SEEDS)
def test_offsets_never_fall_and_stay_in_the_window(
    arrivals: Arrivals, duration_s: float, seed: int
) -> None:
    at = list(arrivals.offsets(duration_s, seed))

    assert at == sorted(at)
    assert all(0 <= each < duration_s for each in at)


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, DURATIONS, SEEDS)
def test_a_longer_run_begins_like_a_shorter_one_unless_the_rate_stretches(
    arrivals: Arrivals, duration_s: float, seed: int
) -> None:
    short = list(arrivals.offsets(duration_s, seed))
    longer = list(arrivals.offsets(duration_s * 2, seed))

    if not isinstance(arrivals, Ramp):
        assert longer[: len(short)] == short


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, DURATIONS, SEEDS, st.integers(1, 5))
def test_clients_share_one_schedule_without_loss_or_double(
    arrivals: Arrivals, duration_s: float, seed: int, num_clients: int
) -> None:
    whole = list(enumerate(arrivals.offsets(duration_s, seed)))
    shares = [
        list(share_of(arrivals.offsets(duration_s, seed), client, num_clients))
        for client in range(num_clients)
    ]

    assert list(heapq.merge(*shares)) == whole
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
