"""Addresses of listeners: `unix:/path/to.sock` on one host, `tcp:host:port` between hosts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.links.frames import LinkError, LinkTimeoutError

RETRY_S = 0.05
_BACKLOG = 128
_MAX_UNIX_PATH = 107  # bytes that fit in the kernel's sockaddr_un
_FORMS = "write unix:/path/to.sock or tcp:host:port"

# Errors while a listener has not started yet or is restarting.
_NOT_YET = (ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError, socket.gaierror)
_NO_WAY_YET = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
# A receiver detects silence itself; this is for links with no `receive` in progress.
_UNACKNOWLEDGED_MS = 30_000


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


def parse(address: str) -> UnixAddress | TcpAddress:
    kind, _, place = address.partition(":")
    if kind == "unix" and place:
        if len(os.fsencode(place)) > _MAX_UNIX_PATH:
            raise ConfigError(
                f"the socket path {place!r} has more than {_MAX_UNIX_PATH} bytes; "
                "choose a shorter folder."
            )
        return UnixAddress(place)
    host, separator, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"the address {address!r} is ambiguous; write IPv6 as tcp:[host]:port.")
    is_port = port.isascii() and port.isdecimal() and int(port) <= 65535
    if kind != "tcp" or not separator or not host or not is_port:
        raise ConfigError(f"the address {address!r} cannot be read; {_FORMS}.")
    return TcpAddress(host, int(port))


def listen(address: str) -> socket.socket:
    """A listening socket. Port 0 takes a free port; see `bound_address` for which one.

    A Unix socket is open to its owner only, and one left behind by a dead process is replaced.
    """
    parsed = parse(address)
    try:
        if isinstance(parsed, UnixAddress):
            return _listen_unix(parsed.path)
        return _listen_tcp(parsed)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror or error}; choose another address."
        ) from error


def bound_address(sock: socket.socket) -> str:
    """The address that a listening socket is bound to."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return str(UnixAddress(name))
    return str(TcpAddress(name[0], name[1]))


def dial(address: str, timeout_s: float) -> socket.socket:
    """A connected, blocking socket. Retries until the timeout while there is no listener."""
    parsed = parse(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = _connect(parsed, max(deadline - time.monotonic(), RETRY_S))
        except OSError as error:
            check_retry(address, error, deadline - time.monotonic(), timeout_s)
        else:
            if not is_own_echo(sock):
                sock.settimeout(None)
                return sock
            sock.close()
        time.sleep(RETRY_S)


def check_retry(address: str, error: OSError, left_s: float, timeout_s: float) -> None:
    """Return if a failed attempt to connect is worth another one; raise the reason if not."""
    reason = error.strerror or str(error) or "no answer"
    if not isinstance(error, _NOT_YET) and error.errno not in _NO_WAY_YET:
        raise LinkError(f"cannot dial {address}: {reason}.") from error
    if left_s < RETRY_S:
        raise LinkTimeoutError(
            f"no answer at {address} after {timeout_s:g} s ({reason}); "
            "check the address and that the engine runs."
        ) from error


def is_own_echo(sock: socket.socket) -> bool:
    """Whether TCP connected the socket to itself. That happens with repeated connects to a free
    local port, and the real listener could then never bind it."""
    if sock.family == socket.AF_UNIX:
        return False
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # already closed, which the handshake will report
        return False


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and give up on bytes that are not acknowledged."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def _connect(parsed: UnixAddress | TcpAddress, timeout_s: float) -> socket.socket:
    if isinstance(parsed, TcpAddress):
        sock = socket.create_connection((parsed.host, parsed.port), timeout_s)
        tune(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(parsed.path)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_unix(path: str) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)  # before `listen`, so no other user can ever connect
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket; choose another address.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError:  # its backlog is full, so there is a listener
            pass
    raise ConfigError(
        f"a running process already listens on {path}; stop it or choose another address."
    )


def _listen_tcp(parsed: TcpAddress) -> socket.socket:
    found: list[tuple[Any, ...]] = socket.getaddrinfo(
        parsed.host, parsed.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, name = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
