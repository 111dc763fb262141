"""The processes of one replica in Ray: an engine with target and draft groups, or with the models
in it.

The loss of the engine or of a target rank ends the replica; a lost draft is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Say, quote, stage_reporter
from outrider.cluster.ray.actor_group import ActorGroup
from outrider.cluster.ray.actors import Endpoint, ProcessPlace
from outrider.cluster.ray.draft_check import check_draft
from outrider.cluster.ray.draft_supervisor import DraftSupervisor
from outrider.cluster.ray.engine_process import POLL_S, EngineProcess
from outrider.cluster.ray.placement import ENGINE, RolePlacement, needs_of, raise_if_lost, renew
from outrider.cluster.ray.postmortem import End, root_cause
from outrider.cluster.ray.spares import Spares
from outrider.cluster.tasks import all_of, first_of
from outrider.config import EngineConfig
from outrider.links.gateway_messages import EngineStatus, ProcessState
from outrider.links.rank_messages import Role
from outrider.progress_stages import stage
from ray.exceptions import RayError

_SETTLE_S = 1.0  # after a process has ended, to find the root cause
_STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process as the controller knows it."""

    role: str
    rank: int
    place: ProcessPlace
    restarts: int
    state: str  # starting, ready or lost


class ReplicaProcesses:
    """`start`, then `watch` until lost, and `end` in any case.

    May reuse the placement of a lost replica. Parts on lost nodes are placed again, which updates
    `placed`.
    """

    def __init__(
        self,
        config: EngineConfig,
        secret: str,
        placed: Mapping[str, RolePlacement],
        spares: Spares,
        say: Say,
    ) -> None:
        self.endpoint: Endpoint | None = None
        self._config = config
        self._secret = secret
        self._placed = placed
        self._spares = spares
        self._say = say
        placement = placed.get(ENGINE) or placed[Role.TARGET]
        self._engine = EngineProcess(config, secret, placement, spares)
        self._first_groups = {
            role: ActorGroup(each, spares) for role, each in placed.items() if role != ENGINE
        }
        self._draft: DraftSupervisor | None = None

    # -- starting -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns once the engine is ready. Raises `ClusterError` with the cause, after reporting
        the failed process's last log lines."""
        cluster = self._config.cluster
        limit_s = cluster.start_timeout_s
        await renew(self._placed, cluster.placement_timeout_s, can_grow=cluster.address is not None)
        try:
            async with asyncio.timeout(limit_s):
                await first_of(self._come_up(), raise_if_lost(self._placed.values()))
        except TimeoutError:
            raise ClusterError(
                f"not ready within cluster.start_timeout_s ({limit_s:g} s); raise it, or see why "
                "in the logs."
            ) from None
        except RayError as error:
            raise ClusterError(f"a process could not be started: {error}") from error

    async def _come_up(self) -> None:
        roles = [ENGINE, *self._first_groups]
        with stage_reporter(self._say), stage(f"starting the processes of {', '.join(roles)}"):
            await self._start_processes()
        await self._await_ready()

    async def _start_processes(self) -> None:
        found: list[Any] = await all_of(
            self._engine.describe(), *(group.describe() for group in self.groups)
        )
        self.endpoint = endpoint = found[0]
        self._engine.run()
        for group in self.groups:
            group.run(endpoint)
        if Role.DRAFT in self._placed:
            group = self._first_groups[Role.DRAFT]
            self._draft = DraftSupervisor(
                group,
                self._placed,
                self._engine,
                endpoint,
                self._config,
                self._spares,
                self._say,
            )

    async def _await_ready(self) -> None:
        while self._engine.status is None:
            for event in await self._engine.read(POLL_S):
                self._say(event)
            if self._engine.ended.done() or any(group.has_failed for group in self.groups):
                raise ClusterError(await self._explain("failed", self.groups))
            if self._engine.silence is not None:
                raise ClusterError(f"{ENGINE} failed: {self._engine.silence}")

    # -- running ------------------------------------------------------------------------------

    async def watch(self) -> str:
        """Wait until the engine or a target rank is lost, or the engine hangs; returns the
        reason."""
        self._engine.prepare_spare()
        for group in self.groups:
            group.prepare_spares()
        targets = [group for role, group in self._first_groups.items() if role == Role.TARGET]
        ends = [asyncio.wait({self._engine.ended}), *(each.wait_any_ended() for each in targets)]
        helpers = [self._engine.keep_status()]  # ends if the engine ends or hangs
        if self._draft is not None:
            helpers.append(self._draft.run())
        await first_of(*ends, *helpers)
        if self._engine.silence is not None and not self._engine.ended.done():
            return f"{ENGINE} was lost: {self._engine.silence}"
        return await self._explain("was lost", targets)

    async def _explain(self, what: str, groups: list[ActorGroup]) -> str:
        """The reason in words. A rank's own error takes precedence over the engine's lost link."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await asyncio.gather(
                    asyncio.wait({self._engine.ended}), *(g.wait_all_ended() for g in groups)
                )
        cause = root_cause(end for group in groups for end in group.ends)
        if cause is None and self._engine.ended.done():
            cause = self._engine.ended.result()
        if cause is None:
            return f"a process {what}: it ended for an unknown reason"
        for event in quote(cause.name, await self._last_lines(cause, groups)):
            self._say(event)
        return f"{cause.name} {what}: {cause.reason or 'it ended for an unknown reason'}"

    async def _last_lines(self, cause: End, groups: list[ActorGroup]) -> list[str]:
        if cause.name == ENGINE:
            return await self._engine.last_lines()
        group = next(group for group in groups if cause in group.ends)
        return await group.last_lines(cause.name)

    # -- changing the draft -------------------------------------------------------------------

    def can_change_draft(self, config: EngineConfig) -> bool:
        """Whether the settled `config` differs only in the draft; the number of replicas does not
        count."""
        own = self._config
        cluster = dataclasses.replace(
            config.cluster,
            draft_labels=own.cluster.draft_labels,
            replicas=own.cluster.replicas,
        )
        rest = dataclasses.replace(config, draft=own.draft, cluster=cluster)
        return self._draft is not None and config.draft.model is not None and rest == own

    async def change_draft(self, config: EngineConfig) -> None:
        """Replace the draft while engine and target go on without one. If it fails to start, the
        previous one returns and `OutriderError` has the cause."""
        if not self.can_change_draft(config) or self._draft is None:
            raise ClusterError("more than the draft would change; restart the replica.")
        await check_draft(config)
        [need] = [each for each in needs_of(config) if each.role == Role.DRAFT]
        await self._draft.change(need, config)
        self._config = config

    # -- ending -------------------------------------------------------------------------------

    async def end(self) -> None:
        """Stop the engine, then kill the rest: ranks hold no state."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._engine.stop()
        for group in self.groups:
            group.kill()
        self._engine.kill()

    # -- state --------------------------------------------------------------------------------

    @property
    def groups(self) -> list[ActorGroup]:
        """The current groups."""
        if self._draft is None:
            return list(self._first_groups.values())
        return [self._first_groups[Role.TARGET], self._draft.group]

    @property
    def pids(self) -> dict[str, list[int]]:
        """Pids of the processes that hold the models, by role."""
        if self.groups or self._engine.place is None:
            return {group.role: group.pids for group in self.groups}
        return {ENGINE: [self._engine.place.pid]}

    @property
    def status(self) -> EngineStatus | None:
        return self._engine.status

    @property
    def draft_restarts(self) -> int:
        return 0 if self._draft is None else self._draft.restarts

    def processes(self, restarts: int) -> list[ProcessStatus]:
        """Its processes; `restarts` of the replica count for each."""
        found = []
        if self._engine.place is not None:
            state = ProcessState.STARTING if self._engine.status is None else ProcessState.READY
            found.append(ProcessStatus(ENGINE, 0, self._engine.place, restarts, state))
        for group in self.groups:
            ready = self._engine.ready_pids(group.role)
            missing = ProcessState.LOST if group.ends else ProcessState.STARTING
            own = restarts + (self.draft_restarts if group.role == Role.DRAFT else 0)
            for rank, place in enumerate(group.places):
                state = ProcessState.READY if place.pid in ready else missing
                found.append(ProcessStatus(group.role, rank, place, own, state))
        return found
