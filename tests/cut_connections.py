"""A way to a server that can be cut, and lead elsewhere afterwards."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from enum import Enum

_TELLING_BYTES = 64  # more than what only says that its sender lives


class Direction(Enum):
    """Of what is sent: to the server, or by it."""

    THERE = "there"
    BACK = "back"


class Way:
    """Forwards connections to `target`, "host:port"; with `is_closed` it takes none. It listens on
    `host`, with TLS if there is a context."""

    def __init__(
        self, target: str, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
    ) -> None:
        self.target = target
        self.is_closed = False
        listener = socket.create_server((host, 0))
        self._listener = context.wrap_socket(listener, server_side=True) if context else listener
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._to_halve: Direction | None = None
        self.was_halved = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End the connections there are, without a word."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut_inside_message(self, direction: Direction) -> None:
        """The next thing that is said in this direction is passed on but for its last byte, and
        that connection ends; others go on."""
        self.was_halved.clear()
        self._to_halve = direction

    def close(self) -> None:
        self.is_closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except ssl.SSLError:  # a client that does not speak it, or trusts others
                continue
            except OSError:
                return
            if self.is_closed:
                near.close()
                continue
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:  # nobody is there at the moment
                near.close()
                continue
            self._sockets += [near, far]
            for source, sink, direction in (
                (near, far, Direction.THERE),
                (far, near, Direction.BACK),
            ):
                thread = threading.Thread(
                    target=self._forward, args=(source, sink, direction), daemon=True
                )
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._to_halve is direction and len(data) > _TELLING_BYTES:
                    self._to_halve = None
                    sink.sendall(data[:-1])
                    self.was_halved.set()
                    break
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def way_to(
    target: str, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> Iterator[Way]:
    way = Way(target, host, context)
    try:
        yield way
    finally:
        way.close()
