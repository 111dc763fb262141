"""Random lives with several tenants: texts stay right, none starves, and one tenant is as ever."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_crowd import Crowd, random_simulation
from scheduler_tools import Simulation, make_request, name_of

from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.waiting import WaitingQueue

RANDOM_LIVES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class ByKey(WaitingQueue):
    """The order without tenants: the smallest key first."""

    def __init__(self, priority_tokens: int = 0) -> None:
        super().__init__(priority_tokens)
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests.append(request)

    def forget(self, request: Request) -> None:
        self._requests.remove(request)

    def peek(self) -> Request | None:
        return min(self._requests, key=lambda request: request.key, default=None)

    def pop(self, first: Request) -> None:
        self._requests.remove(first)


def plans_of_a_life(seed: int, num_events: int, lag: int) -> Iterator[object]:
    rng = random.Random(seed)
    crowd = Crowd(random_simulation(rng, lag), rng)
    for _ in range(num_events):
        crowd.act()
        yield crowd.simulation.step()
    while crowd.simulation.scheduler.has_work:
        yield crowd.simulation.step()


@pytest.mark.parametrize("lag", [0, 1])
@RANDOM_LIVES
@given(seed=st.integers(0, 2**32), num_events=st.integers(1, 40))
def test_one_tenant_is_planned_exactly_as_without_tenants(
    lag: int, seed: int, num_events: int
) -> None:
    found = list(plans_of_a_life(seed, num_events, lag))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.scheduler.scheduler.WaitingQueue", ByKey)
        assert found == list(plans_of_a_life(seed, num_events, lag))


@pytest.mark.parametrize("lag", [0, 1])
@RANDOM_LIVES
@given(rng=st.randoms(use_true_random=False), num_events=st.integers(1, 40))
def test_every_request_of_every_tenant_gets_its_plain_text(
    lag: int, rng: random.Random, num_events: int
) -> None:
    crowd = Crowd(random_simulation(rng, lag), rng, tenants=("a", "b", "c"))
    for _ in range(num_events):
        crowd.act()
        crowd.simulation.step(rng.choice([0.01, 1.0]))
    crowd.simulation.drain()


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_backlogged_tenants_are_served_alike(seed: int, num_rows: int) -> None:
    """However many requests, and however long ones, each of them has."""
    rng = random.Random(seed)
    longest, budget = 60, num_rows + 24
    simulation = Simulation(num_blocks=400, draft_blocks=0, max_num_seqs=num_rows, budget=budget)
    numbers = dict.fromkeys("abc", 0)

    def keep_waiting() -> None:
        for tenant, most in (("a", 20), ("b", 3), ("c", 6)):
            known = simulation.scheduler._tenants.active.get(tenant)
            while known is None or known.num_waiting < most:
                numbers[tenant] += 1
                prompt = [rng.randint(0, 49) for _ in range(rng.randint(1, 20))]
                num_tokens = {"a": 40, "b": 10, "c": rng.randint(1, 40)}[tenant]
                name = f"{tenant}{numbers[tenant]}"
                request = make_request(name, prompt, num_tokens, simulation.now_s, tenant=tenant)
                simulation.add(request)
                known = simulation.scheduler._tenants.active[tenant]

    keep_waiting()
    before = {name: each.service for name, each in simulation.scheduler._tenants.active.items()}
    for _ in range(400):
        keep_waiting()
        plan = simulation.step(0.1)
        assert plan is not None
        num_tokens = sum(row.pass_tokens for row in plan.rows)
        assert len(plan.rows) == num_rows or num_tokens >= budget - num_rows, "rows are idle"
        services = [
            each.service - before[name]
            for name, each in simulation.scheduler._tenants.active.items()
        ]
        # A tenant is ahead by what its rows may still write, and one request of its own.
        assert max(services) - min(services) <= (num_rows + 1) * longest
    assert min(services) > 150
    for name in list(simulation.live):
        simulation.cancel(name)
    simulation.step()


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_of_few_requests_waits_for_little_whatever_another_asks_for(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(num_blocks=60, max_num_seqs=2, budget=32)
    for number in range(24):
        simulation.add(make_request(f"a{number}", [number, 1, 2], 60, tenant="a", priority=0))
    for number in range(5):
        for _ in range(rng.randint(1, 8)):
            simulation.step(0.1)
        request = make_request(f"b{number}", [number, 3], 2, simulation.now_s, tenant="b")
        record = simulation.add(request)
        began_s = simulation.now_s
        while record.finish_reason is None:
            simulation.step(0.1)
        assert simulation.now_s - began_s < 3.5
    assert all(each.request.state is not RequestState.FINISHED for each in simulation.live.values())
    simulation.drain()
    assert {name_of(each.request.sample_id) for each in simulation.records.values()}
