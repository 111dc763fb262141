"""An engine's listener: accepts ranks and gateways, and collects ranks into groups."""

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
from outrider.links.channel import Channel
from outrider.links.codec import GATEWAY_CODEC, RANK_CODEC, STORE_CODEC
from outrider.links.frames import LinkClosedError, LinkError
from outrider.links.handshake import receive_greeting
from outrider.links.pending_connections import ACCEPT_PAUSE_S, PendingConnections
from outrider.links.rank_messages import Hello, Role
from outrider.links.rendezvous_store import RendezvousStore
from outrider.rate_limited_log import RateLimitedLog

GREETING_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)

RANK_SILENCE_S = 10.0  # a rank without heartbeats for this long hangs
_STORE_SILENCE_S = 60.0


class Arrival(NamedTuple):
    """An authenticated connection."""

    hello: Hello
    channel: Channel


class Listener:
    """Accepts connections, authenticates them and routes them by role.

    A group is complete when all ranks of its role are connected. A rank that connects again before
    that was restarted and replaces its predecessor; likewise a group replaces one that was not
    taken yet. With too many unauthenticated connections, the oldest is closed: a rank's handshake
    is short, and it retries.
    """

    def __init__(self, addresses: Sequence[str], secret: str, sizes: Mapping[str, int]) -> None:
        self._secret = secret
        self._limited_log = RateLimitedLog(logger)
        self._sizes = dict(sizes)
        self._changed = threading.Condition()
        self._pending = PendingConnections()
        self._waiting: dict[str, dict[int, Arrival]] = {role: {} for role in sizes}
        self._untaken: dict[str, list[Arrival]] = {}
        self._is_closed = threading.Event()
        self.store = RendezvousStore()
        # Twice the ranks: a restarted rank may connect before its predecessor's loss is noticed.
        self._store_slots = threading.Semaphore(2 * sum(sizes.values()))
        self.on_gateway: Callable[[Channel, int], None] | None = None
        self._sockets = [listen(address) for address in addresses]
        self.addresses = [bound_address(sock) for sock in self._sockets]
        for sock in self._sockets:
            threading.Thread(target=self._accept, args=(sock,), daemon=True).start()

    def expect(self, role: str, size: int) -> None:
        """Change the size of the role's next group; ranks waiting for the old size are
        disconnected."""
        with self._changed:
            before, self._sizes[role] = self._sizes[role], size
            gone = [*self._waiting[role].values(), *self._untaken.pop(role, [])]
            self._waiting[role] = {}
        for arrival in gone:
            arrival.channel.close()
        if size > before:
            self._store_slots.release(2 * (size - before))

    def take_group(self, role: str, timeout_s: float | None = None) -> list[Arrival]:
        """The next complete group of this role, by rank; `queue.Empty` on timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: role in self._untaken, timeout_s):
                raise queue.Empty
            return self._untaken.pop(role)

    def close(self) -> None:
        """Stop listening and close all connections that were not taken."""
        self._is_closed.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            sock.close()
        self._pending.shut_down()
        with self._changed:
            waiting = [
                *self._untaken.values(),
                *(list(each.values()) for each in self._waiting.values()),
            ]
        for arrival in (arrival for group in waiting for arrival in group):
            arrival.channel.close()

    def _accept(self, bound: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = bound.accept()
            except OSError as error:
                if not self._is_closed.wait(ACCEPT_PAUSE_S):
                    self._limited_log.warning("cannot accept connections: %s", error)
                continue
            self._pending.add(sock)
            try:
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
            except RuntimeError as error:
                self._limited_log.warning("rejected a connection: %s", error)
                self._pending.remove(sock)
                sock.close()

    def _authenticated(self, sock: socket.socket) -> None:
        if not self._pending.remove(sock):
            raise LinkClosedError("the handshake took too long while many others were in progress.")

    def _admit(self, sock: socket.socket) -> None:
        hello: Hello | None = None
        try:
            authenticated = partial(self._authenticated, sock)
            hello = receive_greeting(sock, self._secret, GREETING_TIMEOUT_S, authenticated)
            if hello.role == Role.GATEWAY:
                self._admit_gateway(hello, sock)
            elif hello.role == Role.STORE:
                self._admit_to_store(hello, sock)
            else:
                self._admit_rank(hello, sock)
        except LinkError as error:
            # Rate-limited: unauthenticated clients can trigger these lines at will.
            warn = self._limited_log.warning if hello is None else logger.warning
            warn("rejected a connection: %s", error)
            self._pending.remove(sock)
            sock.close()

    def _admit_gateway(self, hello: Hello, sock: socket.socket) -> None:
        if self.on_gateway is None:
            raise LinkError("a gateway connected before the engine was ready; it will retry.")
        channel = Channel(sock, GATEWAY_CODEC, peer=f"the gateway (pid {hello.pid})")
        self.on_gateway(channel, hello.rank)

    def _admit_to_store(self, hello: Hello, sock: socket.socket) -> None:
        if not self._store_slots.acquire(blocking=False):
            raise LinkError("the rendezvous store has more clients than this engine has ranks.")
        try:
            peer = f"a rank's rendezvous link (pid {hello.pid})"
            self.store.serve(Channel(sock, STORE_CODEC, peer=peer, silence_s=_STORE_SILENCE_S))
        finally:
            self._store_slots.release()

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
