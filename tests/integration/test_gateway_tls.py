"""TLS before both protocols, from outside: real handshakes on real ports."""

from __future__ import annotations

import http.client
import logging
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, Pair
from fake_engine import FakeEngine, running_server
from waits import wait_until

from outrider.client import Client, UnavailableError
from outrider.errors import OutriderError
from outrider.gateway.frontend import Frontend


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "a stranger")


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    """Never started: a front shows its certificates without one."""
    return FakeEngine(f"unix:{tmp_path}/engine.sock")


@pytest.fixture
def served(engine: FakeEngine, authority: Authority) -> Iterator[Frontend]:
    pair = authority.issue()
    with running_server(engine, tls_cert=str(pair.cert), tls_key=str(pair.key)) as front:
        yield front


def _get(address: str, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection(address, timeout=60, context=context)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status
    finally:
        connection.close()


def _trusting(ca: Path, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def _state(front: Frontend, **access: Any) -> str:
    with Client(front.grpc_address, **access) as client:
        return client.status(timeout_s=60).state


def test_both_protocols_answer_those_who_trust_the_authority(
    served: Frontend, authority: Authority
) -> None:
    assert _get(served.http_address, _trusting(authority.cert)) == 200
    assert _state(served, tls=authority.cert) == "starting"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_nobody_gets_less_than_tls_1_2(served: Frontend, authority: Authority) -> None:
    context = _trusting(authority.cert)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(OSError):
        _get(served.http_address, context)


def test_strangers_and_plaintext_fail_alone_and_without_a_word_in_the_log(
    served: Frontend, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        with pytest.raises(ssl.SSLError):
            _get(served.http_address, _trusting(stranger.cert))
        with pytest.raises(UnavailableError, match="certificate"):
            _state(served, tls=stranger.cert)
        for address in (served.http_address, served.grpc_address):
            assert _raw(address, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").find(b"200") == -1
            _raw(address, os.urandom(4096))
        with pytest.raises(UnavailableError, match="TLS"):
            _state(served)
    assert not caplog.records
    assert _get(served.http_address, _trusting(authority.cert)) == 200
    assert _state(served, tls=authority.cert) == "starting"


def _raw(address: str, data: bytes) -> bytes:
    """What comes back until the server hangs up."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while part := connection.recv(4096):
                received += part
        except ConnectionError:
            return b""
        return received


def test_an_expired_certificate_is_refused_by_clients(
    engine: FakeEngine, authority: Authority
) -> None:
    old = authority.issue(expired=True)
    with running_server(engine, tls_cert=str(old.cert), tls_key=str(old.key)) as front:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            _get(front.http_address, _trusting(authority.cert))
        with pytest.raises(UnavailableError, match="certificate"):
            _state(front, tls=authority.cert)


def test_clients_need_a_valid_certificate_where_the_server_asks_for_one(
    engine: FakeEngine, authority: Authority, stranger: Authority
) -> None:
    pair, mine = authority.issue(), authority.issue("a client")
    wrong = [None, stranger.issue("a client"), authority.issue("a client", expired=True)]
    files: Any = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    with running_server(engine, tls_client_ca=str(authority.cert), **files) as front:
        assert _get(front.http_address, _trusting(authority.cert, mine)) == 200
        assert _state(front, tls=authority.cert, client_cert=mine.both) == "starting"
        for other in wrong:
            with pytest.raises(OSError):
                _get(front.http_address, _trusting(authority.cert, other))
            with pytest.raises(OutriderError):
                _state(front, tls=authority.cert, client_cert=other and other.both)
        assert _get(front.http_address, _trusting(authority.cert, mine)) == 200


def test_new_files_are_shown_to_new_connections(
    engine: FakeEngine,
    authority: Authority,
    stranger: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("outrider.gateway.auth.watched_files.POLL_S", 0.02)
    live = {name: tmp_path / name for name in ("cert", "key", "ca")}
    pair, mine = authority.issue(), authority.issue("a client")
    theirs, client = stranger.issue(), stranger.issue("a client")

    def put(found: Pair, ca: Path) -> None:
        for name, source in (("key", found.key), ("cert", found.cert), ("ca", ca)):
            shutil.copy(source, tmp_path / "new")
            (tmp_path / "new").rename(live[name])

    put(pair, authority.cert)
    options: Any = {
        "tls_cert": str(live["cert"]),
        "tls_key": str(live["key"]),
        "tls_client_ca": str(live["ca"]),
    }
    with running_server(engine, **options) as front:
        assert _get(front.http_address, _trusting(authority.cert, mine)) == 200
        assert _state(front, tls=authority.cert, client_cert=mine.both) == "starting"
        live["cert"].write_text("nonsense")
        wait_until(lambda: any("stay as they were" in each for each in caplog.messages))
        time.sleep(0.1)
        assert len([each for each in caplog.messages if "stay as they were" in each]) == 1
        assert _get(front.http_address, _trusting(authority.cert, mine)) == 200
        put(theirs, stranger.cert)
        wait_until(lambda: _is_served(front, stranger, client))
        assert _state(front, tls=stranger.cert, client_cert=client.both) == "starting"
        with pytest.raises(OSError):  # signed by whom it no longer trusts
            _get(front.http_address, _trusting(stranger.cert, mine))


def _is_served(front: Frontend, authority: Authority, own: Pair) -> bool:
    try:
        return _get(front.http_address, _trusting(authority.cert, own)) == 200
    except OSError:
        return False


@pytest.mark.parametrize("broken", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_bad_file_is_one_sentence_at_start(
    engine: FakeEngine, authority: Authority, tmp_path: Path, broken: str, content: str | None
) -> None:
    pair = authority.issue()
    files = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.cert}
    files[broken] = tmp_path / "bad.pem"
    if content is not None:
        files[broken].write_text(content)
    options: Any = {name: str(path) for name, path in files.items()}
    with (
        pytest.raises(OutriderError, match=rf"server\.{broken} .*give [^.]*\.?[^.]*\.$") as caught,
        running_server(engine, **options),
    ):
        pass
    assert "bad.pem" in str(caught.value) and "\n" not in str(caught.value)


def test_a_certificate_needs_its_own_key(engine: FakeEngine, authority: Authority) -> None:
    one, other = authority.issue(), authority.issue()
    with (
        pytest.raises(OutriderError, match="do not belong together"),
        running_server(engine, tls_cert=str(one.cert), tls_key=str(other.key)),
    ):
        pass
