"""The blocking channel: between threads, and with real processes that hang or die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.links.address import bound_address, listen
from outrider.links.channel import Channel, wait_any
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import (
    HEARTBEAT_FRAME,
    FrameDecoder,
    LinkClosedError,
    LinkError,
    LinkTimeoutError,
    pack,
)
from outrider.links.handshake import receive_greeting
from outrider.links.rank_messages import Hello, LoadWeights, RankFailed, Ready, Role, StopRank

LOAD = LoadWeights(4096)
SECRET = "of this test"

# A rank that answers every message with the same one until it is told to stop.
ECHO = """
import os, sys
from outrider.links.address import dial
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.handshake import greet
from outrider.links.rank_messages import Hello, StopRank

sock = dial(sys.argv[1], 20)
greet(sock, sys.argv[2], Hello("target", 0, 1, os.getpid(), "here"), 20)
with Channel(sock, RANK_CODEC, heartbeat_s=0.05, silence_s=20) as channel:
    while not isinstance(message := channel.receive(), StopRank):
        channel.send(message)
"""


@contextmanager
def channels(
    heartbeat_s: float = 0.05, silence_s: float = 5.0
) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a link."""
    near, far = socket.socketpair()
    with (
        Channel(near, RANK_CODEC, heartbeat_s=heartbeat_s, silence_s=silence_s) as one,
        Channel(far, RANK_CODEC, heartbeat_s=heartbeat_s, silence_s=silence_s) as other,
    ):
        yield one, other


@contextmanager
def channel_to_socket(
    heartbeat_s: float = 0.05, silence_s: float = 20.0
) -> Iterator[tuple[Channel, socket.socket]]:
    """A channel whose peer is a bare socket, and so sends no heartbeats."""
    near, far = socket.socketpair()
    with Channel(near, RANK_CODEC, heartbeat_s=heartbeat_s, silence_s=silence_s) as channel, far:
        yield channel, far


@contextmanager
def echo_process(address: str) -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    with ExitStack() as stack:
        listener = stack.enter_context(listen(address))
        listener.settimeout(30)
        command = [sys.executable, "-c", ECHO, bound_address(listener), SECRET]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.kill)
        sock, _ = listener.accept()
        assert receive_greeting(sock, SECRET, timeout_s=20).pid == process.pid
        channel = Channel(sock, RANK_CODEC, heartbeat_s=0.05, silence_s=2.0, peer="target rank 0")
        yield process, stack.enter_context(channel)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# -- messages ---------------------------------------------------------------------------------


def test_messages_come_in_the_order_they_were_sent() -> None:
    with channels() as (near, far):
        for number in range(20):
            near.send(LoadWeights(number))
        assert [far.receive(60).max_position for _ in range(20)] == list(range(20))


def test_one_encoded_message_may_be_sent_to_many() -> None:
    payload = RANK_CODEC.encode(LOAD)
    with channels() as (one, end_of_one), channels() as (two, end_of_two):
        for channel in (one, two):
            channel.send_encoded(payload)
        assert end_of_one.receive(60) == end_of_two.receive(60) == LOAD


def test_a_message_larger_than_the_socket_buffer_gets_through() -> None:
    text = "x" * 5_000_000
    with channels() as (near, far):
        sender = in_thread(lambda: near.send(RankFailed(text)))
        assert far.receive(60) == RankFailed(text)
        sender.join()


def test_messages_of_many_threads_do_not_mix() -> None:
    texts = {str(number) * 30_000 for number in range(8)}
    with channels() as (near, far):
        senders = [in_thread(lambda text=text: near.send(RankFailed(text))) for text in texts]  # type: ignore[misc]
        assert {far.receive(60).message for _ in texts} == texts
        for sender in senders:
            sender.join()


def test_a_message_already_read_is_known_to_be_there() -> None:
    with channels() as (near, far):
        near.send(LoadWeights(1))
        near.send(LoadWeights(2))
        assert not far.has_buffered
        assert wait_any([far], 5) == [far]
        assert far.has_buffered
        assert far.receive() == LoadWeights(1)


def test_nothing_in_time_from_a_living_peer_is_a_timeout_and_no_more() -> None:
    with channels() as (near, far):
        with pytest.raises(TimeoutError):
            far.receive(0.05)
        near.send(LOAD)
        assert far.receive(60) == LOAD


