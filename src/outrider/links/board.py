"""The board on which ranks write where they can be reached when they make a process group.

It takes the place of torch's own store, which lets anybody write who can reach its port: only
those who have proved that they know the secret get here.
"""

from __future__ import annotations

import logging
import threading

from outrider.links.channel import Channel
from outrider.links.frames import LinkError
from outrider.links.store_messages import Add, Count, Erase, Read, Values, Write, Written

logger = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20  # keys included; a rank of a group writes some hundreds


class Board:
    """Keys and values, for all groups of an engine; each writes under a name of its own."""

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
            logger.debug("a rank has left the board: %s", error)
        finally:
            channel.close()

    def answer(self, question: object) -> object:
        with self._lock:
            match question:
                case Write(key, value):
                    self._write(key, value)
                    return Written()
                case Read(keys):
                    return Values(tuple(self._values.get(key) for key in keys))
                case Add(key, amount):
                    count = int(self._values.get(key, b"0")) + amount
                    self._write(key, str(count).encode())
                    return Count(count)
                case Erase(key):
                    return Count(self._erase(key))
        raise LinkError(f"a rank sent {type(question).__name__}, which is no question to a board.")

    def forget(self, meeting: str) -> None:
        """What a group that is gone has written under its name."""
        with self._lock:
            for key in [key for key in self._values if key.startswith(f"{meeting}/")]:
                self._erase(key)

    def _write(self, key: str, value: bytes) -> None:
        self._erase(key)
        num_bytes = len(key) + len(value)
        if self._num_bytes + num_bytes > MOST_BYTES:
            raise LinkError(f"ranks have written more than {MOST_BYTES} bytes to each other.")
        self._values[key] = value
        self._num_bytes += num_bytes

    def _erase(self, key: str) -> int:
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self._num_bytes -= len(key) + len(value)
        return 1
