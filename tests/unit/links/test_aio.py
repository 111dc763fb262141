"""The asyncio channel, against the blocking one on the other end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from outrider.links import aio
from outrider.links.address import bound_address, listen
from outrider.links.aio import AsyncChannel, open_channel
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkClosedError, LinkError, LinkTimeoutError
from outrider.links.handshake import receive_greeting
from outrider.links.rank_messages import Hello, LoadWeights, RankFailed, Role

HELLO = Hello(Role.GATEWAY, 0, 1, 4711, "here")
SECRET = "of this test"
LOAD = LoadWeights(4096)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())


async def accept(listener: socket.socket, secret: str = SECRET) -> socket.socket:
    """The other end, greeted; made in a thread, as the engine does."""

    def work() -> socket.socket:
        sock, _ = listener.accept()
        try:
            assert receive_greeting(sock, secret, timeout_s=60) == HELLO
        except LinkError:
            sock.close()
            raise
        return sock

    return await asyncio.to_thread(work)


@asynccontextmanager
async def linked(
    heartbeat_s: float = 0.05, silence_s: float = 5.0
) -> AsyncIterator[tuple[AsyncChannel, socket.socket]]:
    """An asyncio channel and the bare socket at its other end."""
    with listen("tcp:127.0.0.1:0") as listener:
        listener.settimeout(60)
        address = bound_address(listener)
        opening = open_channel(
            address, SECRET, HELLO, RANK_CODEC, 5, heartbeat_s=heartbeat_s, silence_s=silence_s
        )
        channel, sock = await asyncio.gather(opening, accept(listener))
    with sock:
        try:
            yield channel, sock
        finally:
            channel.close()


def test_messages_go_both_ways() -> None:
    async def scenario() -> None:
        async with linked() as (channel, sock):
            with Channel(sock, RANK_CODEC) as engine:
                channel.send(LOAD)
                assert await asyncio.to_thread(engine.receive, 5) == LOAD
                for number in range(5):
                    engine.send(LoadWeights(number))
                got = [(await channel.receive()).max_position for _ in range(5)]
                assert got == list(range(5))

    run(scenario)


def test_the_loop_may_be_uvloops() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20), linked() as (channel, sock):
            with Channel(sock, RANK_CODEC) as engine:
                channel.send(LOAD)
                assert await asyncio.to_thread(engine.receive, 5) == LOAD

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_large_message_gets_through_in_both_directions() -> None:
    text = "x" * 3_000_000

    async def scenario() -> None:
        async with linked() as (channel, sock):
            with Channel(sock, RANK_CODEC) as engine:
                channel.send(RankFailed(text))
                assert await asyncio.to_thread(engine.receive, 5) == RankFailed(text)
                await asyncio.gather(
                    asyncio.to_thread(engine.send, RankFailed(text)),
                    _expect(channel, RankFailed(text)),
                )

    run(scenario)


async def _expect(channel: AsyncChannel, message: object) -> None:
    assert await channel.receive() == message


def test_heartbeats_keep_an_idle_link_alive_in_both_directions() -> None:
    async def scenario() -> None:
        async with linked(heartbeat_s=0.05, silence_s=1.5) as (channel, sock):
            with Channel(sock, RANK_CODEC, heartbeat_s=0.05, silence_s=1.5) as engine:
                waiting = asyncio.create_task(asyncio.to_thread(engine.receive))
                threading.Timer(2.0, engine.send, [LOAD]).start()
                assert await channel.receive() == LOAD
                channel.send(LoadWeights(1))
                assert await waiting == LoadWeights(1)

    run(scenario)


def test_a_silent_engine_is_given_up() -> None:
    async def scenario() -> None:
        async with linked(heartbeat_s=0.05, silence_s=0.2) as (channel, _):
            with pytest.raises(LinkTimeoutError, match="the engine at tcp:.* silent for 0.2 s"):
                await channel.receive()
            with pytest.raises(LinkTimeoutError):
                channel.send(LOAD)

    run(scenario)


def test_a_loop_that_was_held_up_does_not_blame_the_engine() -> None:
    async def scenario() -> None:
        async with linked(heartbeat_s=0.05, silence_s=1.0) as (channel, sock):
            with Channel(sock, RANK_CODEC, heartbeat_s=0.05) as engine:
                time.sleep(1.2)
                await asyncio.sleep(0.15)
                engine.send(LOAD)
                assert await channel.receive() == LOAD

    run(scenario)


def test_last_words_are_heard_before_the_end() -> None:
    async def scenario() -> None:
        async with linked() as (channel, sock):
            with Channel(sock, RANK_CODEC) as engine:
                engine.send(RankFailed("out of memory"))
            while not channel.is_closed:
                await asyncio.sleep(0.01)
            assert await channel.receive() == RankFailed("out of memory")
            for _ in range(2):
                with pytest.raises(LinkClosedError, match="has closed the link"):
                    await channel.receive()

    run(scenario)


def test_a_stream_that_is_not_ours_ends_the_link() -> None:
    async def scenario() -> None:
        async with linked() as (channel, sock):
            sock.sendall(b"HTTP/1.1 400 Bad Request")
            with pytest.raises(LinkError, match="does not speak the link protocol"):
                await channel.receive()

    run(scenario)


def test_closing_wakes_the_receiver_and_may_be_repeated() -> None:
    async def scenario() -> None:
        async with linked() as (channel, _):
            receiver = asyncio.create_task(channel.receive())
            await asyncio.sleep(0)
            channel.close()
            channel.close()
            with pytest.raises(LinkClosedError, match="closed on this side"):
                await receiver
            with pytest.raises(LinkClosedError, match="closed on this side"):
                channel.send(LOAD)

    run(scenario)


def test_what_was_sent_before_closing_still_arrives() -> None:
    async def scenario() -> None:
        async with linked() as (channel, sock):
            channel.send(RankFailed("x" * 2_000_000))
            channel.close()
            with Channel(sock, RANK_CODEC) as engine:
                found = await asyncio.to_thread(engine.receive, 5)
                assert len(found.message) == 2_000_000

    run(scenario)


def test_a_cancelled_receive_loses_nothing() -> None:
    async def scenario() -> None:
        async with linked() as (channel, sock):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.receive(), 0.02)
            with Channel(sock, RANK_CODEC) as engine:
                engine.send(LOAD)
                assert await channel.receive() == LOAD

    run(scenario)


def test_a_wrong_secret_is_a_sentence() -> None:
    async def scenario() -> None:
        with listen("tcp:127.0.0.1:0") as listener:
            listener.settimeout(60)
            opening = open_channel(bound_address(listener), "guess", HELLO, RANK_CODEC, 5)
            ours, theirs = await asyncio.gather(opening, accept(listener), return_exceptions=True)
            assert "refused this process" in str(ours)
            assert "was refused" in str(theirs)

    run(scenario)


def test_a_listener_that_never_answers_is_given_up() -> None:
    async def scenario() -> None:
        with (
            listen("tcp:127.0.0.1:0") as listener,
            pytest.raises(LinkTimeoutError, match="the handshake within 0.2 s"),
        ):
            await open_channel(bound_address(listener), SECRET, HELLO, RANK_CODEC, 0.2)

    run(scenario)


def test_an_engine_that_is_not_there_is_waited_for_and_then_given_up() -> None:
    async def scenario() -> None:
        with pytest.raises(LinkTimeoutError, match="no answer at unix:/nowhere/to.sock"):
            await open_channel("unix:/nowhere/to.sock", SECRET, HELLO, RANK_CODEC, 0.2)

    run(scenario)


def test_an_engine_that_starts_later_is_found() -> None:
    async def scenario() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = bound_address(probe)
        opening = asyncio.create_task(open_channel(address, SECRET, HELLO, RANK_CODEC, 60))
        await asyncio.sleep(0.12)
        with listen(address) as listener:
            listener.settimeout(60)
            with await accept(listener):
                (await opening).close()

    run(scenario)


def test_what_is_not_received_waits_with_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a peer that cannot be heard for that reason is not taken for a silent one."""
    monkeypatch.setattr(aio, "MAX_UNRECEIVED_BYTES", 100_000)
    count, silence_s = 2000, 1.0

    async def scenario() -> None:
        async with linked(silence_s=silence_s) as (channel, far):
            peer = Channel(far, RANK_CODEC, heartbeat_s=0.05, silence_s=10)
            text = "x" * 10_000

            def send_all() -> None:
                for _ in range(count):
                    peer.send(RankFailed(text))

            sending = asyncio.create_task(asyncio.to_thread(send_all))
            await asyncio.sleep(1.5 * silence_s)
            assert not sending.done()
            assert sum(map(len, channel._payloads)) < 1_000_000
            for _ in range(count):
                assert await channel.receive() == RankFailed(text)
            await sending
            peer.close()

    run(scenario)