def test_a_timeout_of_zero_takes_what_is_there() -> None:
    with channels() as (near, far):
        with pytest.raises(TimeoutError):
            far.receive(0)
        near.send(LOAD)
        assert far.receive(0) == LOAD


# -- life and death ---------------------------------------------------------------------------


def test_heartbeats_keep_an_idle_link_alive() -> None:
    with channels(heartbeat_s=0.05, silence_s=1.5) as (near, far):
        sender = threading.Timer(1.8, near.send, [LOAD])
        sender.start()
        assert far.receive() == LOAD
        sender.join()


def test_heartbeats_are_sent_only_when_nothing_else_is() -> None:
    with channel_to_socket(heartbeat_s=0.3) as (channel, far):
        for _ in range(60):
            channel.send(LOAD)
            time.sleep(0.02)
        data = far.recv(2**16)
    assert len(FrameDecoder().feed(data)) == 60
    assert data.count(HEARTBEAT_FRAME) <= 1


def test_a_silent_peer_is_given_up() -> None:
    with channel_to_socket(silence_s=0.2) as (channel, _):
        started_s = time.monotonic()
        with pytest.raises(LinkTimeoutError, match="the peer has been silent for 0.2 s"):
            channel.receive()
        assert 0.15 < time.monotonic() - started_s < 30


def test_silence_is_found_out_within_a_longer_timeout() -> None:
    with (
        channel_to_socket(silence_s=0.2) as (channel, _),
        pytest.raises(LinkTimeoutError),
    ):
        channel.receive(timeout_s=20)


def test_an_owner_that_was_busy_for_long_does_not_blame_the_peer() -> None:
    with channels(heartbeat_s=0.05, silence_s=1.0) as (near, far):
        time.sleep(1.2)
        with pytest.raises(TimeoutError):
            far.receive(0.01)


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    with channel_to_socket(silence_s=0.2) as (channel, _):
        with pytest.raises(LinkTimeoutError, match="has taken nothing for 0.2 s"):
            channel.send(RankFailed("x" * 5_000_000))
        with pytest.raises(LinkTimeoutError, match="has taken nothing"):
            channel.send(LOAD)  # half a frame is out, so nothing may follow it


def test_last_words_are_heard_before_the_end() -> None:
    with channels() as (near, far):
        near.send(RankFailed("out of memory"))
        near.close()
        assert far.receive(60) == RankFailed("out of memory")
        for _ in range(2):
            with pytest.raises(LinkClosedError, match="the peer has closed the link"):
                far.receive(60)


def test_last_words_are_heard_even_after_a_send_has_failed() -> None:
    with channels() as (near, far):
        near.send(RankFailed("out of memory"))
        near.close()
        with pytest.raises(LinkClosedError):
            far.send(LOAD)
        assert far.receive(60) == RankFailed("out of memory")


def test_a_stream_that_is_not_ours_ends_the_link() -> None:
    with channel_to_socket() as (channel, far):
        far.sendall(b"HTTP/1.1 400 Bad Request")
        for _ in range(2):
            with pytest.raises(LinkError, match="does not speak the link protocol"):
                channel.receive(60)


def test_a_message_nobody_knows_does_not_end_the_link() -> None:
    with channel_to_socket() as (channel, far):
        far.sendall(pack(b"\x91\xa4Sing") + pack(RANK_CODEC.encode(LOAD)))
        with pytest.raises(LinkError, match="unknown message 'Sing'"):
            channel.receive(60)
        assert channel.receive(60) == LOAD


def test_closing_wakes_a_receiver_in_another_thread() -> None:
    found: list[Exception] = []

    def receive() -> None:
        try:
            far.receive()
        except LinkClosedError as error:
            found.append(error)

    with channels() as (_, far):
        receiver = in_thread(receive)
        time.sleep(0.05)
        far.close()
        receiver.join(60)
        assert "closed on this side" in str(found[0])


