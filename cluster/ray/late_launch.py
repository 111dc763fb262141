"""A launch over a Ray session that may still be opening, or may be lost.

Ray takes seconds to start; gateways start meanwhile. If its head is lost, the server attaches to
the next one; gateways keep their requests and their links to engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, TypeVar

from outrider.cluster.errors import ClusterError, DetachedError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.launch import Launch
from outrider.cluster.tasks import in_own_thread
from outrider.config import EngineConfig
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace
from outrider.restarts import Restarts

T = TypeVar("T")

REATTACH_S = 600.0  # for a lost session to come back; then the supervisor restarts this server
OPEN_S = 120.0  # beyond a session's own timeout: opening it hangs
LONGEST_PAUSE_S = 5.0  # between short-lived sessions


class LateLaunch(Generic[T]):
    """See `outrider.cluster.launch.Launch`. `open_session` takes a timeout, blocks, and fails soon
    after `give_up`; `make` raises `DetachedError` if the session is lost."""

    def __init__(
        self,
        open_session: Callable[[float], T],
        make: Callable[[T], Awaitable[Launch]],
        give_up: Callable[[], None] = lambda: None,
        *,
        first_wait_s: float = 0.0,
    ) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._open = open_session
        self._make = make
        self._give_up = give_up
        self._first_wait_s = first_wait_s
        self._made: Launch | None = None
        self._has_run = False  # reattach only to replicas that have run

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        """Empty while there is no session: the last known places may be stale."""
        return () if self._made is None else self._made.places

    @property
    def config(self) -> EngineConfig | None:
        return None if self._made is None else self._made.config

    async def view(self) -> ClusterView | None:
        return None if self._made is None else await self._made.view()

    async def run(self, say: Say) -> None:
        wait_s, lost = self._first_wait_s, Restarts()
        while True:
            session = await self._opened(wait_s)
            try:
                made = await self._make(session)
                made.on_change.extend(self.on_change)
                self._made = made
                lost.runs()
                await made.run(say)
                return
            except DetachedError as error:
                self._has_run |= bool(self.places)
                if not self._has_run:
                    raise
                self._made = None
                pause_s, wait_s = lost.lost(), REATTACH_S
                words = f"{str(error).rstrip('.')}; reattaching to Ray, requests wait"
                say(Event(EventKind.TROUBLE, words))
                await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))

    async def _opened(self, wait_s: float) -> T:
        opening = in_own_thread(lambda: self._open(wait_s), "outrider-ray")
        try:
            async with asyncio.timeout(wait_s + OPEN_S):
                return await opening
        except TimeoutError:
            limit_s = wait_s + OPEN_S
            raise ClusterError(f"Ray did not accept this server within {limit_s:g} s.") from None

    async def scale(self, num_replicas: int) -> None:
        await self._attached().scale(num_replicas)

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._attached().roll_out(config, is_draft_only=is_draft_only)

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        if self._made is not None:
            await self._made.leave(hosts, limit_s)

    async def stop(self) -> None:
        self._give_up()
        if self._made is not None:
            await self._made.stop()

    def abort(self) -> None:
        self._give_up()
        if self._made is not None:
            self._made.abort()

    def _attached(self) -> Launch:
        if self._made is None:
            raise ClusterError("the server is starting; try again once it serves.")
        return self._made
