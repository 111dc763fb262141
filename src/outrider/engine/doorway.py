"""Where ranks and gateways dial in, and where ranks become groups."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from outrider.links.address import bound_address, listen
from outrider.links.board import Board
from outrider.links.channel import Channel
from outrider.links.codec import GATEWAY_CODEC, RANK_CODEC, STORE_CODEC
from outrider.links.frames import LinkClosedError, LinkError
from outrider.links.handshake import receive_greeting
from outrider.links.rank_messages import Hello, Role
from outrider.quiet_log import QuietLog

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 10.0
RANK_SILENCE_S = 10.0  # a rank that sends not even heartbeats for so long hangs
_BOARD_SILENCE_S = 60.0
_MOST_STRANGERS = 64  # handshakes under way at a time
_ACCEPT_PAUSE_S = 0.1  # after a failure, most likely for want of descriptors


class Arrival(NamedTuple):
    """A process that has dialled in and proved that it belongs here."""

    hello: Hello
    channel: Channel


class Doorway:
    """Listens, checks secrets, and sorts who comes.

    A group is whole when all ranks of its role are there. A rank that comes again before that was
    restarted, and takes the place of its predecessor; so does a group before the last was taken.
    Whoever has not proved itself yet is a stranger. When there are too many, the oldest is turned
    away: a rank needs a moment only, and dials again if that was too long.
    """

    def __init__(self, addresses: Sequence[str], secret: str, sizes: Mapping[str, int]) -> None:
        self._secret = secret
        self._quiet_log = QuietLog(logger)
        self._sizes = dict(sizes)
        self._changed = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._waiting: dict[str, dict[int, Arrival]] = {role: {} for role in sizes}
        self._untaken: dict[str, list[Arrival]] = {}
        self._is_closed = threading.Event()
        self.board = Board()
        # Twice: a rank that is started anew may come before the end of the last was noticed.
        self._board_seats = threading.Semaphore(2 * sum(sizes.values()))
        self.on_gateway: Callable[[Channel, int], None] | None = None
        self._listeners = [listen(address) for address in addresses]
        self.addresses = [bound_address(listener) for listener in self._listeners]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def expect(self, role: str, size: int) -> None:
        """From now on a group of this role, which this engine has, is of so many ranks; whoever
        has come for another is turned away."""
        with self._changed:
            before, self._sizes[role] = self._sizes[role], size
            gone = [*self._waiting[role].values(), *self._untaken.pop(role, [])]
            self._waiting[role] = {}
        for arrival in gone:
            arrival.channel.close()
        if size > before:
            self._board_seats.release(2 * (size - before))

    def take_group(self, role: str, timeout_s: float | None = None) -> list[Arrival]:
        """The next whole group of this role, by rank; `queue.Empty` if none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: role in self._untaken, timeout_s):
                raise queue.Empty
            return self._untaken.pop(role)

    def close(self) -> None:
        """Hang up on everybody who was not taken."""
        self._is_closed.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        with self._changed:
            for sock in self._strangers:
                _hang_up(sock)
            waiting = [
                *self._untaken.values(),
                *(list(each.values()) for each in self._waiting.values()),
            ]
        for arrival in (arrival for group in waiting for arrival in group):
            arrival.channel.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._is_closed.wait(_ACCEPT_PAUSE_S):
                    self._quiet_log.warning("no connection can be accepted: %s", error)
                continue
            self._remember(sock)
            try:
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
            except RuntimeError as error:
                self._quiet_log.warning("a connection was refused: %s", error)
                self._forget(sock)
                sock.close()

    def _remember(self, stranger: socket.socket) -> None:
        with self._changed:
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)  # its thread closes it
            self._strangers[stranger] = None

    def _forget(self, stranger: socket.socket) -> bool:
        """Whether it was still one."""
        with self._changed:
            return self._strangers.pop(stranger, stranger) is None

    def _welcome(self, stranger: socket.socket) -> None:
        if not self._forget(stranger):
            raise LinkClosedError("it took too long while many others were at the door.")

    def _admit(self, sock: socket.socket) -> None:
        hello: Hello | None = None
        try:
            welcome = partial(self._welcome, sock)
            hello = receive_greeting(sock, self._secret, GREETING_TIMEOUT_S, welcome)
            if hello.role == Role.GATEWAY:
                self._admit_gateway(hello, sock)
            elif hello.role == Role.STORE:
                self._admit_to_board(hello, sock)
            else:
                self._admit_rank(hello, sock)
        except LinkError as error:
            # Without the secret anybody can cause these lines, as many as they like.
            warn = self._quiet_log.warning if hello is None else logger.warning
            warn("a connection was refused: %s", error)
            self._forget(sock)
            sock.close()

    def _admit_gateway(self, hello: Hello, sock: socket.socket) -> None:
        if self.on_gateway is None:
            raise LinkError("a gateway came before the engine was ready; it will try again.")
        channel = Channel(sock, GATEWAY_CODEC, peer=f"the gateway (pid {hello.pid})")
        self.on_gateway(channel, hello.rank)

    def _admit_to_board(self, hello: Hello, sock: socket.socket) -> None:
        if not self._board_seats.acquire(blocking=False):
            raise LinkError("more processes want to meet here than this engine has ranks.")
        try:
            peer = f"a rank that meets others (pid {hello.pid})"
            self.board.serve(Channel(sock, STORE_CODEC, peer=peer, silence_s=_BOARD_SILENCE_S))
        finally:
            self._board_seats.release()

    def _admit_rank(self, hello: Hello, sock: socket.socket) -> None:
        size = self._sizes.get(hello.role)
        if size is None or hello.size != size or not 0 <= hello.rank < size:
            raise LinkError(
                f"{hello.role} rank {hello.rank} of {hello.size} does not belong to this engine, "
                f"which has {dict(self._sizes)}; start it with the engine's sizes."
            )
        peer = f"{hello.role} rank {hello.rank} (pid {hello.pid})"
        arrival = Arrival(hello, Channel(sock, RANK_CODEC, peer=peer, silence_s=RANK_SILENCE_S))
        replaced: list[Arrival] = []
        with self._changed:
            waiting = self._waiting[hello.role]
            if hello.rank in waiting:
                replaced.append(waiting[hello.rank])
            waiting[hello.rank] = arrival
            if len(waiting) == size:
                replaced += self._untaken.get(hello.role, [])
                self._untaken[hello.role] = [waiting[rank] for rank in range(size)]
                self._waiting[hello.role] = {}
                self._changed.notify_all()
        for predecessor in replaced:
            predecessor.channel.close()


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
