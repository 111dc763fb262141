"""A way to a server that can be cut, and lead elsewhere afterwards."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Way:
    """Forwards connections to `target`, "host:port"; with `is_closed` it takes none."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End the connections there are, without a word."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.is_closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_closed:
                near.close()
                continue
            host, _, port = self.target.rpartition(":")
            far = socket.create_connection((host, int(port)))
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_forward, args=(source, sink), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def way_to(target: str) -> Iterator[Way]:
    way = Way(target)
    try:
        yield way
    finally:
        way.close()
