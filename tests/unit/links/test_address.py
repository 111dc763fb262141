"""Addresses: how they are written, listened on and dialled."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.links.address import bound_address, check_retry, dial, listen, parse
from outrider.links.channel import SILENCE_S
from outrider.links.frames import LinkError, LinkTimeoutError


@pytest.fixture
def unix_address(tmp_path: Path) -> Iterator[str]:
    # Relative, because the folder of a test may be too long for a socket's name.
    before = os.getcwd()
    os.chdir(tmp_path)
    yield "unix:link.sock"
    os.chdir(before)


@pytest.mark.parametrize("address", ["unix:/run/o.sock", "tcp:node-1:7000", "tcp:[::1]:0"])
def test_an_address_is_written_as_it_is_read(address: str) -> None:
    assert str(parse(address)) == address


@pytest.mark.parametrize(
    "address",
    ["", "unix:", "tcp:", "tcp:host", "tcp::80", "tcp:host:", "tcp:host:x", "tcp:host:70000"]
    + ["tcp:host:-1", "tcp:::1:80", "http:host:80", "/run/o.sock", "tcp:host:²"],
)
def test_a_bad_address_is_refused_with_its_text(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(address)
    assert repr(address) in str(caught.value)


def test_a_socket_path_longer_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="107 bytes; choose a shorter folder"):
        parse("unix:/" + "x" * 107)


def assert_connects(listener: socket.socket, address: str) -> None:
    with dial(address, 5) as near, listener.accept()[0] as far:
        near.sendall(b"hello")
        assert far.recv(5) == b"hello"
        assert near.gettimeout() is None


def test_port_0_becomes_a_port_that_can_be_dialled() -> None:
    with listen("tcp:127.0.0.1:0") as listener:
        address = bound_address(listener)
        assert not address.endswith(":0")
        assert_connects(listener, address)


def test_tcp_connections_do_not_wait_for_more_to_send() -> None:
    with (
        listen("tcp:127.0.0.1:0") as listener,
        dial(bound_address(listener), 5) as near,
    ):
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_tcp_connections_end_when_nothing_arrives_on_the_other_side_any_more() -> None:
    with listen("tcp:127.0.0.1:0") as listener, dial(bound_address(listener), 5) as near:
        limit_ms = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert SILENCE_S < limit_ms / 1000 < 60


def test_a_unix_socket_is_open_to_its_owner_only(unix_address: str) -> None:
    with listen(unix_address) as listener:
        assert bound_address(listener) == unix_address
        assert stat.S_IMODE(os.stat("link.sock").st_mode) == 0o600
        assert_connects(listener, unix_address)


def test_a_socket_left_by_a_dead_process_is_replaced(unix_address: str) -> None:
    listen(unix_address).close()
    assert os.path.exists("link.sock")
    with listen(unix_address) as listener:
        assert_connects(listener, unix_address)


def test_a_socket_somebody_listens_on_is_not_taken_away(unix_address: str) -> None:
    with listen(unix_address) as listener:
        with pytest.raises(ConfigError, match="a running process already listens"):
            listen(unix_address)
        listener.accept()[0].close()  # the question itself was a connection
        assert_connects(listener, unix_address)


def test_a_file_is_not_taken_for_a_stale_socket(unix_address: str) -> None:
    Path("link.sock").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        listen(unix_address)
    assert Path("link.sock").read_text() == "precious"


def test_a_missing_folder_is_a_sentence(unix_address: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on unix:nowhere/link.sock: No such file"):
        listen("unix:nowhere/link.sock")


def test_a_port_in_use_is_a_sentence() -> None:
    with listen("tcp:127.0.0.1:0") as listener:
        address = bound_address(listener)
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already"):
            listen(address)


def test_dialling_waits_for_a_listener_that_starts_later(unix_address: str) -> None:
    started: list[socket.socket] = []
    timer = threading.Timer(0.15, lambda: started.append(listen(unix_address)))
    timer.start()
    dial(unix_address, 60).close()
    timer.join()
    started[0].close()


def test_dialling_gives_up_when_the_time_is_over(unix_address: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(LinkTimeoutError, match=r"no answer at unix:link.sock after 0.2 s"):
        dial(unix_address, 0.2)
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN])
def test_a_host_that_cannot_be_reached_may_be_on_its_way_back(number: int) -> None:
    unreachable = OSError(number, os.strerror(number))
    check_retry("tcp:10.0.0.9:7000", unreachable, left_s=1.0, timeout_s=5.0)
    with pytest.raises(LinkTimeoutError, match=os.strerror(number)):
        check_retry("tcp:10.0.0.9:7000", unreachable, left_s=0.0, timeout_s=5.0)


def test_what_waiting_cannot_cure_is_told_at_once(unix_address: str) -> None:
    Path("file").write_text("")
    started_s = time.monotonic()
    with pytest.raises(LinkError, match="cannot dial unix:file/link.sock: Not a directory"):
        dial("unix:file/link.sock", 60)
    assert time.monotonic() - started_s < 30
