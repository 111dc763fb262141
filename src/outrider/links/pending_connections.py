"""Connections that have not authenticated yet, and the bounds on them."""

from __future__ import annotations

import contextlib
import socket
import threading

MAX_PENDING = 64  # of a listener; beyond it the oldest is shut down
ACCEPT_PAUSE_S = 0.1  # after a failed accept, usually for lack of file descriptors


class PendingConnections:
    """The unauthenticated sockets of a listener, oldest first. Thread-safe.

    A socket beyond the limit shuts down the oldest: a handshake is short, and the peer retries.
    Sockets are shut down, never closed: whatever performs the handshake sees the end and closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[socket.socket, None] = {}

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._sockets) >= MAX_PENDING:
                oldest = next(iter(self._sockets))
                del self._sockets[oldest]
                shut_down(oldest)
            self._sockets[sock] = None

    def remove(self, sock: socket.socket) -> bool:
        """Its handshake has ended. Returns whether it was pending until now; if not, it was shut
        down for a newer one."""
        with self._lock:
            return self._sockets.pop(sock, sock) is None

    def shut_down(self) -> None:
        """Shut down all of them."""
        with self._lock:
            for sock in self._sockets:
                shut_down(sock)


def shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
