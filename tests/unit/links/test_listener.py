"""The engine's door: strangers at it, and ranks that come in all the same."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from waits import wait_until

from outrider.links import pending_connections
from outrider.links.address import TcpAddress, parse
from outrider.links.handshake import dial_in
from outrider.links.listener import Listener
from outrider.links.rank_messages import Hello, Role

SECRET = "of this test"
SIZES = {"target": 1}


@contextmanager
def open_door(address: str) -> Iterator[Listener]:
    door = Listener([address], SECRET, SIZES)
    try:
        yield door
    finally:
        door.close()


def join(door: Listener) -> None:
    """A rank of the only group dials in and is taken."""
    hello = Hello(Role.TARGET, 0, 1, os.getpid(), "here")
    with dial_in(door.addresses[0], SECRET, hello, 10):
        [arrival] = door.take_group("target", 10)
        arrival.channel.close()
        assert arrival.hello == hello


def stranger(door: Listener, stack: ExitStack) -> socket.socket:
    parsed = parse(door.addresses[0])
    assert isinstance(parsed, TcpAddress)
    return stack.enter_context(socket.create_connection((parsed.host, parsed.port), 10))


def is_hung_up_on(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_group_may_become_another_size(tmp_path: Path) -> None:
    with open_door(f"unix:{tmp_path}/door") as door, ExitStack() as stack:
        door.expect("target", 2)
        for size, rank in ((1, 0), (2, 0), (2, 1)):
            hello = Hello(Role.TARGET, rank, size, os.getpid(), "here")
            sock = stack.enter_context(dial_in(door.addresses[0], SECRET, hello, 10))
            if size == 1:
                wait_until(partial(is_hung_up_on, sock))
        group = door.take_group("target", 10)
        assert [arrival.hello.rank for arrival in group] == [0, 1]
        for arrival in group:
            arrival.channel.close()


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Nothing more can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_door_that_ran_out_of_descriptors_opens_again(caplog: pytest.LogCaptureFixture) -> None:
    with open_door("tcp:127.0.0.1:0") as door:
        parsed = parse(door.addresses[0])
        assert isinstance(parsed, TcpAddress)
        with socket.socket() as early, no_more_descriptors():
            early.connect((parsed.host, parsed.port))
            wait_until(lambda: "Too many open files" in caplog.text)
        join(door)


def test_the_oldest_stranger_makes_room_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_connections, "MAX_PENDING", 4)
    with open_door("tcp:127.0.0.1:0") as door, ExitStack() as stack:
        strangers = [stranger(door, stack) for _ in range(10)]
        wait_until(lambda: all(is_hung_up_on(each) for each in strangers[:6]))
        assert not any(is_hung_up_on(each) for each in strangers[6:])
        join(door)
        assert not any(is_hung_up_on(each) for each in strangers[7:])


def test_ranks_get_in_while_strangers_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_connections, "MAX_PENDING", 4)
    over = threading.Event()

    def flood() -> None:
        with ExitStack() as stack:
            while not over.is_set():
                stranger(door, stack)

    with open_door("tcp:127.0.0.1:0") as door:
        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            for _ in range(5):
                join(door)
        finally:
            over.set()
            flooding.join(60)


def test_a_group_that_nobody_took_is_replaced_by_the_next(tmp_path: Path) -> None:
    with open_door(f"unix:{tmp_path}/engine.sock") as door, ExitStack() as stack:
        for pid in (1, 2):
            hello = Hello(Role.TARGET, 0, 1, pid, "here")
            sock = stack.enter_context(dial_in(door.addresses[0], SECRET, hello, 10))
            wait_until(lambda: "target" in door._untaken)
            if pid == 1:
                first = sock
        wait_until(lambda: is_hung_up_on(first))
        [arrival] = door.take_group("target", 10)
        assert arrival.hello.pid == 2


def test_a_closed_door_hangs_up_on_everybody_outside(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with open_door("tcp:127.0.0.1:0") as door:
            waiting = stranger(door, stack)
            wait_until(lambda: len(door._pending))
        wait_until(lambda: is_hung_up_on(waiting))


def test_strangers_leave_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with open_door("tcp:127.0.0.1:0") as door, ExitStack() as stack:
        for _ in range(20):
            sock = stranger(door, stack)
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a stranger's\r\n\r\n")
            wait_until(partial(is_hung_up_on, sock))
        hello = Hello(Role.TARGET, 0, 2, os.getpid(), "here")
        with dial_in(door.addresses[0], SECRET, hello, 10) as sock:
            wait_until(partial(is_hung_up_on, sock))
        join(door)
    told = [record.getMessage() for record in caplog.records]
    # Doors of tests before this one may still log.
    assert sum("does not speak the link protocol" in each for each in told) == 1
    assert any("does not belong to this engine" in each for each in told)  # knows the secret
