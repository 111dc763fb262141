"""The ports of a server: bound, reserved, and shared by its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Iterator
from typing import Any

from outrider.config import ServerConfig
from outrider.errors import ConfigError

HTTP_OPTION, GRPC_OPTION, ADMIN_OPTION = "--port", "--grpc-port", "--admin-port"


def listener(host: str, port: int, option: str, *, is_shared: bool = False) -> socket.socket:
    """A socket to listen on; port 0 takes a free one. A shared port may be in use by processes that
    share it too, any other must be free. `option` is the flag to name in errors."""
    with _reporting_errors(host, port, option):
        return _bound(host, port, socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] * is_shared))


def reserve(host: str, port: int, option: str) -> socket.socket:
    """Reserve a free port for processes that will share it, until the socket is closed. Nothing
    listens on it yet."""
    with _reporting_errors(host, port, option):
        if port:
            _bound(host, port, socket.SO_REUSEADDR).close()  # fails if another server shares it
        try:
            # Without SO_REUSEADDR, with which another server's port 0 could choose this port.
            return _bound(host, port, socket.SO_REUSEPORT)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Nothing listens there, but connections of an earlier server are in TIME_WAIT.
            return _bound(host, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def shown(host: str, port: int) -> str:
    """host:port, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place_of(sock: socket.socket) -> tuple[str, int]:
    """The host's IP address and the port."""
    host, port = sock.getsockname()[:2]
    return host, port


class ReservedPorts(contextlib.ExitStack):
    """The reserved ports of a server, until the context is left; `config` has their numbers. A
    server without gateways has only the admin port."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__()
        with contextlib.ExitStack() as stack:
            self.admin: socket.socket | None = None
            if config.admin_port is not None:
                self.admin = listener(config.host, config.admin_port, ADMIN_OPTION)
                stack.enter_context(self.admin)
            self.config = config
            if config.processes == 0:
                self.push(stack.pop_all())
                return
            http = stack.enter_context(reserve(config.host, config.port, HTTP_OPTION))
            grpc = stack.enter_context(reserve(config.host, config.grpc_port, GRPC_OPTION))
            host, port = place_of(http)
            self.config = dataclasses.replace(
                config, host=host, port=port, grpc_port=place_of(grpc)[1]
            )
            self.push(stack.pop_all())


def _bound(host: str, port: int, *options: int) -> socket.socket:
    found: list[tuple[Any, ...]] = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, name = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(name)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _reporting_errors(host: str, port: int, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise ConfigError(
            f"cannot listen on {shown(host, port)}: {error.strerror}; choose another "
            f"{'--host' if is_host else option}."
        ) from error
