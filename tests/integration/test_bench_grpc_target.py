"""The gRPC target against its fake and against the real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from fake_engine import FakeService, fake_service
from waits import wait_until

from outrider.loadtest.fake import Fault, Script
from outrider.loadtest.fake.grpc_server import FakeGrpcServer
from outrider.loadtest.records import CountedBy
from outrider.loadtest.requests import BenchRequest, Message
from outrider.loadtest.targets import Reply, Target, TargetFault, TargetSpec, make_target

LIMIT_S = 60.0
TEXT = BenchRequest(id="q/0", category="test", text="Once", max_tokens=24)
CHAT = BenchRequest(
    id="q/1", category="test", messages=(Message("user", "Grüße, 日本"),), max_tokens=24
)
IDS = BenchRequest(
    id="q/2", category="test", token_ids=(10, 11, 12), max_tokens=24, ignores_eos=True
)


async def with_target(url: str, use: Callable[[Target], Awaitable[Any]], **spec: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        target = make_target(TargetSpec(url, **({"channels": 2} | spec)))
        await target.open()
        try:
            return await use(target)
        finally:
            await target.close()


async def sent(target: Target, ask: BenchRequest = TEXT) -> Reply:
    reply = Reply()
    await target.send(ask, reply)
    return reply


def served_by(
    script: Script, use: Callable[[FakeGrpcServer, Target], Awaitable[Any]], **spec: Any
) -> Any:
    async def run() -> Any:
        async with FakeGrpcServer(script) as server:
            return await with_target(server.url, lambda target: use(server, target), **spec)

    return asyncio.run(run())


def failed(script: Script, **spec: Any) -> tuple[TargetFault, Reply]:
    async def use(server: FakeGrpcServer, target: Target) -> tuple[TargetFault, Reply]:
        reply = Reply()
        with pytest.raises(TargetFault) as caught:
            await target.send(TEXT, reply)
        return caught.value, reply

    result: tuple[TargetFault, Reply] = served_by(script, use, **spec)
    return result


# -- the fake ---------------------------------------------------------------------------------


def test_tokens_text_and_speculation_arrive_as_they_were_sent() -> None:
    script = Script(updates=4, tokens_per_update=3, word=" 日本é", ttft_s=0.03, gap_s=0.002)

    async def use(server: FakeGrpcServer, target: Target) -> None:
        reply = await sent(target)
        assert (reply.update_tokens, reply.output_tokens) == ([3] * 4, 12)
        assert reply.counted_by is CountedBy.IDS
        assert reply.token_ids == list(range(1000, 1012))
        assert "".join(reply.pieces) == " 日本é" * 12
        assert (reply.prompt_tokens, reply.cached_tokens, reply.finish) == (11, 3, "length")
        told = reply.speculated
        assert told is not None
        assert (told.rounds, told.drafted, told.accepted) == (4, 8, 8)
        assert told.rounds_by_accepted == [0, 0, 4]
        assert reply.update_s[0] >= (server.served[0].ttft_s or 1.0)

    served_by(script, use)


def test_a_stalled_server_answers_nothing_until_its_stall_is_over() -> None:
    script = Script(ttft_s=0.01, updates=2, gap_s=0.1, stall=(0.05, 0.3))

    async def use(server: FakeGrpcServer, target: Target) -> None:
        first = asyncio.create_task(sent(target))
        await asyncio.sleep(0.15)
        within = await sent(target)
        before = await first
        assert before.update_s[1] >= 0.41  # its two delays and the whole stall
        assert within.sent_s + within.update_s[0] >= before.sent_s + 0.36  # after its end

    served_by(script, use)


KINDS = {
    Fault.TOO_MANY: "resource exhausted",
    Fault.INTERNAL: "internal",
    Fault.UNAVAILABLE: "unavailable",
    Fault.HANG_UP: "unavailable",
    Fault.RESET: "unavailable",
    Fault.CUT_OFF: "cut off",
    Fault.MALFORMED: "malformed",
    Fault.STREAM_ERROR: "internal",
}


@pytest.mark.parametrize("fault", KINDS)
def test_every_fault_has_its_kind_and_keeps_what_came_before(fault: Fault) -> None:
    raised, reply = failed(Script(updates=6, gap_s=0.002, faults={fault: 1.0}))
    assert raised.kind == KINDS[fault]
    came_before = fault in (Fault.RESET, Fault.CUT_OFF, Fault.MALFORMED, Fault.STREAM_ERROR)
    assert reply.output_tokens == (3 if came_before else 0)


def test_a_refusal_is_tried_again_only_if_asked_and_a_broken_stream_never() -> None:
    refusing = Script(faults={Fault.TOO_MANY: 1.0})
    assert failed(refusing)[1].retries == 0
    assert failed(refusing, retries=1)[1].retries == 1
    assert failed(Script(faults={Fault.RESET: 1.0}), retries=1)[1].retries == 0


@pytest.mark.parametrize("script", [Script(ttft_s=30), Script(faults={Fault.SILENCE: 1.0})])
def test_a_request_that_is_given_up_ends_at_the_server(script: Script) -> None:
    async def use(server: FakeGrpcServer, target: Target) -> None:
        task = asyncio.create_task(sent(target))
        await asyncio.sleep(0.2)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            while not server.served[0].is_closed_early:
                await asyncio.sleep(0.005)

    served_by(script, use)


def test_nobody_at_an_address_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.loadtest.targets.grpc_target._OPEN_S", 0.3)

    async def run() -> str:
        async with FakeGrpcServer(Script()) as server:
            url = server.url
        with pytest.raises(TargetFault) as caught:
            await with_target(url, sent)
        return caught.value.kind

    assert asyncio.run(run()) == "unavailable"


# -- the real gateway -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("gw")) as running:
        yield running


def from_gateway(service: FakeService, use: Callable[[Target], Awaitable[Any]], **spec: Any) -> Any:
    return asyncio.run(with_target(f"grpc://{service.server.grpc_address}", use, **spec))


@pytest.mark.parametrize("ask", [TEXT, CHAT, IDS])
def test_a_real_server_s_answer_is_read_whole(service: FakeService, ask: BenchRequest) -> None:
    reply: Reply = from_gateway(service, lambda target: sent(target, ask))
    assert reply.output_tokens == len(reply.token_ids) == sum(reply.update_tokens) == 24
    assert reply.finish == "length"
    assert (reply.prompt_tokens or 0) > 0
    told = reply.speculated
    assert told is not None and told.drafted > told.accepted > 0
    by_accepted = told.rounds_by_accepted
    # A reader that lags behind, as on a busy machine, is sent several rounds at once.
    assert sum(by_accepted) == told.rounds >= len(reply.update_s) > 1
    assert sum(j * rounds for j, rounds in enumerate(by_accepted)) == told.accepted


def test_extras_are_parameters_of_the_request(service: FakeService) -> None:
    plain: Reply = from_gateway(service, sent, extras={"speculation": "off"})
    assert plain.speculated is not None
    assert (plain.speculated.drafted, plain.speculated.rounds_by_accepted) == (0, [24])
    assert sum(plain.update_tokens) == 24
    both: Reply = from_gateway(service, sent, extras={"n": 2, "temperature": 0.5})
    assert both.output_tokens == len(both.token_ids) == 48


def test_a_request_that_cannot_be_right_is_an_invalid_argument(service: FakeService) -> None:
    async def use(target: Target) -> str:
        with pytest.raises(TargetFault) as caught:
            await sent(target, BenchRequest("i", "c", token_ids=(10**6,)))
        return caught.value.kind

    assert from_gateway(service, use) == "invalid argument"


def test_cancelling_a_request_frees_the_engine(service: FakeService) -> None:
    async def use(target: Target) -> None:
        service.engine.is_paused = True
        task = asyncio.create_task(sent(target))
        async with asyncio.timeout(5):
            while not service.engine.running:
                await asyncio.sleep(0.005)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    try:
        from_gateway(service, use)
        wait_until(lambda: not service.engine.running)
    finally:
        service.engine.is_paused = False
