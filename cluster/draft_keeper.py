"""Starts the draft group anew whenever it is lost; the engine goes on without it meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ray.exceptions import RayError

from outrider.cluster.actor_group import ActorGroup
from outrider.cluster.engine_process import EngineProcess
from outrider.cluster.events import Event, Kind, Say, quote
from outrider.cluster.placement import Placed
from outrider.cluster.postmortem import root_cause
from outrider.cluster.tasks import first_of
from outrider.engine.launch.restarts import Restarts, draft_back, draft_lost
from outrider.links.rank_messages import Role


@dataclass(frozen=True, slots=True)
class Dialling:
    """What a rank needs to reach its engine, and how long it may take to be of use."""

    address: str
    secret: str
    start_timeout_s: float


class DraftKeeper:
    """Owns the present draft group, which the engine already works with."""

    def __init__(
        self, group: ActorGroup, placed: Placed, engine: EngineProcess, dialling: Dialling, say: Say
    ) -> None:
        self.group = group
        self.restarts = 0
        self._placed = placed
        self._engine = engine
        self._dialling = dialling
        self._say = say

    async def run(self) -> None:
        """Until cancelled."""
        restarts = Restarts()
        restarts.runs()
        while True:
            reason: str | None = await self._await_loss()
            while reason is not None:
                pause_s = restarts.lost()
                self.group.kill()
                self._say(Event(Kind.TROUBLE, draft_lost(reason, pause_s)))
                await asyncio.sleep(pause_s)
                reason = await self._restart()
            away_s = restarts.runs()
            self._say(Event(Kind.REPAIR, draft_back(away_s, self.group.pids)))

    async def _await_loss(self) -> str:
        """Wait until a rank has ended or the engine has given the group up; why."""
        given_up = self._engine.wait_ready(Role.DRAFT, self.group.pids, are_ready=False)
        await first_of(self.group.wait_any_ended(), given_up)
        return await self._explain("it does not answer any more")

    async def _restart(self) -> str | None:
        """None once the engine works with a new group, else what went wrong."""
        self.restarts += 1
        self.group = ActorGroup(self._placed)
        limit_s = self._dialling.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.group.describe()
                self.group.run(self._dialling.address, self._dialling.secret)
                joined = self._engine.wait_ready(Role.DRAFT, self.group.pids)
                await first_of(self.group.wait_any_ended(), joined)
        except TimeoutError:
            return f"it was not ready within cluster.start_timeout_s ({limit_s:g} s)"
        except RayError as error:
            return str(error)
        return await self._explain("the engine did not take it in") if self.group.ends else None

    async def _explain(self, otherwise: str) -> str:
        cause = root_cause(self.group.ends)
        if cause is None:
            return otherwise
        for event in quote(cause.name, await self.group.last_lines(cause.name)):
            self._say(event)
        return f"{cause.name}: {cause.reason}"
