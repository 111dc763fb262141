"""The engine's process as the controller sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.cluster.actors import Endpoint, EngineActor, EngineNews, ProcessPlace
from outrider.cluster.events import Bookmark, Event
from outrider.cluster.placement import ENGINE, Placed
from outrider.cluster.postmortem import End, await_end, read_last_lines
from outrider.config import EngineConfig
from outrider.links.gateway_messages import EngineStatus, ProcessState

POLL_S = 0.5


class EngineProcess:
    """One engine, in room of its own or beside the target's first rank. `status` is what it last
    said of itself."""

    def __init__(self, config: EngineConfig, secret: str, room: Placed) -> None:
        actor: Any = ray.remote(EngineActor)
        own = room.need.per_rank if room.need.role == ENGINE else {}
        self._actor = actor.options(
            num_cpus=own.get("CPU", 0),
            num_gpus=own.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                room.group, placement_group_bundle_index=0
            ),
        ).remote(config, secret)
        self._bookmark = Bookmark()
        self._changed = asyncio.Condition()
        self._run: asyncio.Task[End] | None = None
        self.place: ProcessPlace | None = None
        self.status: EngineStatus | None = None

    async def describe(self) -> Endpoint:
        """Wait until it listens. Raises `RayError` if it cannot."""
        self.place = await self._actor.describe.remote()
        endpoint: Endpoint = await self._actor.endpoint.remote()
        return endpoint

    def run(self) -> None:
        """Let it load its models, or wait for the ranks, and then serve."""
        self._run = asyncio.create_task(await_end(ENGINE, self._actor.run.remote()))

    @property
    def ended(self) -> asyncio.Task[End]:
        assert self._run is not None
        return self._run

    async def read(self, timeout_s: float) -> list[Event]:
        """What it has to say, waited for. Nothing if it has ended, which `ended` tells."""
        try:
            news: EngineNews = await self._actor.news.remote(self._bookmark, timeout_s)
        except RayError:
            return []
        async with self._changed:
            self.status, self._bookmark = news.status, news.pages.bookmark
            self._changed.notify_all()
        return news.pages.events

    async def keep_status(self) -> None:
        """As long as it runs."""
        while not self.ended.done():
            await self.read(0.0)
            await asyncio.sleep(POLL_S)

    async def wait_ready(self, role: str, pids: Sequence[int], *, are_ready: bool = True) -> None:
        """Wait until the engine works with these ranks, or does not any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: (self.ready_pids(role) == pids) is are_ready)

    def ready_pids(self, role: str) -> list[int]:
        """Ranks of that role it works with."""
        ranks = () if self.status is None else self.status.ranks
        return [
            rank.pid for rank in ranks if rank.role == role and rank.state is ProcessState.READY
        ]

    async def last_lines(self) -> list[str]:
        if self.place is None:
            return []
        return await read_last_lines(self.place.node_id, self.place.log)

    async def stop(self) -> None:
        """Ask it to end, and the ranks with it; returns when it has."""
        with contextlib.suppress(RayError):
            await self._actor.stop.remote()
            if self._run is not None:
                await asyncio.wait({self._run})

    def kill(self) -> None:
        ray.kill(self._actor)
        if self._run is not None:
            self._run.cancel()
