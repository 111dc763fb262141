"""Ports: refused while another server has them, shared by one server's processes only."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from outrider.config import ServerConfig
from outrider.errors import ConfigError
from outrider.gateway.ports import (
    ReservedPorts,
    listener,
    place_of,
    reserve,
    shown,
)

HOST = "127.0.0.1"


def test_a_taken_port_is_refused_with_the_option_that_sets_it() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--port", "--grpc-port"):
            message = rf"{port}: Address already in use; choose another {option}\.$"
            with pytest.raises(ConfigError, match=message):
                reserve(HOST, port, option)


def test_a_port_that_another_server_shares_among_its_processes_is_taken() -> None:
    with closing(listener(HOST, 0, "--port", is_shared=True)) as theirs:
        theirs.listen()
        with pytest.raises(ConfigError, match="already in use"):
            reserve(HOST, place_of(theirs)[1], "--port")


def test_a_port_reserved_by_a_server_that_still_starts_is_taken() -> None:
    with closing(reserve(HOST, 0, "--port")) as theirs:
        port = place_of(theirs)[1]
        with pytest.raises(ConfigError, match="already in use"):
            reserve(HOST, port, "--port")
        with pytest.raises(ConfigError, match="already in use"):
            listener(HOST, port, "--port")


def test_processes_share_a_reserved_port_and_the_reservation_takes_no_connection() -> None:
    with ExitStack() as stack:
        port = place_of(stack.enter_context(reserve(HOST, 0, "--port")))[1]
        for _ in range(2):
            stack.enter_context(listener(HOST, port, "--port", is_shared=True)).listen()
        for _ in range(20):
            socket.create_connection((HOST, port), 5).close()


def test_a_port_can_be_reserved_again_while_old_connections_are_remembered() -> None:
    with closing(listener(HOST, 0, "--port")) as first:
        port = place_of(first)[1]
        first.setblocking(True)
        first.listen()
        client = socket.create_connection((HOST, port), 5)
        server, _ = first.accept()
        server.close()  # the side that closes first remembers
        client.close()
    reserve(HOST, port, "--port").close()


def test_the_ports_of_a_server_are_settled_and_given_back() -> None:
    with ReservedPorts(ServerConfig(port=0, grpc_port=0, admin_port=0)) as ports:
        config = ports.config
        assert ports.admin is not None
        numbers = {config.port, config.grpc_port, place_of(ports.admin)[1]}
        assert len(numbers) == 3 and 0 not in numbers
    for number in numbers:
        reserve(HOST, number, "--port").close()


def test_a_host_that_is_none_of_ours_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77:0: .*--host"):
        reserve("192.0.2.77", 0, "--port")


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_is_listened_on_and_shown_in_brackets(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with ReservedPorts(ServerConfig(host=host, port=0, grpc_port=0)) as ports:
        assert ports.config.host == "::1"
        assert shown(ports.config.host, 5) == "[::1]:5"
