"""A launch on what is not there yet: Ray takes seconds to start, and gateways need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Say
from outrider.cluster.launch import Launch
from outrider.config import EngineConfig
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace

T = TypeVar("T")


class LateLaunch(Generic[T]):
    """See `outrider.cluster.launch.Launch`. `wait` blocks until what `make` needs is there, or
    fails soon after `give_up`."""

    def __init__(
        self,
        wait: Callable[[], T],
        make: Callable[[T], Launch],
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._wait = wait
        self._make = make
        self._give_up = give_up
        self._made: Launch | None = None

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        return () if self._made is None else self._made.places

    async def view(self) -> ClusterView | None:
        return None if self._made is None else await self._made.view()

    async def keep(self, say: Say) -> None:
        # Made here and not in the thread: whoever is stopped while it waits has made nothing.
        self._made = self._make(await asyncio.to_thread(self._wait))
        self._made.on_change.extend(self.on_change)
        await self._made.keep(say)

    async def scale(self, num_replicas: int) -> None:
        await self._there().scale(num_replicas)

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._there().roll_out(config, is_draft_only=is_draft_only)

    async def stop(self) -> None:
        self._give_up()
        if self._made is not None:
            await self._made.stop()

    def abort(self) -> None:
        self._give_up()
        if self._made is not None:
            self._made.abort()

    def _there(self) -> Launch:
        if self._made is None:
            raise ClusterError("the server is starting; order it again once it serves.")
        return self._made
