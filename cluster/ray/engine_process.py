"""The engine's process as the controller sees it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from outrider.checkpoints.environment import model_environment
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Event
from outrider.cluster.ray.actors import Endpoint, EngineActor, EngineNews, ProcessPlace
from outrider.cluster.ray.placement import ENGINE, RolePlacement
from outrider.cluster.ray.postmortem import End, await_end, read_last_lines
from outrider.cluster.ray.spare_actors import SpareEngine
from outrider.cluster.ray.spares import ProcessSlot, Spares
from outrider.config import EngineConfig
from outrider.links.gateway_messages import EngineStatus, ProcessState
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

POLL_S = 0.5
# Its event loop answers at once, whatever the engine computes. Several misses in a row mean a hung
# process or a host that is cut off.
_ANSWER_S = 5.0
_MAX_MISSES = 4
_MAX_MISSES_AT_START = 24  # importing PyTorch holds the interpreter's lock, for long on a busy host


class EngineProcess:
    """One engine, in a bundle of its own or beside the target's first rank. `status` is its last
    report."""

    def __init__(
        self, config: EngineConfig, secret: str, placement: RolePlacement, spares: Spares
    ) -> None:
        self._config = config
        self._secret = secret
        self._placement = placement
        self._spares = spares
        self._actor: Any = None
        self._bookmark = Bookmark()
        self._changed = asyncio.Condition()
        self._run: asyncio.Task[End] | None = None
        self._num_misses = 0
        self._heard_s = time.monotonic()
        self.place: ProcessPlace | None = None
        self.status: EngineStatus | None = None

    async def describe(self) -> Endpoint:
        """Start it and wait until it listens. Raises `RayError` if it cannot."""
        self._actor, self.place = await self._spares.fill(self._slot())
        endpoint: Endpoint = await self._actor.endpoint.remote()
        return endpoint

    def _slot(self) -> ProcessSlot:
        placement = self._placement
        own = placement.need.per_rank if placement.need.role == ENGINE else {}
        options = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement.group, placement_group_bundle_index=0
            )
        }
        actor: Any = ray.remote(EngineActor)
        actor = actor.options(num_cpus=own.get("CPU", 0), num_gpus=own.get("GPU", 0), **options)
        spare: Any = ray.remote(SpareEngine)
        spare = spare.options(num_cpus=0, num_gpus=0, **options)
        args = (self._config, self._secret)
        return ProcessSlot(
            ENGINE,
            0,
            placement.group,
            partial(actor.remote, *args, model_environment()),
            partial(spare.remote, model_environment(), has_models=placement.need.role == ENGINE),
            args,
        )

    def prepare_spare(self) -> None:
        """Call once the engine serves: starts a standby process for it."""
        self._spares.prepare([self._slot()])

    def run(self) -> None:
        """Have it load its models or wait for the ranks, and then serve."""
        self._run = asyncio.create_task(await_end(ENGINE, self._actor.run.remote()))

    @property
    def ended(self) -> asyncio.Task[End]:
        assert self._run is not None
        return self._run

    async def read(self, timeout_s: float) -> list[Event]:
        """Long-polls for events. Empty if it ended (see `ended`) or does not answer (see
        `silence`)."""
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                news: EngineNews = await self._actor.news.remote(self._bookmark, timeout_s)
        except RayError:
            return []
        except TimeoutError:
            self._num_misses += 1
            return []
        self._num_misses, self._heard_s = 0, time.monotonic()
        async with self._changed:
            self.status, self._bookmark = news.status, news.pages.bookmark
            self._changed.notify_all()
        return news.pages.events

    @property
    def silence(self) -> str | None:
        """Why the running process counts as hung; None if it answers."""
        max_misses = _MAX_MISSES_AT_START if self.status is None else _MAX_MISSES
        if self._num_misses < max_misses:
            return None
        silent_s = time.monotonic() - self._heard_s
        return f"it has not answered for {silent_s:.0f} s; it hangs, or its node is cut off"

    async def keep_status(self) -> None:
        """Poll the status as long as the engine runs and answers."""
        while not self.ended.done() and self.silence is None:
            await self.read(0.0)
            await asyncio.sleep(POLL_S)

    async def change_draft(self, config: EngineConfig) -> None:
        """Expect the draft of `config` to connect next. `ClusterError` if the engine cannot."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._actor.change_draft.remote(config)
        except (RayError, TimeoutError) as error:
            raise ClusterError(f"the engine cannot change its draft: {_reason(error)}") from error

    async def draft_error(self) -> str:
        """Why the engine refused the last draft; empty if unknown."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                return str(await self._actor.draft_error.remote())
        return ""

    async def wait_ready(self, role: str, pids: Sequence[int], *, are_ready: bool = True) -> None:
        """Wait until the engine uses these ranks, or no longer does."""
        async with self._changed:
            await self._changed.wait_for(lambda: (self.ready_pids(role) == pids) is are_ready)

    def ready_pids(self, role: str) -> list[int]:
        """Ranks of that role that the engine uses."""
        ranks = () if self.status is None else self.status.ranks
        return [
            rank.pid for rank in ranks if rank.role == role and rank.state is ProcessState.READY
        ]

    async def last_lines(self) -> list[str]:
        if self.place is None:
            return []
        return await read_last_lines(self.place.node_id, self.place.log)

    async def stop(self) -> None:
        """End the engine and the ranks; returns once they have ended."""
        if self._actor is None:
            return
        with contextlib.suppress(RayError):
            await self._actor.stop.remote()
            if self._run is not None:
                await asyncio.wait({self._run})

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        if self._run is not None:
            self._run.cancel()


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return str(cause) or "it does not answer"
