"""What a gateway that does not read, or never stops asking, can make an engine keep."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from waits import wait_until

from outrider.engine import service as service_module
from outrider.engine.service import EngineService
from outrider.links.channel import Channel
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import Cancel, EngineFacts, StatusQuery, SubmitRefused, Updates
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.outcomes import SchedulerStats
from outrider.scheduler.types import SampleId

FACTS = EngineFacts({}, 10, (0,), 100, depth=2, has_draft=True, kernels="c", num_blocks=8)


class Scheduler:
    """The part of one that gateways reach, without work."""

    has_work = False
    num_running = num_waiting = 0
    stats = SchedulerStats()

    def __init__(self) -> None:
        self.control = SpeculationControl()
        self.cancelled: list[SampleId] = []

    def cancel(self, sample_id: SampleId) -> None:
        self.cancelled.append(sample_id)


class Served:
    """One service, one gateway, and the gateway's end of their link."""

    def __init__(self, silence_s: float) -> None:
        self.scheduler = Scheduler()
        loop = SimpleNamespace(scheduler=self.scheduler, step=lambda now_s: [])
        engine: Any = SimpleNamespace(
            loop=loop,
            facts=FACTS,
            status=lambda query, speculation: SubmitRefused(query, "x" * 50_000, False),
            check=lambda: None,
        )
        listener: Any = SimpleNamespace(on_gateway=None)
        self.engine, self._listener = engine, listener
        self.service = EngineService(engine, listener)
        self.near, self.far = (
            Channel(sock, GATEWAY_CODEC, heartbeat_s=0.05, silence_s=silence_s)
            for sock in socket.socketpair()
        )
        self._listener.on_gateway(self.near)
        self.thread = threading.Thread(target=self.service.run)


@contextmanager
def served(silence_s: float = 20.0) -> Iterator[Served]:
    both = Served(silence_s)
    try:
        yield both
    finally:
        both.service.stop()
        both.far.close()
        both.near.close()
        if both.thread.ident is not None:
            both.thread.join(60)


def ask_until_hung_up_on(both: Served) -> None:
    both.thread.start()
    deadline_s = time.monotonic() + 60
    with pytest.raises(LinkError):
        while time.monotonic() < deadline_s:
            both.far.send(StatusQuery(1))
            time.sleep(0.001)


def test_a_gateway_that_reads_nothing_but_sends_heartbeats_is_hung_up_on() -> None:
    with served(silence_s=0.3) as both:
        ask_until_hung_up_on(both)
        wait_until(lambda: not both.service._gateways)


def test_a_gateway_is_hung_up_on_when_too_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "_MAX_UNSENT", 20)
    with served() as both:
        ask_until_hung_up_on(both)
        wait_until(lambda: not both.service._gateways)


def test_a_gateway_without_requests_hears_of_the_load_when_it_changes_and_not_else() -> None:
    with served() as both:
        both.thread.start()
        assert both.far.receive(60) == FACTS
        both.scheduler.num_running, both.scheduler.num_waiting = 3, 2
        assert both.far.receive(60) == Updates((), 5)
        both.scheduler.num_running = both.scheduler.num_waiting = 0
        assert both.far.receive(60) == Updates((), 0)
        both.far.send(StatusQuery(1))
        assert isinstance(both.far.receive(60), SubmitRefused)  # as the status here is


def test_the_arrival_rate_falls_while_the_engine_rests() -> None:
    with served() as both:
        now_s = time.monotonic()
        for age_s in (100.0, 99.0):
            both.scheduler.control.load.observe_arrival(now_s - age_s)
        both.engine.status = lambda query, speculation: SubmitRefused(
            query, str(speculation.arrivals_per_s), False
        )
        both.thread.start()
        assert both.far.receive(60) == FACTS
        both.far.send(StatusQuery(1))
        answer = both.far.receive(60)
        assert isinstance(answer, SubmitRefused) and 0 < float(answer.message) <= 0.02


def test_the_load_is_told_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LOAD_REPORT_S", 3600.0)
    with served() as both:
        both.service._load_reported_s = time.monotonic()
        both.scheduler.num_running = 3
        both.thread.start()
        assert both.far.receive(60) == FACTS
        both.far.send(Cancel(1))
        wait_until(lambda: bool(both.scheduler.cancelled))
        both.far.send(StatusQuery(1))
        assert isinstance(both.far.receive(60), SubmitRefused)


def test_what_a_gateway_asks_for_waits_with_the_gateway_while_a_step_is_long() -> None:
    count = 3 * service_module._MAX_UNHANDLED
    with served() as both:

        def ask() -> None:
            for number in range(count):
                both.far.send(Cancel(number))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: both.service._commands.qsize() >= service_module._MAX_UNHANDLED)
        time.sleep(0.3)
        assert both.service._commands.qsize() == service_module._MAX_UNHANDLED
        both.thread.start()
        wait_until(lambda: len(both.scheduler.cancelled) == count)
        asking.join(60)
        assert both.scheduler.cancelled == [SampleId(1, i) for i in range(count)]


def test_an_engine_steps_although_it_is_asked_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "_MAX_COMMANDS", 4)
    with served() as both:
        num_asked = 0

        def ask_again() -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked < 100:
                both.service._commands.put(ask_again)

        both.service._commands.put(ask_again)
        assert both.service._take_commands()
        assert num_asked == 4
