"""What strangers may do with a connection: raw bytes against a real HTTP server."""

from __future__ import annotations

import dataclasses
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from fake_engine import FakeEngine, fake_service, running_server
from waits import wait_until

from outrider.gateway import connection_slots
from outrider.gateway.grpc import connections as grpc_connections
from outrider.gateway.http import connections
from outrider.gateway.http.connections import ConnectionBounds
from outrider.proto import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.thorough

TIMEOUT_S = 0.4
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
KEY = b"Authorization: Bearer the-key"
KNOWN_GET = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n\r\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Of a server without an engine, with little patience and room for four connections."""
    make = ConnectionBounds.of

    def bounds(config: Any) -> ConnectionBounds:
        return dataclasses.replace(make(config), write_timeout_s=TIMEOUT_S)

    engine = FakeEngine(f"unix:{tmp_path_factory.mktemp('bounds')}/engine.sock")
    options: Any = {"header_timeout_s": TIMEOUT_S, "max_body_bytes": 1024, "api_key": "the-key"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConnectionBounds, "of", bounds)
        patch.setattr(connection_slots, "max_connections", lambda config: 4)
        patch.setattr(connections, "LINGER_S", 0.1)
        patch.setattr(connections, "MIN_BODY_BYTES_PER_S", 2**20)
        with running_server(engine, **options) as front:
            host, _, port = front.http_address.rpartition(":")
            yield host, int(port)


@contextmanager
def _connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=60) as connection:
        yield connection


def _answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and body of what comes until the server hangs up."""
    received = b""
    while part := connection.recv(65536):
        received += part
    if not received:
        return 0, None
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def _ask(address: tuple[str, int], *lines: bytes) -> tuple[int, Any]:
    with _connected(address) as connection:
        connection.sendall(b"\r\n".join([*lines, b"Host: x", b"Connection: close", b"", b""]))
        return _answer(connection)


def _exchange(connection: socket.socket, request: bytes = GET) -> None:
    """A request and its answer, after which the connection stays."""
    connection.sendall(request)
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK")


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def _is_well(address: tuple[str, int]) -> bool:
    return _ask(address, b"GET /livez HTTP/1.1")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTT", GET[:-2], b"\r\n\r\n"])
def test_headers_that_do_not_come_are_not_waited_for(address: tuple[str, int], sent: bytes) -> None:
    with _connected(address) as connection:
        connection.sendall(sent)
        status, body = _answer(connection)
    assert status == 408 and "header_timeout_s" in body["error"]["message"]
    assert body["error"]["type"] == "timeout_error"


def test_headers_that_trickle_are_late_all_the_same(address: tuple[str, int]) -> None:
    start_s = time.monotonic()
    with _connected(address) as connection:
        try:
            for byte in GET[:-2] * 10:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
            pytest.fail("the server has waited for all of it")
        except ConnectionError:
            pass
    assert time.monotonic() - start_s < 60


def test_a_second_request_on_a_connection_is_timed_as_well(address: tuple[str, int]) -> None:
    with _connected(address) as connection:
        _exchange(connection)
        time.sleep(TIMEOUT_S * 2)  # an idle connection may stay
        _exchange(connection)
        connection.sendall(b"\r\n")
        time.sleep(TIMEOUT_S / 2)
        connection.sendall(b"\r\n")
        assert _answer(connection)[0] == 408


def test_a_body_that_does_not_come_is_not_waited_for(address: tuple[str, int]) -> None:
    lines = [b"POST /livez HTTP/1.1", b"Host: x", b"Content-Length: 100", b"", b"some"]
    with _connected(address) as connection:
        connection.sendall(b"\r\n".join(lines))
        told = b""
        while data := connection.recv(65536):  # the connection does not stay for it
            told += data
        assert b" 405 " in told  # and the route answers without it
    assert _is_well(address)


def test_a_body_without_end_is_cut_off(address: tuple[str, int]) -> None:
    head = b"POST /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    sent = 0
    with _connected(address) as connection:
        connection.sendall(head)
        try:
            for _ in range(10_000):
                connection.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            pass
    assert sent < 500 * 2**20
    assert _is_well(address)


