"""Fairness among tenants: whose request is next, whose is refused, and whose gives way."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scheduler_tools import Record, Simulation, make_request, name_of

from outrider.errors import CapacityError
from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.tenants import Tenant, Tenants
from outrider.scheduler.waiting import WaitingQueue

PROMPT = list(range(5))


def ask(simulation: Simulation, name: str, tenant: str, num_tokens: int = 8, **more: Any) -> Record:
    """A prompt of its own, so that none of it is cached."""
    prompt = [sum(name.encode()) % 50, *name.encode()]
    is_resumed = bool(more.pop("is_resumed", False))
    request = make_request(name, prompt, num_tokens, simulation.now_s, tenant=tenant, **more)
    return simulation.add(request, is_resumed=is_resumed)


def admitted(simulation: Simulation, num_steps: int) -> list[str]:
    """In so little time that no row is taken from another tenant."""
    found: list[str] = []
    for _ in range(num_steps):
        plan = simulation.step(1e-3)
        found += [] if plan is None else [name_of(init.sample_id) for init in plan.admitted]
    return found


def drained(simulation: Simulation) -> list[str]:
    found: list[str] = []
    while simulation.scheduler.has_work:
        found += admitted(simulation, 1)
    return found


# -- whose request is next ------------------------------------------------------------------------


def test_tenants_take_turns_however_many_requests_one_of_them_has() -> None:
    simulation = Simulation(max_num_seqs=1)
    for index in range(6):
        ask(simulation, f"a{index}", "a")
    ask(simulation, "b0", "b")
    ask(simulation, "b1", "b")
    assert drained(simulation)[:4] == ["a0", "b0", "a1", "b1"]


def test_rows_that_are_free_at_once_are_divided() -> None:
    simulation = Simulation(max_num_seqs=4)
    for index in range(6):
        ask(simulation, f"a{index}", "a")
    for index in range(2):
        ask(simulation, f"b{index}", "b")
    assert sorted(admitted(simulation, 1)) == ["a0", "a1", "b0", "b1"]


def test_cached_prompts_are_free_and_every_sample_counts() -> None:
    simulation = Simulation(block_size=4, max_num_seqs=8)
    tenants = simulation.scheduler._tenants

    def run(name: str, tenant: str, num_samples: int) -> int:
        before = tenants._idle[tenant].service if tenant in tenants._idle else 0
        for index in range(num_samples):
            request = make_request(f"{name}{index}", list(range(9)), 4, seed=index, tenant=tenant)
            simulation.add(request, after=f"{name}0" if index else None)
        simulation.drain()
        return tenants._idle[tenant].service - before

    assert run("first", "a", 1) == 9 + 4
    assert run("second", "a", 1) == 1 + 4
    assert run("third", "a", 3) == 3 * (1 + 4)


def test_an_idle_tenant_saves_up_no_service() -> None:
    simulation = Simulation(max_num_seqs=1)
    for index in range(8):
        ask(simulation, f"a{index}", "a", 12)
    while "a5" not in admitted(simulation, 1):
        pass
    for index in range(6):
        ask(simulation, f"b{index}", "b", 12)
    assert drained(simulation) == ["b0", "a6", "b1", "a7", "b2", "b3", "b4", "b5"]


def test_a_priority_puts_a_tenant_ahead_by_a_bounded_amount() -> None:
    simulation = Simulation(max_num_seqs=1, budget=16)
    for index in range(12):
        ask(simulation, f"a{index}", "a", 8)
        ask(simulation, f"b{index}", "b", 8, priority=-2)
    order = drained(simulation)
    assert order[0] == "b0" or order[1] == "b0"
    lead = max(
        sum(name.startswith("b") - name.startswith("a") for name in order[:end])
        for end in range(len(order) - 2)
    )
    assert 2 <= lead <= 5  # two steps of 16 tokens are worth about three requests


def test_a_tenant_of_least_urgent_requests_does_not_starve() -> None:
    simulation = Simulation(max_num_seqs=1, budget=16)
    late = ask(simulation, "late", "b", priority=5)
    for index in range(200):
        ask(simulation, f"a{index}", "a")
        simulation.step()
        if late.finish_reason is not None:
            return
    pytest.fail("it starved")


# -- a full queue ---------------------------------------------------------------------------------


def full_queue() -> Simulation:
    simulation = Simulation(max_num_seqs=1, max_waiting=4)
    ask(simulation, "running", "a", 30)
    simulation.step()
    for index in range(4):
        ask(simulation, f"a{index}", "a")
    return simulation


def displaced_by(simulation: Simulation, name: str, tenant: str) -> list[str]:
    """Taken out of what the simulation expects an end of."""
    request = make_request(name, [1, *name.encode()], 4, simulation.now_s, tenant=tenant)
    expected, ends_with = simulation._plain_decoding(request)
    found = [name_of(each) for each in simulation.scheduler.add(request)]
    for each in found:
        del simulation.live[each]
    simulation.records[name] = simulation.live[name] = Record(request, expected, ends_with)
    return found


def test_a_full_queue_refuses_the_tenant_that_holds_most_of_it() -> None:
    simulation = full_queue()
    with pytest.raises(CapacityError, match="max_waiting"):
        ask(simulation, "a4", "a")
    assert displaced_by(simulation, "b0", "b") == ["a3"]
    assert displaced_by(simulation, "b1", "b") == ["a2"]
    for tenant in ("a", "b"):  # each holds two: neither takes from the other
        with pytest.raises(CapacityError, match="max_waiting"):
            ask(simulation, "more", tenant)
    assert displaced_by(simulation, "c0", "c") == ["a1"]
    assert simulation.scheduler.num_displaced == 3
    simulation.drain()


def test_displaced_samples_take_their_siblings_along() -> None:
    simulation = Simulation(max_num_seqs=1, max_waiting=4)
    ask(simulation, "running", "a", 30)
    simulation.step()
    ask(simulation, "first", "a")
    for index in range(3):
        request = make_request(f"more{index}", [1, *b"first"], 8, seed=index, tenant="a")
        simulation.add(request, after="first")
    found = displaced_by(simulation, "b0", "b")
    assert found == ["first", "more0", "more1", "more2"]
    assert simulation.scheduler.num_waiting == 1
    simulation.drain()


def test_requests_that_were_resumed_or_preempted_are_not_displaced() -> None:
    simulation = Simulation(max_num_seqs=1, max_waiting=3)
    ask(simulation, "running", "a", 30)
    simulation.step()
    for index in range(3):
        ask(simulation, f"a{index}", "a", is_resumed=True)
    with pytest.raises(CapacityError):
        ask(simulation, "b0", "b")
    simulation.drain()


def test_one_tenant_is_refused_as_ever() -> None:
    simulation = Simulation(max_num_seqs=1, max_waiting=2)
    for name in ("a", "b"):
        simulation.add(make_request(name, PROMPT))
    with pytest.raises(CapacityError, match="2 requests are waiting already"):
        simulation.add(make_request("c", PROMPT))
    simulation.drain()
    assert simulation.scheduler.num_displaced == 0


# -- rows that others hold ------------------------------------------------------------------------


def test_a_tenant_without_a_row_gets_one_of_a_tenant_that_has_them_all() -> None:
    simulation = Simulation(max_num_seqs=2, num_blocks=200)
    for index in range(24):
        ask(simulation, f"a{index}", "a", 60)
    for _ in range(3):
        simulation.step(0.1)
    short = ask(simulation, "short", "b", 2)
    began_s = simulation.now_s
    while short.finish_reason is None:
        simulation.step(0.1)
    assert simulation.now_s - began_s < 3.0
    assert simulation.scheduler.num_fairness_preemptions == 1
    simulation.drain()
    assert all(each.finish_reason == each.ends_with for each in simulation.records.values())


def test_a_tenant_gets_memory_as_well_as_rows() -> None:
    simulation = Simulation(max_num_seqs=8, num_blocks=40, block_size=4)
    for index in range(8):
        ask(simulation, f"a{index}", "a", 100, proposer="")
    for _ in range(40):
        simulation.step(0.01)
    short = ask(simulation, "short", "b", 2)
    began_s = simulation.now_s
    while short.finish_reason is None:
        simulation.step(0.1)
    assert simulation.now_s - began_s < 5.0
    simulation.drain()


def test_two_tenants_with_one_row_take_turns_of_a_bounded_length() -> None:
    simulation = Simulation(max_num_seqs=1, num_blocks=200, prefix_caching=True)
    ask(simulation, "a", "a", 100)
    simulation.step(0.1)
    ask(simulation, "b", "b", 100)
    while simulation.scheduler.has_work:
        simulation.step(0.1)
    num_turns = simulation.scheduler.num_fairness_preemptions
    assert 1 <= num_turns <= simulation.now_s / 2.0


def test_no_row_is_taken_from_a_tenant_with_no_more_than_its_share() -> None:
    simulation = Simulation(max_num_seqs=2, num_blocks=200)
    for tenant in ("a", "b"):
        for index in range(3):
            ask(simulation, f"{tenant}{index}", tenant, 60)
    while simulation.scheduler.has_work:
        simulation.step(0.5)
    assert simulation.scheduler.num_fairness_preemptions == 0


def test_memory_is_taken_from_the_tenant_that_was_served_most() -> None:
    simulation = Simulation(max_num_seqs=3, num_blocks=24, block_size=4, prefix_caching=False)
    ask(simulation, "a0", "a", 80)
    for _ in range(6):
        simulation.step(0.01)
    ask(simulation, "b0", "b", 80)
    while simulation.scheduler.has_work and not simulation.scheduler.num_preemptions:
        simulation.step(0.01)
    (victim,) = [e for e in simulation.live.values() if e.request.num_preemptions]
    others = [e.request.tenant.service for e in simulation.live.values() if e is not victim]
    assert victim.request.tenant.service >= max(others)
    simulation.drain()


# -- what is remembered ---------------------------------------------------------------------------


def test_tenants_are_forgotten_in_the_order_they_left() -> None:
    tenants = Tenants(max_idle=2)
    known = [tenants.enter(name) for name in "abcd"]
    for tenant in known:
        tenants.leave(tenant)
    assert len(tenants) == 2
    assert tenants.enter("d") is known[3]
    assert tenants.enter("a") is not known[0]


def test_memory_follows_the_tenants_that_are_there() -> None:
    simulation = Simulation(max_num_seqs=2)
    for index in range(3000):
        ask(simulation, f"r{index}", f"t{index}", 1)
        if index % 50 == 49:
            simulation.drain()
    scheduler = simulation.scheduler
    assert not scheduler._tenants.active
    assert len(scheduler._tenants) <= 1024
    assert scheduler.num_queue_entries == 0
    assert scheduler._waiting.num_ranks <= 32


def test_cancelled_requests_leave_nothing_behind() -> None:
    simulation = Simulation(max_num_seqs=1)
    ask(simulation, "running", "x", 30)
    simulation.step()
    for index in range(500):
        name, tenant = f"r{index}", f"t{index % 7}"
        ask(simulation, name, tenant, priority=index % 3)
        simulation.cancel(name)
    queue = simulation.scheduler._waiting
    assert len(queue) == 0 and queue.num_ranks <= 32 and queue.peek() is None
    simulation.drain()


# -- one tenant: as ever --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_requests_of_one_tenant_come_by_their_keys_whatever_it_was_served(seed: int) -> None:
    rng, queue, tenant = random.Random(seed), WaitingQueue(64), Tenant("")
    waiting: list[Request] = []
    for number in range(300):
        event = rng.random()
        if event < 0.5 or not waiting:
            request = make_request(str(number), [1], priority=rng.randint(-3, 3))
            request.key = (request.spec.priority * 10.0 + rng.randint(0, 40), number)
            request.tenant = tenant
            queue.push(request)
            waiting.append(request)
        elif event < 0.6:
            gone = waiting.pop(rng.randrange(len(waiting)))
            gone.state = RequestState.FINISHED
            queue.forget(gone)
        elif event < 0.8:
            tenant.service += rng.randint(0, 100)
        else:
            first = queue.peek()
            assert first is min(waiting, key=lambda each: each.key)
            queue.pop(first)
            waiting.remove(first)
        assert len(queue) == len(waiting)
        assert (queue.peek() is None) == (not waiting)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_of_several_tenants_is_that_of_the_least_rank(seed: int) -> None:
    rng, queue = random.Random(seed), WaitingQueue(64)
    tenants = [Tenant(name) for name in "abcd"]
    waiting: list[Request] = []

    def rank(request: Request) -> tuple[Any, ...]:
        return request.tenant.service + 64 * request.spec.priority, request.key

    for number in range(400):
        event = rng.random()
        if event < 0.45 or not waiting:
            request = make_request(str(number), [1], priority=rng.randint(-3, 3))
            request.key = (request.spec.priority * 10.0 + rng.randint(0, 40), number)
            request.tenant = rng.choice(tenants)
            queue.push(request)
            waiting.append(request)
        elif event < 0.55:
            gone = waiting.pop(rng.randrange(len(waiting)))
            gone.state = RequestState.FINISHED
            queue.forget(gone)
        elif event < 0.8:
            rng.choice(tenants).service += rng.randint(0, 100)
        else:
            firsts = [
                min((e for e in waiting if e.tenant is tenant), key=lambda each: each.key)
                for tenant in {e.tenant for e in waiting}
            ]
            first = queue.peek()
            assert first is min(firsts, key=rank)
            queue.pop(first)
            waiting.remove(first)
        assert len(queue) == len(waiting) and queue.num_ranks <= 2 * 4 + 17


def test_a_tenant_is_let_in_beyond_siblings_that_cannot_be_displaced() -> None:
    """Samples of a request that runs are not refused one by one, however many there are."""
    simulation = Simulation(max_num_seqs=1, max_waiting=8)
    ask(simulation, "a", "greedy")
    simulation.step()
    for number in range(8):
        sibling = make_request(f"a{number}", PROMPT, 8, simulation.now_s, tenant="greedy")
        simulation.add(sibling, after="a")
    ask(simulation, "b", "modest")
    ask(simulation, "c", "modest")
    with pytest.raises(CapacityError, match="8 requests are waiting already"):
        ask(simulation, "d", "modest")
    with pytest.raises(CapacityError):
        ask(simulation, "a9", "greedy")


def test_a_priority_counts_once_for_a_tenant_that_waits_now_and_then() -> None:
    queue, tenants = WaitingQueue(priority_tokens=100), Tenants()
    urgent, modest = tenants.enter("urgent"), tenants.enter("modest")
    urgent.service = 5000
    first = make_request("u", PROMPT, priority=-10)
    first.tenant, first.key = urgent, (0.0, 1)
    queue.push(first)
    second = make_request("m", PROMPT)
    second.tenant, second.key = modest, (0.0, 2)
    queue.push(second)
    assert queue.standing(second) == queue.standing(first) == 4000
