"""Tenants that share the scheduler: the service each has received and what it holds.

Service is counted in tokens: uncached prompt tokens and output tokens. It only grows. It is
compared among waiting tenants, so a tenant that starts to wait is lifted to their level
(`WaitingQueue`): an idle tenant saves up nothing.
"""

from __future__ import annotations

MAX_IDLE = 1024
"""Tenants without requests whose service is remembered; the one that left first is forgotten."""


class Tenant:
    """One user of the scheduler. Without API keys there is only one."""

    __slots__ = ("name", "num_requests", "num_running", "num_waiting", "service", "without_row_s")

    def __init__(self, name: str) -> None:
        self.name = name
        self.service = 0
        self.num_requests = 0  # unfinished, each sample counting
        self.num_waiting = 0  # of these: without a row, also for a sibling's prompt
        self.num_running = 0  # and with one
        self.without_row_s = 0.0  # time since which it waits without a row


class Tenants:
    """Tenants with requests, and the last `max_idle` without."""

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self.active: dict[str, Tenant] = {}
        self._idle: dict[str, Tenant] = {}  # the first to leave comes first
        self._max_idle = max_idle

    def __len__(self) -> int:
        """Remembered tenants, idle ones included."""
        return len(self.active) + len(self._idle)

    def enter(self, name: str) -> Tenant:
        """The tenant of a new request."""
        tenant = self.active.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None) or Tenant(name)
            self.active[name] = tenant
        tenant.num_requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request of the tenant has ended."""
        tenant.num_requests -= 1
        if tenant.num_requests:
            return
        del self.active[tenant.name]
        self._idle[tenant.name] = tenant
        if len(self._idle) > self._max_idle:
            del self._idle[next(iter(self._idle))]

    def largest_waiting(self) -> Tenant | None:
        """The tenant with most requests that wait."""
        return max(self.active.values(), key=lambda each: each.num_waiting, default=None)
