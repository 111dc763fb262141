"""Who is next: arrival, priority, aging, siblings and deadlines."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_tools import Simulation, make_request, name_of

from outrider.errors import CapacityError, OutriderError
from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.types import FinishReason
from outrider.scheduler.waiting import Deadlines, WaitingQueue


def queued(*keys: tuple[float, int]) -> tuple[WaitingQueue, list[Request]]:
    queue, requests = WaitingQueue(), []
    for index, key in enumerate(keys):
        request = make_request(str(index), [1])
        request.key = key
        queue.push(request)
        requests.append(request)
    return queue, requests


def drained(queue: WaitingQueue) -> list[Request]:
    found: list[Request] = []
    while (first := queue.peek()) is not None:
        queue.pop(first)
        found.append(first)
    return found


def test_the_smallest_key_comes_first() -> None:
    queue, (late, early, middle) = queued((3.0, 1), (1.0, 2), (2.0, 3))
    assert drained(queue) == [early, middle, late]


def test_equal_keys_come_in_the_order_of_arrival() -> None:
    queue, (first, second) = queued((1.0, 1), (1.0, 2))
    assert drained(queue) == [first, second]


def test_a_request_that_ended_while_waiting_is_never_the_head() -> None:
    queue, (first, second) = queued((1.0, 1), (2.0, 2))
    first.state = RequestState.FINISHED
    queue.forget(first)
    assert queue.peek() is second
    assert len(queue) == 1


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue().peek() is None


def test_deadlines_expire_nearest_first_and_once() -> None:
    deadlines = Deadlines()
    late = make_request("late", [1], deadline_s=2.0)
    early = make_request("early", [1], deadline_s=1.0)
    for request in (late, early):
        deadlines.watch(request)
    assert deadlines.expired(0.5) == []
    assert deadlines.expired(2.0) == [early, late]
    assert deadlines.expired(3.0) == []


def one_at_a_time(**fields: Any) -> Simulation:
    return Simulation(max_num_seqs=1, **fields)


def order_of_service(simulation: Simulation) -> list[str]:
    served: list[str] = []
    while simulation.scheduler.has_work:
        plan = simulation.step()
        if plan is not None:
            served += [name_of(init.sample_id) for init in plan.admitted]
    return served


def test_within_a_priority_the_longest_wait_is_served_first() -> None:
    simulation = one_at_a_time()
    for name, arrival_s in (("second", 1.0), ("first", 0.0), ("third", 2.0)):
        simulation.add(make_request(name, [1, 2], arrival_s=arrival_s))
    assert order_of_service(simulation) == ["first", "second", "third"]


def test_a_smaller_priority_number_is_served_first() -> None:
    simulation = one_at_a_time()
    simulation.add(make_request("usual", [1, 2]))
    simulation.add(make_request("urgent", [1, 2], arrival_s=1.0, priority=-1))
    assert order_of_service(simulation) == ["urgent", "usual"]


def test_a_request_that_waited_one_aging_time_has_gained_one_level() -> None:
    simulation = one_at_a_time(priority_aging_s=10.0)
    simulation.add(make_request("patient", [1, 2], arrival_s=0.0, priority=1))
    simulation.add(make_request("late", [1, 2], arrival_s=10.5))
    simulation.add(make_request("in time", [1, 2], arrival_s=9.5))
    assert order_of_service(simulation) == ["in time", "patient", "late"]


def test_a_low_priority_is_served_under_a_constant_stream_of_high_ones() -> None:
    simulation = one_at_a_time(priority_aging_s=10.0)
    low = simulation.add(make_request("low", [1, 2], priority=3))
    for step in range(200):
        simulation.add(make_request(f"high {step}", [1, 2], 3, arrival_s=simulation.now_s))
        simulation.step()
        if low.finish_reason is not None:
            return
    pytest.fail("low priority starved")


def test_followers_wait_for_their_siblings_prompt_and_find_it_cached() -> None:
    simulation = Simulation(block_size=4, budget=8)
    prompt = list(range(13))
    simulation.add(make_request("first", prompt))
    follower = simulation.add(make_request("second", prompt, seed=8), after="first")
    simulation.step()
    states = [follower.request.state]
    simulation.step()
    states.append(follower.request.state)
    assert states == [RequestState.PARKED, RequestState.WAITING]
    simulation.drain()
    assert follower.num_cached_tokens == 12


def test_followers_are_released_when_their_sibling_is_cancelled() -> None:
    simulation = Simulation()
    simulation.add(make_request("first", [1, 2, 3]))
    follower = simulation.add(make_request("second", [1, 2, 3]), after="first")
    simulation.cancel("first")
    simulation.drain()
    assert follower.finish_reason == FinishReason.LENGTH


def test_a_follower_can_be_cancelled_while_it_is_parked() -> None:
    simulation = Simulation()
    simulation.add(make_request("first", [1, 2, 3]))
    follower = simulation.add(make_request("second", [1, 2, 3]), after="first")
    simulation.cancel("second")
    simulation.drain()
    assert follower.finish_reason == FinishReason.CANCELLED


def test_a_follower_of_an_unknown_request_just_waits() -> None:
    simulation = Simulation()
    lonely = simulation.add(make_request("second", [1, 2, 3]), after="never seen")
    simulation.drain()
    assert lonely.finish_reason == FinishReason.LENGTH


def test_without_a_prefix_cache_there_is_nothing_to_wait_for() -> None:
    simulation = Simulation(prefix_caching=False)
    simulation.add(make_request("first", [1, 2, 3]))
    sibling = simulation.add(make_request("second", [1, 2, 3]), after="first")
    assert sibling.request.state is RequestState.WAITING


@pytest.mark.parametrize("lag", [0, 1])
def test_a_deadline_ends_a_running_and_a_waiting_request(lag: int) -> None:
    simulation = Simulation(max_num_seqs=1, lag=lag)
    running = simulation.add(make_request("running", [1, 2], 40, deadline_s=5.0))
    waiting = simulation.add(make_request("waiting", [1, 2], 40, deadline_s=5.0))
    for _ in range(5):
        simulation.step()
    assert running.finish_reason == waiting.finish_reason == FinishReason.DEADLINE
    assert running.tokens and not waiting.tokens
    simulation.drain()


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    simulation = Simulation()
    simulation.add(make_request("same", [1, 2]))
    with pytest.raises(OutriderError, match="is in use; choose another"):
        simulation.add(make_request("same", [1, 2]))
    simulation.drain()
    simulation.add(make_request("same", [1, 2]))
    simulation.drain()


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    simulation = Simulation(num_blocks=3, block_size=4)
    with pytest.raises(CapacityError, match="13 tokens, which needs 4 KV blocks of 4.*are 3"):
        simulation.add(make_request("large", [1] * 5, 8))
    assert not simulation.scheduler.has_work


def test_a_full_queue_refuses_more() -> None:
    simulation = Simulation(max_waiting=2)
    for name in "ab":
        simulation.add(make_request(name, [1]))
    with pytest.raises(CapacityError, match="2 requests are waiting already"):
        simulation.add(make_request("c", [1]))
    simulation.step()
    simulation.add(make_request("c", [1]))
    simulation.drain()


def test_a_cancelled_request_makes_room_in_the_queue() -> None:
    simulation = Simulation(max_waiting=1)
    simulation.add(make_request("a", [1]))
    simulation.cancel("a")
    simulation.add(make_request("b", [1]))
    simulation.drain()


def test_a_request_resumed_at_its_limit_ends_at_once() -> None:
    simulation = Simulation()
    record = simulation.add(make_request("done", [1, 2], output_ids=[3, 4], max_len=4))
    simulation.step()
    assert (record.finish_reason, record.tokens) == (FinishReason.LENGTH, [])
    simulation.drain()


def test_cancelling_an_unknown_request_is_no_error() -> None:
    simulation = Simulation()
    simulation.cancel("never seen")
    assert simulation.scheduler.take_updates() == []
