"""Where ranks and gateways dial in, and where ranks become groups."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from outrider.links.address import bound_address, listen
from outrider.links.channel import Channel
from outrider.links.codec import GATEWAY_CODEC, RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.handshake import receive_greeting
from outrider.links.rank_messages import GATEWAY, Hello

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 10.0
RANK_SILENCE_S = 10.0  # a rank that sends not even heartbeats for so long hangs


class Arrival(NamedTuple):
    """A process that has dialled in and proved that it belongs here."""

    hello: Hello
    channel: Channel


class Doorway:
    """Listens, checks secrets, and sorts who comes.

    A group is whole when all ranks of its role are there. A rank that comes again before that was
    restarted, and takes the place of its predecessor.
    """

    def __init__(self, addresses: Sequence[str], secret: str, sizes: Mapping[str, int]) -> None:
        self._secret = secret
        self._sizes = sizes
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[int, Arrival]] = {role: {} for role in sizes}
        self._groups: dict[str, queue.SimpleQueue[list[Arrival]]] = {
            role: queue.SimpleQueue() for role in sizes
        }
        self.on_gateway: Callable[[Channel], None] | None = None
        self._listeners = [listen(address) for address in addresses]
        self.addresses = [bound_address(listener) for listener in self._listeners]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def take_group(self, role: str, timeout_s: float | None = None) -> list[Arrival]:
        """The next whole group of this role, by rank; `queue.Empty` if none came in time."""
        return self._groups[role].get(timeout=timeout_s)

    def missing(self, role: str) -> list[int]:
        """Ranks the next group still lacks."""
        with self._lock:
            return [rank for rank in range(self._sizes[role]) if rank not in self._waiting[role]]

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            hello = receive_greeting(sock, self._secret, GREETING_TIMEOUT_S)
            if hello.role == GATEWAY:
                self._admit_gateway(hello, sock)
            else:
                self._admit_rank(hello, sock)
        except LinkError as error:
            logger.warning("somebody was turned away: %s", error)
            sock.close()

    def _admit_gateway(self, hello: Hello, sock: socket.socket) -> None:
        if self.on_gateway is None:
            raise LinkError("a gateway came before the engine was ready; it will try again.")
        self.on_gateway(Channel(sock, GATEWAY_CODEC, peer=f"the gateway (pid {hello.pid})"))

    def _admit_rank(self, hello: Hello, sock: socket.socket) -> None:
        size = self._sizes.get(hello.role)
        if size is None or hello.size != size or not 0 <= hello.rank < size:
            raise LinkError(
                f"{hello.role} rank {hello.rank} of {hello.size} does not belong to this engine, "
                f"which has {dict(self._sizes)}; start it with the engine's sizes."
            )
        peer = f"{hello.role} rank {hello.rank} (pid {hello.pid})"
        arrival = Arrival(hello, Channel(sock, RANK_CODEC, peer=peer, silence_s=RANK_SILENCE_S))
        with self._lock:
            waiting = self._waiting[hello.role]
            if (before := waiting.get(hello.rank)) is not None:
                before.channel.close()
            waiting[hello.rank] = arrival
            if len(waiting) == size:
                self._groups[hello.role].put([waiting[rank] for rank in range(size)])
                self._waiting[hello.role] = {}
