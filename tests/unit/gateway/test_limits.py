"""Limits of a key, on a clock that the test moves."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from outrider.api_types.errors import RateLimitError
from outrider.errors import CapacityError, RequestError
from outrider.gateway.active_requests import ActiveRequests
from outrider.gateway.auth.caller import LOCAL, Caller, CallerLimits, Scope
from outrider.gateway.limits import Limits


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> Limits:
    return Limits(clock)


def _caller(name: str = "alice", **limits: int) -> Caller:
    return Caller(name, frozenset({Scope.INFER}), CallerLimits(**limits))


def _wait_s(limits: Limits, caller: Caller) -> float | None:
    """How long a refused request is to wait; None if it is let in."""
    try:
        with limits.admitted(caller):
            return None
    except RateLimitError as error:
        assert error.retry_after_s is not None
        assert caller.name in str(error)
        return error.retry_after_s


def test_requests_come_back_evenly_over_the_minute(limits: Limits, clock: Clock) -> None:
    caller = _caller(requests_per_minute=6)
    assert [_wait_s(limits, caller) for _ in range(6)] == [None] * 6
    assert _wait_s(limits, caller) == 10
    clock.now_s += 9.5
    assert _wait_s(limits, caller) == 1
    clock.now_s += 0.5
    assert _wait_s(limits, caller) is None
    clock.now_s += 3600  # no more than a minute's worth is saved up
    assert [_wait_s(limits, caller) for _ in range(7)] == [None] * 6 + [10]


def test_the_wait_that_is_told_is_enough(limits: Limits, clock: Clock) -> None:
    caller = _caller(requests_per_minute=7)
    for _ in range(50):
        while (wait_s := _wait_s(limits, caller)) is None:
            clock.now_s += 0.1
        clock.now_s += wait_s
        assert _wait_s(limits, caller) is None


def test_keys_do_not_use_up_each_others_limits(limits: Limits) -> None:
    assert _wait_s(limits, _caller("alice", requests_per_minute=1)) is None
    assert _wait_s(limits, _caller("bob", requests_per_minute=1)) is None
    assert _wait_s(limits, _caller("alice", requests_per_minute=1)) == 60


def test_prompts_are_charged_when_read_and_outputs_as_they_are_generated(
    limits: Limits, clock: Clock
) -> None:
    caller = _caller(tokens_per_minute=600)
    with limits.admitted(caller) as admission:
        num_generated = 0
        admission.read(200)
        admission.read(300, lambda: num_generated)
        assert _wait_s(limits, caller) is None
        num_generated = 99
        assert _wait_s(limits, caller) is None
        num_generated = 100
        assert _wait_s(limits, caller) == 1
        num_generated = 200  # it goes on: only new requests are refused
        assert _wait_s(limits, caller) == 11
    assert _wait_s(limits, caller) == 11
    clock.now_s += 11
    assert _wait_s(limits, caller) is None


def test_tokens_are_charged_though_nobody_asks_while_they_are_generated(limits: Limits) -> None:
    caller = _caller(tokens_per_minute=60)
    with limits.admitted(caller) as admission:
        admission.read(0, lambda: 119)
    assert _wait_s(limits, caller) == 60


def test_a_refused_request_costs_nothing(limits: Limits, clock: Clock) -> None:
    caller = _caller(requests_per_minute=2, max_concurrent=1)
    with limits.admitted(caller):
        assert [_wait_s(limits, caller) for _ in range(5)] == [1.0] * 5
    assert _wait_s(limits, caller) is None


def test_a_place_is_free_once_its_request_ends_in_whatever_way(limits: Limits) -> None:
    caller = _caller(max_concurrent=2)
    with contextlib.suppress(KeyError), limits.admitted(caller), limits.admitted(caller):
        assert _wait_s(limits, caller) == 1
        raise KeyError
    assert _wait_s(limits, caller) is None


def test_processes_share_a_limit_and_none_is_left_without(limits: Limits) -> None:
    limits.num_processes = 4
    many, few = _caller(requests_per_minute=40), _caller("bob", requests_per_minute=2)
    assert [_wait_s(limits, many) for _ in range(11)] == [None] * 10 + [6]
    assert [_wait_s(limits, few) for _ in range(2)] == [None, 60]
    assert [limits.share_of(each) for each in (1, 4, 9)] == [1, 1, 3]


def test_a_limit_that_changes_holds_from_then_on(limits: Limits) -> None:
    assert _wait_s(limits, _caller(requests_per_minute=100)) is None
    strict = _caller(requests_per_minute=1)
    assert [_wait_s(limits, strict) for _ in range(2)] == [None, 60]
    assert _wait_s(limits, _caller()) is None


def test_whoever_needs_no_key_has_no_limits(limits: Limits) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(limits.admitted(LOCAL))


def test_as_many_are_left_running_as_may_run_at_once(clock: Clock) -> None:
    limits = Limits(clock, window_s=30)
    limits.num_processes = 2

    def leave(caller: Caller) -> bool:
        with limits.admitted(caller) as admission:
            return admission.may_detach()

    caller = _caller(max_concurrent=4)
    assert [leave(caller) for _ in range(3)] == [True, True, False]
    clock.now_s += 29
    assert not leave(caller)
    clock.now_s += 1
    assert [leave(caller) for _ in range(3)] == [True, True, False]
    assert all(leave(other) for other in (LOCAL, _caller("bob")) for _ in range(9))


def test_samples_count_among_those_at_once_and_prompts_as_requests(
    limits: Limits, clock: Clock
) -> None:
    caller = _caller(max_concurrent=6, requests_per_minute=4)
    with limits.admitted(caller) as large:
        large.count(2, 2)
        with limits.admitted(caller) as other:
            with pytest.raises(RateLimitError, match="6 requests at once"):
                other.count(1, 3)
            other.count(1, 2)
            assert _wait_s(limits, caller) == 1, "there is no place"
    assert _wait_s(limits, caller) is None
    assert _wait_s(limits, caller) == 15, "four prompts of three calls are paid for"
    clock.now_s += 60


def test_prompts_beyond_the_limit_of_a_minute_are_paid_for_by_the_next(limits: Limits) -> None:
    caller = _caller(requests_per_minute=2)
    with limits.admitted(caller) as admission:
        admission.count(5, 1)
    assert _wait_s(limits, caller) == 120


def test_what_can_never_be_let_in_is_no_matter_of_waiting(limits: Limits) -> None:
    caller = _caller(max_concurrent=2)
    with (
        limits.admitted(caller) as admission,
        pytest.raises(
            RequestError, match=r"3 prompts, which are 3 samples .* may have 2 \(max_con"
        ),
    ):
        admission.count(3, 1)


def test_a_call_alone_may_have_more_than_the_share_of_its_process(limits: Limits) -> None:
    limits.num_processes = 4
    caller = _caller(max_concurrent=4)
    with limits.admitted(caller) as admission:
        admission.count(1, 4)
        assert _wait_s(limits, caller) == 1


def test_a_key_that_fills_the_gateway_does_not_lock_others_out() -> None:
    active_requests = ActiveRequests()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(active_requests.claimed("greedy", "", 8, may_share=False))
        with pytest.raises(CapacityError, match="8 requests are active already"):
            active_requests.check_capacity("greedy", 8)
        for _ in range(4):
            stack.enter_context(active_requests.claimed("modest", "", 8, may_share=False))
        with pytest.raises(CapacityError):
            active_requests.check_capacity("modest", 8)
    active_requests.check_capacity("greedy", 8)
