"""Restarts the draft group whenever it is lost; the engine decodes without it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, EventKind, Say, quote
from outrider.cluster.ray.actor_group import ActorGroup
from outrider.cluster.ray.actors import Endpoint
from outrider.cluster.ray.engine_process import EngineProcess
from outrider.cluster.ray.facts import live_node_ids
from outrider.cluster.ray.node_assignment import Need
from outrider.cluster.ray.placement import RolePlacement, place_again, raise_if_lost
from outrider.cluster.ray.postmortem import root_cause
from outrider.cluster.ray.spares import Spares
from outrider.cluster.tasks import first_of
from outrider.config import EngineConfig
from outrider.links.rank_messages import Role
from outrider.restarts import Restarts, draft_back, draft_lost
from ray.exceptions import RayError


class DraftSupervisor:
    """Owns the current draft group, which the engine already uses, and its placement."""

    def __init__(
        self,
        group: ActorGroup,
        placed: Mapping[str, RolePlacement],
        engine: EngineProcess,
        endpoint: Endpoint,
        config: EngineConfig,
        spares: Spares,
        say: Say,
    ) -> None:
        self.group = group
        self.restarts = 0
        self._placed = placed
        self._engine = engine
        self._endpoint = endpoint
        self._config = config
        self._spares = spares
        self._say = say
        self._starting = asyncio.Lock()  # held while a group starts
        self._is_changing = False

    async def run(self) -> None:
        """Until cancelled."""
        restarts = Restarts()
        restarts.runs()
        while True:
            group = self.group
            reason: str | None = await self._await_loss(group)
            if self._is_changing:
                async with self._starting:
                    continue
            while reason is not None and group is self.group:
                pause_s = restarts.lost()
                group.kill()
                self._say(Event(EventKind.TROUBLE, draft_lost(reason, pause_s)))
                await asyncio.sleep(pause_s)
                async with self._starting:
                    if group is not self.group:  # replaced by another draft meanwhile
                        break
                    reason = await self._restart(self._placed[Role.DRAFT].need)
                    group = self.group
            away_s = restarts.runs()
            if reason is None:
                self._say(Event(EventKind.REPAIR, draft_back(away_s, self.group.pids)))

    async def change(self, need: Need, config: EngineConfig) -> None:
        """Replace the draft by the one of `config`. If that fails, restore the previous draft and
        raise `ClusterError` with the cause."""
        before, need_before = self._config, self._placed[Role.DRAFT].need
        self._is_changing = True
        try:
            async with self._starting:
                await self._engine.change_draft(config)
                self.group.kill()
                reason = await self._restart(need)
                if reason is None:
                    self._config = config
                    return
                self.group.kill()
                await self._engine.change_draft(before)
                failure = await self._restart(need_before)
        finally:
            self._is_changing = False
        back = "the previous one is back" if failure is None else "the previous one is restarting"
        raise ClusterError(f"the new draft failed to start: {reason.rstrip('.')}; {back}.")

    async def _await_loss(self, group: ActorGroup) -> str:
        """Wait until a rank ends or the engine gives up on the group; returns the reason."""
        given_up = self._engine.wait_ready(Role.DRAFT, group.pids, are_ready=False)
        await first_of(group.wait_any_ended(), given_up)
        return await self._explain(group, "it stopped answering")

    async def _restart(self, need: Need) -> str | None:
        """Start a new group. None once the engine uses it, else the cause of the failure."""
        self.restarts += 1
        cluster = self._config.cluster
        limit_s = cluster.start_timeout_s
        placement = self._placed[Role.DRAFT]
        self.group = ActorGroup(placement, self._spares)
        try:
            if need != placement.need or not placement.is_within(
                await asyncio.to_thread(live_node_ids)
            ):
                await place_again(
                    self._placed,
                    Role.DRAFT,
                    cluster.placement_timeout_s,
                    can_grow=cluster.address is not None,
                    need=need,
                )
                self.group = ActorGroup(placement, self._spares)
            async with asyncio.timeout(limit_s):
                await first_of(self._join(), raise_if_lost([placement]))
        except TimeoutError:
            return f"it was not ready within cluster.start_timeout_s ({limit_s:g} s)"
        except (RayError, ClusterError, PlacementError) as error:
            return str(error)
        if not self.group.ends:
            self.group.prepare_spares()
            return None
        refusal = await self._engine.draft_error()
        return await self._explain(self.group, refusal or "the engine did not accept it")

    async def _join(self) -> None:
        """Wait until the engine uses the group, or one of its ranks ends."""
        group = self.group
        await group.describe()
        group.run(self._endpoint)
        joined = self._engine.wait_ready(Role.DRAFT, group.pids)
        await first_of(group.wait_any_ended(), joined)

    async def _explain(self, group: ActorGroup, otherwise: str) -> str:
        cause = root_cause(group.ends)
        if cause is None:
            return otherwise
        for event in quote(cause.name, await group.last_lines(cause.name)):
            self._say(event)
        return f"{cause.name}: {cause.reason}"