def test_headers_without_end_are_refused(address: tuple[str, int]) -> None:
    with _connected(address) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nX: " + b"x" * 600_000)
        status, body = _answer(connection)
    assert status == 431 and "65536" in body["error"]["message"]


def _many(count: int, size: int) -> bytes:
    return b"".join(b"X-%d: %s\r\n" % (number, b"x" * size) for number in range(count))


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + _many(30, 4000) + b"\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 120_000 + b"\r\n\r\n",
        b"GET /livez?" + b"x" * 120_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + _many(200, 1) + b"\r\n",
    ],
    ids=["several", "one", "url", "many"],
)
def test_too_much_of_headers_in_one_write_is_refused(
    address: tuple[str, int], request_bytes: bytes
) -> None:
    with _connected(address) as connection:
        connection.sendall(request_bytes)
        status, body = _answer(connection)
    assert status == 431 and "65536" in body["error"]["message"]
    assert _is_well(address)


def test_headers_within_the_bounds_are_taken(address: tuple[str, int]) -> None:
    assert _ask(address, b"GET /livez HTTP/1.1", _many(100, 600)[:-2])[0] == 200


def test_what_follows_a_body_is_no_header_of_the_request(address: tuple[str, int]) -> None:
    lines = [b"POST /no/such HTTP/1.1", b"Host: x", b"Connection: close"]
    chunked = [b"Transfer-Encoding: chunked", b"", b"0", KEY, b"", b""]
    with _connected(address) as connection:
        connection.sendall(b"\r\n".join([*lines, *chunked]))
        assert _answer(connection)[0] == 401


def test_what_is_not_http_is_told_so_in_the_shape_of_errors(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with _connected(address) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, body = _answer(connection)
    assert status == 400 and body["error"]["type"] == "invalid_request_error"
    assert not caplog.records


def test_strangers_make_room_for_newcomers_and_not_those_with_a_key(
    address: tuple[str, int],
) -> None:
    with ExitStack() as stack:
        known = stack.enter_context(_connected(address))
        _exchange(known, KNOWN_GET)
        idle = [stack.enter_context(_connected(address)) for _ in range(40)]
        assert _is_cut(idle[0])
        for _ in range(3):
            assert _ask(address, b"GET /v1/models HTTP/1.1", KEY)[0] != 503
        _exchange(known, KNOWN_GET)


@pytest.fixture
def patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[str, int]]]:
    """Makes servers with a key, room for four connections and the settings given."""
    monkeypatch.setattr(connection_slots, "max_connections", lambda config: 4)
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[str, int]:
            engine = FakeEngine(f"unix:{tmp_path}/engine.sock").start()
            stack.callback(engine.stop)
            front = stack.enter_context(running_server(engine, api_key="the-key", **options))
            wait_until(lambda: front.gateway.facts is not None)
            host, _, port = front.http_address.rpartition(":")
            return host, int(port)

        yield make


def _begin(connection: socket.socket, num_bytes: int) -> None:
    """A request with a valid key, until the server waits for its body."""
    lines = [b"POST /tokenize HTTP/1.1", b"Host: x", KEY, b"Content-Type: application/json"]
    lines += [b"Connection: close", b"Expect: 100-continue", b"Content-Length: %d" % num_bytes]
    connection.sendall(b"\r\n".join([*lines, b"", b""]))
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_where_all_connections_are_busy_a_newcomer_is_refused_in_shape(
    patient: Callable[..., tuple[str, int]],
) -> None:
    address = patient()
    with ExitStack() as stack:
        for _ in range(4):
            _begin(stack.enter_context(_connected(address)), 9)
        status, body = _ask(address, b"GET /livez HTTP/1.1")
        assert status == 503 and body["error"]["type"] == "service_unavailable_error"
    wait_until(lambda: _is_well(address))


