"""The OpenAI target against its fake: what was done is what was measured, and every fault has its
kind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.loadtest.fake import Fault, Jitter, Script
from outrider.loadtest.fake.http_server import FakeOpenAiServer
from outrider.loadtest.records import CountedBy
from outrider.loadtest.requests import BenchRequest, Message
from outrider.loadtest.targets import Reply, Target, TargetFault, TargetSpec, make_target

LIMIT_S = 60.0
TEXT = BenchRequest(id="q/0", category="test", text="Once", max_tokens=6)
CHAT = BenchRequest(
    id="q/1", category="test", messages=(Message("user", "Grüße, 日本"),), max_tokens=6
)


def served_by(
    script: Script, use: Callable[[FakeOpenAiServer, Target], Awaitable[Any]], **spec: Any
) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(LIMIT_S), FakeOpenAiServer(script) as server:
            target = make_target(TargetSpec(server.url, **spec))
            await target.open()
            try:
                return await use(server, target)
            finally:
                await target.close()

    return asyncio.run(run())


def asked(script: Script, ask: BenchRequest = TEXT, **spec: Any) -> Reply:
    async def use(server: FakeOpenAiServer, target: Target) -> Reply:
        reply = Reply()
        await target.send(ask, reply)
        return reply

    reply: Reply = served_by(script, use, **spec)
    return reply


def failed(script: Script, **spec: Any) -> tuple[TargetFault, Reply]:
    async def use(server: FakeOpenAiServer, target: Target) -> tuple[TargetFault, Reply]:
        reply = Reply()
        with pytest.raises(TargetFault) as caught:
            await target.send(TEXT, reply)
        return caught.value, reply

    result: tuple[TargetFault, Reply] = served_by(script, use, **spec)
    return result


# -- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [TEXT, CHAT])
def test_ids_usage_and_text_arrive_as_they_were_sent(ask: BenchRequest) -> None:
    script = Script(updates=4, tokens_per_update=3, has_ids=True, word=" 日本é", gap_s=0.003)
    reply = asked(script, ask)
    assert (reply.update_tokens, reply.output_tokens) == ([3] * 4, 12)
    assert reply.counted_by is CountedBy.IDS
    assert reply.token_ids == list(range(1000, 1012))
    assert "".join(reply.pieces) == " 日本é" * 12
    assert (reply.prompt_tokens, reply.cached_tokens, reply.finish) == (11, 3, "length")


def test_continuous_usage_is_asked_for_by_an_extra() -> None:
    script = Script(updates=4, tokens_per_update=3)
    plain = asked(script, CHAT)
    continuous = asked(script, CHAT, extras={"continuous_usage_stats": True})
    assert (plain.update_tokens, plain.output_tokens) == ([], 12)
    assert (continuous.update_tokens, continuous.output_tokens) == ([3] * 4, 12)
    assert len(plain.update_s) == len(continuous.update_s) == 4


def test_a_tokeniser_counts_for_a_server_that_does_not() -> None:
    script = Script(updates=3, tokens_per_update=2, has_usage=False, word=" word")
    reply = asked(script, tokenizer="smollm2-135m-draft")
    assert (reply.output_tokens, reply.counted_by) == (6, CountedBy.TOKENISER)
    assert asked(script).counted_by is CountedBy.UNKNOWN


def test_the_length_may_be_the_request_s_own() -> None:
    assert asked(Script(updates=None, tokens_per_update=4)).output_tokens == 8


def test_the_client_s_times_are_those_of_the_server() -> None:
    script = Script(
        ttft_s=0.05, gap_s=0.01, updates=10, jitter=Jitter.LOGNORMAL, spread=0.3, has_ids=True
    )

    async def use(server: FakeOpenAiServer, target: Target) -> None:
        replies = [Reply() for _ in range(8)]
        await asyncio.gather(*(target.send(TEXT, reply) for reply in replies))
        measured = sorted(reply.update_s[0] for reply in replies)
        done = sorted(served.ttft_s or 0 for served in server.served)
        assert len({round(each, 6) for each in done}) > 1
        # Sent before it is received, read after it is written: never less than the truth.
        assert all(m >= d for m, d in zip(measured, done, strict=True))
        ends = sorted(reply.update_s[-1] for reply in replies)
        assert measured[0] < ends[0] and ends[-1] >= max(s.e2e_s or 0 for s in server.served)

    served_by(script, use)


def test_a_stalled_server_answers_nothing_until_its_stall_is_over() -> None:
    script = Script(ttft_s=0.01, updates=2, gap_s=0.1, stall=(0.05, 0.3))

    async def use(server: FakeOpenAiServer, target: Target) -> None:
        before, within = Reply(), Reply()
        first = asyncio.create_task(target.send(TEXT, before))
        await asyncio.sleep(0.15)
        await target.send(CHAT, within)
        await first
        assert before.update_s[1] >= 0.41  # its two delays and the whole stall
        assert within.sent_s + within.update_s[0] >= before.sent_s + 0.36  # after its end

    served_by(script, use)


def test_connections_are_used_again() -> None:
    async def use(server: FakeOpenAiServer, target: Target) -> None:
        for _ in range(20):
            await target.send(TEXT, Reply())
        assert len(server.connections) == 1

    served_by(Script(updates=2, gap_s=0.001), use)


def test_more_than_a_hundred_requests_run_at_once() -> None:
    async def use(server: FakeOpenAiServer, target: Target) -> None:
        tasks = [asyncio.create_task(target.send(TEXT, Reply())) for _ in range(150)]
        while len(server.served) < 150:
            await asyncio.sleep(0.01)
        assert len(server.connections) == 150
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    served_by(Script(ttft_s=30), use)


# -- faults -----------------------------------------------------------------------------------

KINDS = {
    Fault.TOO_MANY: "http 429",
    Fault.INTERNAL: "http 500",
    Fault.UNAVAILABLE: "http 503",
    Fault.HANG_UP: "reset",
    Fault.RESET: "reset",
    Fault.CUT_OFF: "cut off",
    Fault.MALFORMED: "malformed",
    Fault.STREAM_ERROR: "stream error",
}


@pytest.mark.parametrize("fault", KINDS)
def test_every_fault_has_its_kind_and_keeps_what_came_before(fault: Fault) -> None:
    script = Script(updates=6, gap_s=0.005, has_ids=True, faults={fault: 1.0})
    raised, reply = failed(script)
    assert raised.kind == KINDS[fault]
    came_before = fault in (Fault.RESET, Fault.CUT_OFF, Fault.MALFORMED, Fault.STREAM_ERROR)
    assert reply.output_tokens == (3 if came_before else 0)


def test_faults_come_in_their_shares_and_the_others_are_answered() -> None:
    shares = {fault: 0.08 for fault in KINDS}
    script = Script(updates=4, gap_s=0.001, faults=shares, seed=7)

    async def use(server: FakeOpenAiServer, target: Target) -> None:
        async def one() -> str:
            try:
                await target.send(TEXT, Reply())
            except TargetFault as fault:
                return fault.kind
            return "ok"

        kinds = await asyncio.gather(*(one() for _ in range(200)))
        done = [KINDS[served.fault] if served.fault else "ok" for served in server.served]
        assert sorted(kinds) == sorted(done)
        assert set(kinds) == {*KINDS.values(), "ok"}

    served_by(script, use)


def test_silence_lasts_until_the_request_is_given_up_and_the_server_hears_of_it() -> None:
    script = Script(updates=6, gap_s=0.002, has_ids=True, faults={Fault.SILENCE: 1.0})

    async def use(server: FakeOpenAiServer, target: Target) -> None:
        reply = Reply()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await target.send(TEXT, reply)
                pytest.fail("it must not end")
        assert reply.output_tokens == 3
        await _until(lambda: not server.connections)
        assert server.served[0].is_closed_early

    served_by(script, use)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def use(server: FakeOpenAiServer, target: Target) -> None:
        task = asyncio.create_task(target.send(TEXT, Reply()))
        await _until(lambda: bool(server.served))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await _until(lambda: not server.connections)
        assert server.served[0].is_closed_early

    served_by(Script(ttft_s=30), use)


def test_a_dripping_answer_arrives_whole() -> None:
    script = Script(updates=3, word=" 日本", faults={Fault.DRIP: 1.0}, has_usage=False)
    assert "".join(asked(script).pieces) == " 日本" * 3


def test_refusals_are_tried_again_only_if_asked() -> None:
    script = Script(faults={Fault.TOO_MANY: 1.0}, retry_after_s=0.01)
    assert failed(script)[1].retries == 0
    assert failed(script, retries=3)[1].retries == 3


def test_nobody_at_an_address_is_refused() -> None:
    async def run() -> str:
        async with FakeOpenAiServer(Script()) as server:
            url = server.url
        with pytest.raises(TargetFault) as caught:
            await make_target(TargetSpec(url)).open()
        return caught.value.kind

    assert asyncio.run(run()) == "refused"


def test_a_server_that_is_no_https_server_is_a_matter_of_tls() -> None:
    async def run() -> str:
        async with FakeOpenAiServer(Script()) as server:
            with pytest.raises(TargetFault) as caught:
                await make_target(TargetSpec(server.url.replace("http", "https"))).open()
        return caught.value.kind

    assert asyncio.run(run()) == "tls"


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


# -- requests ---------------------------------------------------------------------------------


def test_extras_headers_and_key_reach_the_server_as_they_are() -> None:
    """Against a server that only listens: what the bytes of a request are."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = b'{"data": [{"id": "served-model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
        heard.append(head + await reader.readuntil(b"}}"))
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = TargetSpec(
            f"http://127.0.0.1:{port}/v1/",
            extras={"min_tokens": 4, "stream_options": {"x": 1}, "last": {"a": {}}},
            headers={"X-Tenant": "me"},
            api_key="secret",
        )
        target = make_target(spec)
        await target.open()
        with pytest.raises(TargetFault) as caught:
            await target.send(
                BenchRequest("i", "c", token_ids=(1, 2), max_tokens=5, ignores_eos=True, seed=9),
                Reply(),
            )
        assert "secret" not in str(caught.value)
        await target.close()
        server.close()

    asyncio.run(run())
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions ")
    assert b"X-Tenant: me" in head and b"Authorization: Bearer secret" in head
    for part in (
        b'"model": "served-model"',
        b'"prompt": [1, 2]',
        b'"stream_options": {"include_usage": true, "x": 1}',
        b'"max_tokens": 5',
        b'"ignore_eos": true',
        b'"seed": 9',
        b'"min_tokens": 4',
    ):
        assert part in body


def test_the_fakes_run_by_themselves_and_leave_their_books(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider.loadtest.fake", "--http", "0", "--ttft", "5ms"]
    books = tmp_path / "books"
    with subprocess.Popen(
        [*command, "--books", str(books)], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        try:
            word, url = process.stdout.readline().split()
            assert word == "listening"
            asyncio.run(_ask_once(url))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert '"prompt": "Once"' in books.with_suffix(".http.jsonl").read_text()


async def _ask_once(url: str) -> None:
    target = make_target(TargetSpec(url))
    await target.open()
    reply = Reply()
    start_s = time.monotonic()
    await target.send(TEXT, reply)
    assert reply.sent_s >= start_s and reply.update_s[0] >= 0.004
    await target.close()
