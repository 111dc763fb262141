"""The rendezvous store: ranks exchange their addresses here when they make a process group.

It replaces torch's TCPStore, which accepts writes from any client that reaches its port: this one
serves authenticated connections only.
"""

from __future__ import annotations

import logging
import threading

from outrider.links.channel import Channel
from outrider.links.frames import LinkError
from outrider.links.store_messages import Add, Erase, Read, StoreCount, Values, Write, WriteDone

logger = logging.getLogger(__name__)

MAX_STORE_BYTES = 16 * 2**20  # keys included; a rank of a group writes some hundreds


class RendezvousStore:
    """Keys and values of all groups of an engine; each group has its own key prefix."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0

    def serve(self, channel: Channel) -> None:
        """Answer one rank until its link ends."""
        try:
            while True:
                channel.send(self.answer(channel.receive()))
        except LinkError as error:
            logger.debug("a rank has closed its rendezvous link: %s", error)
        finally:
            channel.close()

    def answer(self, question: object) -> object:
        with self._lock:
            match question:
                case Write(key, value):
                    self._write(key, value)
                    return WriteDone()
                case Read(keys):
                    return Values(tuple(self._values.get(key) for key in keys))
                case Add(key, amount):
                    count = int(self._values.get(key, b"0")) + amount
                    self._write(key, str(count).encode())
                    return StoreCount(count)
                case Erase(key):
                    return StoreCount(self._erase(key))
        raise LinkError(f"a rank sent {type(question).__name__}, which is no store request.")

    def forget(self, meeting: str) -> None:
        """Erase the keys of a group that has ended."""
        with self._lock:
            for key in [key for key in self._values if key.startswith(f"{meeting}/")]:
                self._erase(key)

    def _write(self, key: str, value: bytes) -> None:
        self._erase(key)
        num_bytes = len(key) + len(value)
        if self._num_bytes + num_bytes > MAX_STORE_BYTES:
            raise LinkError(f"ranks have written more than {MAX_STORE_BYTES} bytes to each other.")
        self._values[key] = value
        self._num_bytes += num_bytes

    def _erase(self, key: str) -> int:
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self._num_bytes -= len(key) + len(value)
        return 1
