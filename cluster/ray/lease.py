"""The lease on a controller: one server process directs it at a time, for as long as it polls."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.cluster.errors import ClusterError

LEASE_S = 3.0  # renewed by polls twice a second


class LeaseLostError(ClusterError):
    """Another process has taken over the controller."""


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """A server process, as holder of a lease."""

    name: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class Lease:
    """Held by the driver that claimed it, until it expires unrenewed after `LEASE_S` and another
    driver claims it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.holder: DriverIdentity | None = None
        self._clock = clock
        self._renewed_s = clock()

    @property
    def age_s(self) -> float:
        """Seconds since the last renewal, or creation."""
        return self._clock() - self._renewed_s

    def claim(self, driver: DriverIdentity) -> bool:
        """Claim the lease; whether the driver holds it now."""
        is_held = self.holder is not None and self.holder.id != driver.id
        if is_held and self.age_s < LEASE_S:
            return False
        self.holder, self._renewed_s = driver, self._clock()
        return True

    def renew(self, driver: DriverIdentity) -> None:
        """Raises `LeaseLostError` if another driver holds it, however old it is."""
        if self.holder is not None and self.holder.id != driver.id:
            raise LeaseLostError(
                f"the replicas were taken over by another server ({self.holder.name}) while this "
                f"one ({driver.name}) did not renew its lease; this one ends."
            )
        self.holder, self._renewed_s = driver, self._clock()
