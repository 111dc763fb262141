"""The connections of the gRPC server, which accepts them itself and exposes none: found among the
sockets of this process, given slots like HTTP's, and closed when evicted or idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

from outrider.gateway.connection_slots import ConnectionSlot, ConnectionSlots, plain_address

UNKNOWN_IDLE_S = 15.0  # without a call or a valid key; longer than the interval of probes
SWEEP_S, CROWDED_SWEEP_S = 1.0, 0.1
_DESCRIPTORS = "/proc/self/fd"

_Key: TypeAlias = tuple[str, int]  # address and port of the client


class _ServerSocket(NamedTuple):
    """A socket of the server. Descriptors are reused; the inode identifies the socket."""

    key: _Key
    descriptor: int
    inode: int


@dataclass(slots=True)
class _GrpcConnection:
    touched_s: float
    num_calls: int = 0
    is_known: bool = False
    slot: ConnectionSlot | None = field(default=None)


class GrpcConnections:
    """Connections of the server on `port`, once that is set. Without /proc it does nothing."""

    def __init__(self, slots: ConnectionSlots) -> None:
        self.port = 0
        self.slots = slots
        self._is_possible = os.path.isdir(_DESCRIPTORS)
        self._connections: dict[_Key, _GrpcConnection] = {}
        self._sockets: dict[int, _Key | None] = {}  # by inode, as last seen; None: not of gRPC
        self._num_closed = 0
        self._sweeping: asyncio.Task[None] | None = None

    def start(self, port: int) -> None:
        self.port = port
        if self._is_possible:
            self._sweeping = asyncio.create_task(self._sweep())

    def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()

    @contextlib.contextmanager
    def call(self, peer: str) -> Iterator[_GrpcConnection]:
        """Count a call of this peer (gRPC's name of it) while it is served. Pass the connection to
        `mark_known` if the call has a valid key."""
        key = _key_of(peer)
        connection = None if key is None else self._connections.get(key)
        if connection is None:
            connection = _GrpcConnection(time.monotonic())
            if key is not None and self._is_possible:
                self._connections[key] = connection  # before the next sweep finds it
        connection.num_calls += 1
        _update_slot(connection)
        try:
            yield connection
        finally:
            connection.num_calls -= 1
            connection.touched_s = time.monotonic()
            _update_slot(connection)

    async def _sweep(self) -> None:
        while True:
            start_s = time.monotonic()
            found = await asyncio.to_thread(self._find)
            self._num_closed = 0
            self._update({each.key: each for each in found}, start_s)
            await asyncio.sleep(CROWDED_SWEEP_S if self._num_closed else SWEEP_S)

    def _find(self) -> list[_ServerSocket]:
        """The server's sockets now. Most are known by their inodes from the last sweep."""
        found, seen = [], {}
        for descriptor in map(int, os.listdir(_DESCRIPTORS)):
            try:
                status = os.fstat(descriptor)
                inode = status.st_ino
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                key = self._sockets[inode] if inode in self._sockets else self._look(descriptor)
            except OSError:  # closed meanwhile
                continue
            seen[inode] = key
            if key is not None:
                found.append(_ServerSocket(key, descriptor, inode))
        self._sockets = seen
        return found

    def _look(self, descriptor: int) -> _Key | None:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if sock.getsockname()[1] != self.port:
                return None
            try:
                host, port = sock.getpeername()[:2]
            except OSError:  # it listens
                return None
            return plain_address(host), port

    def _update(self, found: dict[_Key, _ServerSocket], start_s: float) -> None:
        now_s = time.monotonic()
        for key, connection in list(self._connections.items()):
            if key not in found and not connection.num_calls and connection.touched_s < start_s:
                del self._connections[key]
                if connection.slot is not None:
                    connection.slot.release()
        for key, each in found.items():
            connection = self._connections.setdefault(key, _GrpcConnection(now_s))
            if connection.slot is None:
                self._take_slot(connection, each)
            is_idle = not connection.num_calls and not connection.is_known
            if is_idle and now_s - connection.touched_s >= UNKNOWN_IDLE_S:
                self._close(each)

    def _take_slot(self, connection: _GrpcConnection, found: _ServerSocket) -> None:
        slot = self.slots.take(found.key[0], partial(self._close, found))
        connection.slot = slot
        connection.is_known = connection.is_known or slot.is_known
        _update_slot(connection)
        if slot.is_surplus:
            self._close(found)

    def _close(self, found: _ServerSocket) -> None:
        """Shut the socket down, as if the client had: gRPC cannot close one connection."""
        self._num_closed += 1
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(found.descriptor)) as sock,
        ):
            if os.fstat(sock.fileno()).st_ino == found.inode:
                sock.shutdown(socket.SHUT_RDWR)


def mark_known(connection: _GrpcConnection) -> None:
    """A call on the connection had a valid key."""
    connection.is_known = True
    _update_slot(connection)


def _update_slot(connection: _GrpcConnection) -> None:
    if connection.slot is None:
        return
    if connection.is_known:
        connection.slot.mark_known()
    connection.slot.set_busy(connection.num_calls > 0)


def _key_of(peer: str) -> _Key | None:
    """From "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000"; None for a socket file."""
    kind, _, address = peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return plain_address(host.strip("[]")), int(port)
