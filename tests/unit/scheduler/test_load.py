"""Arrivals, and whether the requests that run are the last."""

from __future__ import annotations

import pytest

from outrider.scheduler.load import Load


def test_the_arrival_rate_falls_while_no_request_comes() -> None:
    load = Load(seats=64)
    for number in range(20):
        load.observe_arrival(number * 0.1)
    load.now_s = 2.0
    assert load.arrivals_per_s == pytest.approx(10.0, rel=0.1)
    load.now_s = 20.0
    assert load.arrivals_per_s == pytest.approx(1.0, rel=0.1)


def _closed_loop(load: Load, clients: int, residence_s: float, until_s: float) -> None:
    """Each request is replaced as it ends, one after the other."""
    gap_s = residence_s / clients
    for number in range(clients, round(until_s / gap_s)):
        load.now_s = number * gap_s
        load.observe_end(load.now_s - residence_s)
        load.observe_arrival(load.now_s)


def test_requests_that_are_replaced_are_not_the_last() -> None:
    load = Load(seats=8)
    _closed_loop(load, 8, 1.0, until_s=5.0)
    assert load.share == pytest.approx(1.0, rel=0.1)
    assert not load.is_draining(8, 0)
    load.now_s += 0.8
    assert not load.is_draining(8, 0), "chance can do that"
    load.now_s += 0.6
    assert load.is_draining(6, 0)
    assert not load.is_draining(6, 1), "one waits to take a place"


def test_requests_that_came_at_once_are_the_last_until_others_come() -> None:
    load = Load(seats=16)
    for _ in range(16):
        load.observe_arrival(1.0)
    load.now_s = 1.5
    assert not load.is_draining(16, 0), "nothing is known of how long they take"
    load.observe_end(1.0)
    assert load.is_draining(15, 0)
    load.observe_arrival(1.5)
    assert not load.is_draining(16, 0)
    load.is_complete = True
    assert load.is_draining(16, 0)
    assert not load.is_draining(16, 1)


def test_gaps_between_the_last_arrivals_count_where_the_first_to_end_were_short() -> None:
    load = Load(seats=8)
    for number in range(16):
        load.now_s = float(number)
        load.observe_arrival(load.now_s)
        load.observe_end(load.now_s - 0.1)
    load.now_s += 7.0
    assert not load.is_draining(8, 0)
    load.now_s += 2.0
    assert load.is_draining(8, 0)
