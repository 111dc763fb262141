"""Which server's process directs a controller: one at a time, for as long as it asks for news."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.cluster.errors import ClusterError

LEASE_S = 3.0  # news are asked for twice a second


class LeaseLostError(ClusterError):
    """Another process has taken over the controller."""


@dataclass(frozen=True, slots=True)
class Driver:
    """A server's process."""

    name: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class Lease:
    """Held by the driver that claimed it, until it was not renewed for `LEASE_S` and another one
    claims it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.holder: Driver | None = None
        self._clock = clock
        self._renewed_s = clock()

    @property
    def age_s(self) -> float:
        """Since it was last renewed, or made."""
        return self._clock() - self._renewed_s

    def claim(self, driver: Driver) -> bool:
        """Whether the driver holds it now."""
        is_held = self.holder is not None and self.holder.id != driver.id
        if is_held and self.age_s < LEASE_S:
            return False
        self.holder, self._renewed_s = driver, self._clock()
        return True

    def renew(self, driver: Driver) -> None:
        """Raises `LeaseLostError` if another driver holds it, however old it is."""
        if self.holder is not None and self.holder.id != driver.id:
            raise LeaseLostError(
                f"the replicas were taken over by another server ({self.holder.name}) while this "
                f"one ({driver.name}) did not ask for them; this one ends."
            )
        self.holder, self._renewed_s = driver, self._clock()