def test_a_body_that_comes_slowly_but_steadily_is_taken(
    patient: Callable[..., tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MIN_BODY_BYTES_PER_S", 1)
    body = b'{"prompt": "one two three"}'
    with _connected(patient(header_timeout_s=2.0)) as connection:
        _begin(connection, len(body))
        for byte in body:  # for a multiple of the time that nothing may come
            connection.sendall(bytes([byte]))
            time.sleep(0.2)
        assert _answer(connection)[0] == 200


def test_a_body_that_stops_short_of_its_end_is_not_waited_for(
    patient: Callable[..., tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MIN_BODY_BYTES_PER_S", 1000)
    with _connected(patient(header_timeout_s=0.5)) as connection:
        _begin(connection, 4_000_000)
        connection.sendall(b" " * 3_999_999)
        status, body = _answer(connection)
    assert status == 408 and "slower than 1000 bytes/s" in body["error"]["message"]


def test_a_connection_without_a_valid_key_idles_for_seconds_only(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connections, "UNKNOWN_IDLE_S", TIMEOUT_S)
    with _connected(address) as known, _connected(address) as unknown:
        _exchange(known, KNOWN_GET)
        _exchange(unknown)
        assert _is_cut(unknown)
        _exchange(known, KNOWN_GET)


def test_one_address_has_its_share_of_connections(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine, max_connections_per_address=2) as front, ExitStack() as stack:
        host, _, port = front.http_address.rpartition(":")
        others = [
            stack.enter_context(
                socket.create_connection((host, int(port)), 60, source_address=("127.0.0.9", 0))
            )
            for _ in range(3)
        ]
        own = [stack.enter_context(_connected((host, int(port)))) for _ in range(2)]
        assert _is_cut(others[0])
        for each in (*own, *others[1:]):
            _exchange(each)


def test_a_trusted_proxy_may_have_all_of_them(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    options: Any = {"max_connections_per_address": 2, "trusted_proxies": ("127.0.0.0/8",)}
    with running_server(engine, **options) as front, ExitStack() as stack:
        host, _, port = front.http_address.rpartition(":")
        own = [stack.enter_context(_connected((host, int(port)))) for _ in range(4)]
        for each in own:
            _exchange(each)


def test_a_tls_handshake_that_does_not_come_makes_room_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_slots, "max_connections", lambda config: 4)
    authority = Authority(tmp_path)
    made = authority.issue()
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    options: Any = {"tls_cert": str(made.cert), "tls_key": str(made.key)}
    with running_server(engine, **options) as front, ExitStack() as stack:
        host, _, port = front.http_address.rpartition(":")
        silent = [stack.enter_context(_connected((host, int(port)))) for _ in range(40)]
        assert _is_cut(silent[0])
        context = ssl.create_default_context(cafile=str(authority.cert))
        with (
            _connected((host, int(port))) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            _exchange(connection)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"Authorization: Bearer wrong"],
        [b"Authorization: Bearer"],
        [b"Authorization: Basic dGhlLWtleQ=="],
        [b"Authorization: Bearer the-key", b"Authorization: Bearer the-key"],
        [b"Authorization: Bearer \xff\xfe\x80"],
        [b"Authorization: Bearer " + b"k" * 30_000],
        [b"Authorization: Bearer the-key the-key"],
    ],
)
def test_a_wrong_key_is_refused_whatever_the_path(
    address: tuple[str, int], lines: list[bytes]
) -> None:
    for path in (b"/v1/models", b"/metrics", b"/openapi.json", b"/no/such/path"):
        status, body = _ask(address, b"GET " + path + b" HTTP/1.1", *lines)
        assert status == 401 and body["error"]["type"] == "authentication_error"


def test_the_right_key_opens_all_routes(address: tuple[str, int]) -> None:
    for shown in (b"Bearer the-key", b"bearer  the-key "):
        line = b"Authorization: " + shown
        assert _ask(address, b"GET /openapi.json HTTP/1.1", line)[0] == 200
        assert _ask(address, b"GET /no/such/path HTTP/1.1", line)[0] == 404


def test_one_connection_may_have_so_many_calls_and_no_more(tmp_path: Path) -> None:
    bound = {"max_streams_per_connection": 3}
    with fake_service(tmp_path, server=bound, is_paused=True) as service:
        streams = [service.client.stream([5, 6], max_tokens=1) for _ in range(6)]
        wait_until(lambda: len(service.engine.running) == 3)
        time.sleep(0.2)
        assert len(service.engine.running) == 3
        service.engine.is_paused = False
        assert all(each.result().usage.completion_tokens == 1 for each in streams)


def test_a_key_too_long_for_grpc_harms_nobody(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with (
        running_server(engine, api_key="the-key") as front,
        grpc.insecure_channel(front.grpc_address) as channel,
    ):
        ask = channel.unary_unary("/outrider.v1.Control/GetStatus")
        for key, times in (("k" * 100_000, 1), ("k" * 4000, 1), ("the-key", 2), ("", 1)):
            metadata = [("authorization", f"Bearer {key}")] * times
            with pytest.raises(grpc.RpcError) as caught:
                ask(b"", metadata=metadata, timeout=60)
            assert caught.value.code() in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        assert ask(b"", metadata=[("authorization", "Bearer the-key")], timeout=60)


H2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


def _fill(address: str, stack: ExitStack, count: int) -> list[socket.socket]:
    """Connections to gRPC, every other of which says that it speaks HTTP/2, and nothing more."""
    host, _, port = address.rpartition(":")
    made = []
    for number in range(count):
        made.append(stack.enter_context(_connected((host, int(port)))))
        made[-1].sendall(H2 if number % 2 else b"")
    return made


def _drained(connection: socket.socket) -> bool:
    """Whether it was cut, after whatever was sent before."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_strangers_at_grpc_make_room_for_newcomers_and_not_those_with_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_slots, "max_connections", lambda config: 4)
    own = [("grpc.use_local_subchannel_pool", 1)]
    metadata = [("authorization", "Bearer the-key")]
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine, api_key="the-key") as front, ExitStack() as stack:
        states: list[Any] = []
        known = stack.enter_context(grpc.insecure_channel(front.grpc_address, own))
        known.subscribe(states.append)
        assert known.unary_unary("/outrider.v1.Control/GetStatus")(
            b"", metadata=metadata, timeout=60
        )
        silent = _fill(front.grpc_address, stack, 12)
        assert _drained(silent[0]) and _drained(silent[1])
        late = stack.enter_context(grpc.insecure_channel(front.grpc_address, own))
        for channel in (late, known):
            ask = channel.unary_unary("/outrider.v1.Control/GetStatus")
            assert ask(b"", metadata=metadata, timeout=60, wait_for_ready=True)
        assert states[-1] is grpc.ChannelConnectivity.READY
        assert states.count(grpc.ChannelConnectivity.READY) == 1  # it was never cut


def test_a_grpc_connection_without_a_valid_key_idles_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connections, "UNKNOWN_IDLE_S", TIMEOUT_S)
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine, api_key="the-key") as front, ExitStack() as stack:
        states: list[Any] = []
        known = stack.enter_context(grpc.insecure_channel(front.grpc_address))
        known.subscribe(states.append)
        ask = known.unary_unary("/outrider.v1.Control/GetStatus")
        assert ask(b"", metadata=[("authorization", "Bearer the-key")], timeout=60)
        (unknown,) = _fill(front.grpc_address, stack, 2)[1:]
        assert _drained(unknown)
        assert states[-1] is grpc.ChannelConnectivity.READY


def test_one_address_has_its_share_of_grpc_connections(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine, max_connections_per_address=2) as front, ExitStack() as stack:
        made = _fill(front.grpc_address, stack, 4)
        assert _drained(made[0]) and _drained(made[1])


def test_a_connection_that_is_old_is_made_anew_and_its_stream_finishes(tmp_path: Path) -> None:
    states: list[Any] = []
    server = {"max_connection_age_s": 0.3, "max_connection_grace_s": 20.0}
    with (
        fake_service(tmp_path, step_s=0.02, server=server) as service,
        grpc.insecure_channel(service.server.grpc_address) as channel,
    ):
        channel.subscribe(states.append)
        request = generation_pb2.GenerateRequest()
        request.token_ids.ids.extend((5, 6, 7))
        request.sampling.max_tokens = 100
        request.sampling.ignore_eos = True
        stub = generation_pb2_grpc.GenerationStub(channel)
        answers = list(stub.Generate(request, timeout=20))
        assert sum(len(answer.token_ids) for answer in answers) == 100
        wait_until(lambda: grpc.ChannelConnectivity.IDLE in states[1:])
        assert len(list(stub.Generate(request, timeout=20))) > 1