def test_closing_wakes_a_sender_in_another_thread() -> None:
    found: list[Exception] = []

    def send() -> None:
        try:
            channel.send(RankFailed("x" * 5_000_000))
        except LinkClosedError as error:
            found.append(error)

    with channel_to_socket() as (channel, _):
        sender = in_thread(send)
        time.sleep(0.05)
        channel.close()
        sender.join(60)
        assert "closed on this side" in str(found[0])


def test_a_closed_channel_may_be_closed_again_and_does_nothing_else() -> None:
    with channels() as (near, _):
        near.close()
        near.close()
        assert near.is_closed and near.fileno() == -1
        with pytest.raises(LinkClosedError, match="closed on this side"):
            near.receive()
        with pytest.raises(LinkClosedError, match="closed on this side"):
            near.send(LOAD)


def test_heartbeats_stop_with_the_channel() -> None:
    before = set(threading.enumerate())
    with channels():
        beating = set(threading.enumerate()) - before
        assert len(beating) == 2
    for thread in beating:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("heartbeat_s", "silence_s"), [(0, 1), (2, 2), (-1, 5)])
def test_times_that_cannot_work_are_refused(heartbeat_s: float, silence_s: float) -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(ConfigError, match="heartbeat_s must be positive and less"):
        Channel(near, RANK_CODEC, heartbeat_s=heartbeat_s, silence_s=silence_s)


# -- several channels -------------------------------------------------------------------------


def test_those_with_something_to_receive_are_found() -> None:
    with channels() as (a, end_of_a), channels() as (_, end_of_b), channels() as (c, end_of_c):
        a.send(LoadWeights(1))
        c.send(LoadWeights(3))
        assert wait_any([end_of_a, end_of_b, end_of_c], 5) == [end_of_a, end_of_c]


def test_waiting_for_several_ends_with_the_time() -> None:
    with channels() as (_, one), channels() as (_, two):
        assert wait_any([one, two], 0.12) == []
        assert wait_any([], 0.01) == []


def test_a_dead_channel_is_found_beside_a_busy_one() -> None:
    with channels() as (busy, end_of_busy), channels() as (dead, end_of_dead):
        busy.send(LoadWeights(1))
        busy.send(LoadWeights(2))
        assert wait_any([end_of_busy, end_of_dead], 5) == [end_of_busy]
        dead.close()
        assert wait_any([end_of_busy, end_of_dead], 5) == [end_of_busy, end_of_dead]
        with pytest.raises(LinkClosedError):
            end_of_dead.receive(0)


def test_a_silent_channel_is_found_beside_a_living_one() -> None:
    with channels() as (_, living), channel_to_socket(silence_s=0.2) as (silent, _):
        assert wait_any([living, silent], 5) == [silent]
        with pytest.raises(LinkTimeoutError):
            silent.receive(0)


def test_a_channel_closed_on_this_side_is_not_waited_for() -> None:
    with channels() as (_, one), channels() as (_, two):
        two.close()
        assert wait_any([one, two], 60) == [two]


# -- real processes ---------------------------------------------------------------------------


def test_a_process_on_a_unix_socket_answers_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with echo_process("unix:link.sock") as (process, channel):
        for message in (LOAD, Ready(), Hello(Role.DRAFT, 0, 1, 1, "there")):
            channel.send(message)
            assert channel.receive(60) == message
        channel.send(StopRank())
        with pytest.raises(LinkClosedError):
            channel.receive(60)
        assert process.wait(60) == 0


def test_a_process_that_is_stopped_is_given_up_for_its_silence() -> None:
    with echo_process("tcp:127.0.0.1:0") as (process, channel):
        channel.send(LOAD)
        assert channel.receive(60) == LOAD
        os.kill(process.pid, signal.SIGSTOP)
        channel.send(LOAD)  # the kernel takes it; only silence tells
        with pytest.raises(LinkTimeoutError, match="target rank 0 has been silent for 2 s"):
            channel.receive(60)


def test_the_death_of_a_process_is_noticed_at_once() -> None:
    with echo_process("tcp:127.0.0.1:0") as (process, channel):
        killer = threading.Timer(0.1, process.send_signal, [signal.SIGKILL])
        killer.start()
        with pytest.raises(LinkClosedError, match="target rank 0 has closed the link"):
            channel.receive(60)
        killer.join()
        assert process.wait(60) == -signal.SIGKILL
