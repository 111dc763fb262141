"""Random lives of a scheduler: arrivals, cancellations, preemptions, every acceptance outcome.

What is checked after every step stands in `scheduler_tools.Simulation` and in `FakeWorkers`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_crowd import Crowd, random_simulation

from outrider.catalog.proposers import NGRAM
from outrider.scheduler.types import NO_PROPOSER
from outrider.testing.fake_workers import HEAD


@pytest.mark.parametrize("lag", [0, 1])
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(rng=st.randoms(use_true_random=False), num_events=st.integers(1, 40))
def test_every_request_gets_its_plain_text_whatever_happens_around_it(
    lag: int, rng: random.Random, num_events: int
) -> None:
    crowd = Crowd(random_simulation(rng, lag), rng)
    for _ in range(num_events):
        crowd.act()
        crowd.simulation.step()
    crowd.simulation.drain()


@pytest.mark.thorough
@pytest.mark.parametrize("lag", [0, 1])
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(rng=st.randoms(use_true_random=False), num_events=st.integers(1, 40))
def test_a_head_finds_what_it_keeps_of_every_text_it_drafts_for(
    lag: int, rng: random.Random, num_events: int
) -> None:
    """Blocks that requests without it leave behind are shared among these alone."""
    crowd = Crowd(random_simulation(rng, lag, HEAD), rng, (NO_PROPOSER, NGRAM, HEAD, HEAD))
    control = crowd.simulation.scheduler.control
    for _ in range(num_events):
        crowd.act()
        if rng.random() < 0.1:
            control.max_depth = rng.choice([None, 0])
        if rng.random() < 0.1:
            control.set_policy(rng.choice(["fixed", "off"]))
        crowd.simulation.step()
    crowd.simulation.drain()


@pytest.mark.thorough
@pytest.mark.parametrize("lag", [0, 1])
def test_long_random_lives_end_with_everything_free(lag: int) -> None:
    live_many_lives(num_steps=4_000, seed=lag, lag=lag)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_half_a_million_steps_a_lag_end_with_everything_free(lag: int) -> None:
    live_many_lives(num_steps=500_000, seed=100 + lag, lag=lag)


def live_many_lives(num_steps: int, seed: int, lag: int) -> None:
    rng = random.Random(seed)
    done = 0
    while done < num_steps:
        simulation = random_simulation(rng, lag)
        crowd = Crowd(simulation, rng)
        for _ in range(rng.randint(1, 300)):
            crowd.act()
            simulation.step()
        simulation.drain()
        done += simulation.scheduler.stats.steps
