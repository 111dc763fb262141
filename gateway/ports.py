"""The ports of a server: found free, kept free, and shared by its processes."""

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
    """A socket to listen on; port 0 takes a free one. A shared port may be taken by processes that
    share it as well, any other only by one that nobody else has. `option` sets it."""
    with _told(host, port, option):
        return _bound(host, port, socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] * is_shared))


def reserve(host: str, port: int, option: str) -> socket.socket:
    """A port that nobody else has, for processes that will share it; it is theirs until the socket
    is closed. Nothing listens on it yet."""
    with _told(host, port, option):
        if port:
            _bound(host, port, socket.SO_REUSEADDR).close()  # whoever shares it is somebody else
        try:
            # Without SO_REUSEADDR: a server that looks for a free port would find this one free.
            return _bound(host, port, socket.SO_REUSEPORT)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Nobody listens there, but connections of somebody who did are not forgotten yet.
            return _bound(host, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def shown(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place_of(sock: socket.socket) -> tuple[str, int]:
    """The numbers of host and port."""
    host, port = sock.getsockname()[:2]
    return host, port


class ReservedPorts(contextlib.ExitStack):
    """Those of a server, until the context is left. `config` has their numbers. A server without
    gateways has none but the admin port."""

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
def _told(host: str, port: int, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise ConfigError(
            f"cannot listen on {shown(host, port)}: {error.strerror}; choose another "
            f"{'--host' if is_host else option}."
        ) from error
