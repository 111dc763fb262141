"""A `torch.distributed` store held by the engine: the rendezvous of process groups, over a link.

Torch's own `TCPStore` is open to any process that reaches its port. This one is a link like any
other: both sides have proved that they know the secret.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from outrider.links.channel import Channel
from outrider.links.codec import STORE_CODEC
from outrider.links.frames import LinkError
from outrider.links.handshake import dial_in
from outrider.links.rank_messages import Hello, Role
from outrider.links.store_messages import Add, Erase, Read, StoreCount, Values, Write, WriteDone

dist: Any = distributed  # torch.distributed lacks type information

M = TypeVar("M")
LOOPBACK = "127.0.0.1"
_ANSWER_TIMEOUT_S = 30.0
_POLL_S = 0.01


class LinkStore(dist.Store):  # type: ignore[misc]
    """A `torch.distributed.Store`; torch calls it from its own threads, too.

    Every failure is a `DistStoreError`, as with torch's stores. Waiting polls, so it blocks neither
    other threads nor the engine.
    """

    def __init__(
        self, engine: str, secret: str, timeout_s: float, own_host: str | None = None
    ) -> None:
        """`own_host` is this rank's address for other ranks; by default, the one it dials from."""
        super().__init__()
        hello = Hello(Role.STORE, 0, 1, os.getpid(), socket.gethostname())
        sock = dial_in(engine, secret, hello, timeout_s)
        dialled_from = LOOPBACK if sock.family == socket.AF_UNIX else sock.getsockname()[0]
        self.own_host = own_host or dialled_from
        self._channel = Channel(sock, STORE_CODEC, peer="the engine's rendezvous store")
        self._lock = threading.Lock()
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: str | bytes) -> None:
        written = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(Write(key, written), WriteDone)

    def get(self, key: str) -> bytes:
        self.wait([key])
        [value] = self._read([key])
        if value is None:
            raise dist.DistStoreError(f"the key {key!r} was erased while it was read.")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit: timedelta = timeout or self.timeout
        deadline_s = time.monotonic() + limit.total_seconds()
        while any(value is None for value in self._read(keys)):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(
                    f"no rank has written {', '.join(keys)} within {limit.total_seconds():g} s; a "
                    "rank of the group is missing."
                )
            time.sleep(_POLL_S)

    def check(self, keys: Sequence[str]) -> bool:
        """False also once the link has closed: NCCL's thread that calls this must not raise."""
        try:
            return all(value is not None for value in self._read(keys))
        except dist.DistStoreError:
            return False

    def add(self, key: str, amount: int) -> int:
        return self._ask(Add(key, amount), StoreCount).count

    def delete_key(self, key: str) -> bool:
        return self._ask(Erase(key), StoreCount).count > 0

    def clone(self) -> LinkStore:
        """Torch wants one store per waiting thread; polling makes one enough."""
        return self

    def close(self) -> None:
        self._channel.close()

    def _read(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        return self._ask(Read(tuple(keys)), Values).values

    def _ask(self, request: object, kind: type[M]) -> M:
        try:
            with self._lock:
                self._channel.send(request)
                answer = self._channel.receive(_ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            self._channel.close()  # a late answer would be taken for that of another request
            raise dist.DistStoreError("the engine's rendezvous store does not answer.") from error
        except LinkError as error:
            raise dist.DistStoreError(str(error)) from error
        if not isinstance(answer, kind):
            raise dist.DistStoreError(
                f"the engine's rendezvous store answered {type(answer).__name__}."
            )
        return answer
