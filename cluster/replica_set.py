"""All replicas of a server: supervised independently, scaled, and replaced by rolling updates."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection
from functools import partial

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.rolling import roll
from outrider.cluster.supervised_replica import (
    Allocation,
    EndedError,
    ReplicaBackend,
    ReplicaPhase,
    SupervisedReplica,
)
from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.links.cluster_view import ProcessView, ReplicaView
from outrider.links.fleet_messages import ReplicaPlace
from outrider.links.rank_messages import Role

RELEASE_S = 0.2  # for gateways to close their links to a replica before it ends
QUICK_S = 2.0  # to find resources for a successor beside its predecessor


class ReplicaSet:
    """`run` supervises the replicas until cancelled. `scale` and `roll_out`, one at a time, return
    when the change is done and raise on failure. Calls `on_change` when `places` change.
    """

    def __init__(
        self, config: EngineConfig, backend: ReplicaBackend, say: Say, *, is_first: bool = True
    ) -> None:
        """Unless it `is_first`, such replicas have run before, and failed starts are retried."""
        self.config = config  # of the next replica
        self.on_change: list[Callable[[], None]] = []
        self._backend = backend
        self._say = say
        self._is_first = is_first
        self._placing = asyncio.Lock()
        self._replicas: dict[str, SupervisedReplica] = {}
        self._scale_target: int | None = None  # while `scale` runs
        self._past_restarts = [0, 0]  # of ended replicas, and of their drafts
        self._broken: asyncio.Future[None] | None = None
        self._begun = asyncio.Event()
        self._changing = asyncio.Lock()  # held while replicas are added, replaced or moved
        self._moves: dict[str, asyncio.Task[None]] = {}  # by replica
        self._is_over = False

    # -- state --------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[SupervisedReplica]:
        """By ascending number."""
        return sorted(self._replicas.values(), key=lambda each: int(each.name))

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        return tuple(
            ReplicaPlace(
                each.name, () if each.handle is None else each.handle.addresses, each.state
            )
            for each in self.replicas
            if not each.is_withdrawn
        )

    @property
    def phase(self) -> ReplicaPhase:
        """The phase of the most advanced replica."""
        phases = {each.phase for each in self._replicas.values()}
        order = (
            ReplicaPhase.SERVING,
            ReplicaPhase.RESTARTING,
            ReplicaPhase.STARTING,
            ReplicaPhase.PLACING,
            ReplicaPhase.DRAINING,
        )
        return next((each for each in order if each in phases), ReplicaPhase.ENDED)

    @property
    def restarts(self) -> int:
        return self._past_restarts[0] + sum(each.restarts for each in self.replicas)

    @property
    def draft_restarts(self) -> int:
        return self._past_restarts[1] + sum(each.draft_restarts for each in self.replicas)

    @property
    def num_configured(self) -> int:
        """The desired number of replicas, whatever starts or drains now."""
        return self._scale_target or self.config.cluster.replicas

    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(each.view() for each in self.replicas)

    def processes(self) -> tuple[ProcessView, ...]:
        return tuple(
            dataclasses.replace(process, replica=each.name)
            for each in self.replicas
            for process in each.processes()
        )

    # -- lifecycle ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. Raises if one of the first replicas fails to start."""
        self._broken = asyncio.get_running_loop().create_future()
        try:
            first = [
                self._add(self.config, may_fail=self._is_first)
                for _ in range(self.config.cluster.replicas)
            ]
            self._begun.set()
            ready = asyncio.gather(*(self._first_ready(each) for each in first))
            await asyncio.wait((ready, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await ready
            await self._broken
        finally:
            self._is_over = True
            await asyncio.gather(*(each.end() for each in self.replicas))
            if not self._broken.done():
                self._broken.cancel()

    async def _first_ready(self, replica: SupervisedReplica) -> None:
        with contextlib.suppress(EndedError):  # removed by `scale` meanwhile
            await replica.ready()

    def _add(
        self,
        config: EngineConfig,
        allocation: Allocation | None = None,
        name: str | None = None,
        *,
        may_fail: bool = True,
    ) -> SupervisedReplica:
        if self._is_over:
            raise ClusterError("the server is ending.")
        numbers = itertools.count(config.cluster.first_replica)
        name = name or next(n for n in map(str, numbers) if n not in self._replicas)
        added = SupervisedReplica(
            name, config, self._backend, self._say_of(name), self._notify_change, may_fail=may_fail
        )
        added.others_serve = lambda: any(
            each.phase is ReplicaPhase.SERVING
            for each in self._replicas.values()
            if each is not added
        )
        self._replicas[name] = added
        added.begin(self._placing, allocation).add_done_callback(self._note_end)
        self._notify_change()
        return added

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Fail on unexpected errors; expected ones are raised by `ready`."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, OutriderError) and self._broken and not self._broken.done():
            self._broken.set_exception(error)

    async def _remove(self, replica: SupervisedReplica) -> None:
        """End a replica and drop it, unless a successor has its name by then."""
        await self._end(replica)
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
        self._notify_change()

    async def _end(self, replica: SupervisedReplica) -> None:
        await replica.end()
        self._past_restarts[0] += replica.restarts
        self._past_restarts[1] += replica.draft_restarts

    def _notify_change(self) -> None:
        for callback in self.on_change:
            callback()

    def _say_of(self, name: str) -> Say:
        def say(event: Event) -> None:
            is_known = event.kind is EventKind.LOG or list(self._replicas) == [name]
            self._say(event if is_known else Event(event.kind, f"replica {name}: {event.text}"))

        return say

    def _report(self, kind: EventKind, text: str) -> None:
        self._say(Event(kind, text))

    # -- scaling ------------------------------------------------------------------------------

    async def scale(self, num_replicas: int) -> None:
        """Replicas that fail to start are dropped; the others go on."""
        await self._begun.wait()
        self._scale_target = num_replicas
        try:
            async with self._changing:
                await self._scale(num_replicas)
        finally:
            self._scale_target = None

    async def _scale(self, num_replicas: int) -> None:
        surplus = self.replicas[num_replicas:]
        num_missing = num_replicas - len(self._replicas)
        added = [self._add(self.config) for _ in range(num_missing)]
        outcomes = await asyncio.gather(
            *(self._retire(each) for each in surplus), *(self._settle_in(each) for each in added)
        )
        self._record_number()
        failures = [each for each in outcomes if each is not None]
        if failures:
            raise ClusterError(f"{_count(len(self._replicas))} serve: {failures[0]}")

    async def _settle_in(self, added: SupervisedReplica) -> str | None:
        """Wait for an added replica; returns the cause of a failure, or None."""
        try:
            await added.ready()
        except OutriderError as error:
            await self._remove(added)
            reason = f"replica {added.name} cannot be added: {error}"
            self._report(EventKind.TROUBLE, f"{reason.rstrip('.')}; the others go on")
            return reason
        self._report(EventKind.REPAIR, f"replica {added.name} serves")
        return None

    async def _retire(self, replica: SupervisedReplica) -> None:
        limit_s = self.config.server.drain_s
        has = f"has {limit_s:g} s to finish its requests"
        self._report(EventKind.STAGE, f"replica {replica.name} {has}")
        await replica.drain(limit_s)
        replica.is_withdrawn = True
        self._notify_change()
        await asyncio.sleep(RELEASE_S)
        await self._remove(replica)
        self._report(EventKind.STAGE, f"replica {replica.name} has ended")

    def _record_number(self) -> None:
        """Record the number of replicas for a restarted controller."""
        cluster = dataclasses.replace(self.config.cluster, replicas=len(self._replicas))
        self.config = dataclasses.replace(self.config, cluster=cluster)

    # -- leaving hosts ------------------------------------------------------------------------

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        """Returns when no replica is on such a host. A replica moves if it finds resources
        elsewhere in time to drain; else it drains and restarts once there are resources."""
        await self._begun.wait()
        await self._backend.avoid(hosts)
        there = [
            replica
            for replica in self.replicas
            # A replica survives the loss of its draft, which is restarted elsewhere.
            if any(p.node in hosts for p in replica.processes() if p.role != Role.DRAFT)
        ]
        for replica in there:  # hosts that leave together may share a replica
            if replica.name not in self._moves:
                task = asyncio.create_task(self._move(replica, limit_s))
                task.add_done_callback(partial(self._note_moved, replica.name))
                self._moves[replica.name] = task
        for move in [self._moves[each.name] for each in there if each.name in self._moves]:
            await asyncio.shield(move)

    def _note_moved(self, name: str, task: asyncio.Task[None]) -> None:
        del self._moves[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(EventKind.TROUBLE, f"replica {name} has not left its host: {error}")

    async def _move(self, old: SupervisedReplica, limit_s: float) -> None:
        drain_s = self.config.server.drain_s
        async with self._changing:
            if self._replicas.get(old.name) is not old:
                return
            self._report(EventKind.STAGE, f"replica {old.name} leaves a host that is about to end")
            is_moved = False
            try:
                async with asyncio.timeout(max(limit_s - drain_s, QUICK_S)):
                    is_moved = await self._start_beside(old)
            except TimeoutError:
                self._report(
                    EventKind.TROUBLE, f"replica {old.name} was not moved in time and drains"
                )
            if is_moved:
                await self._retire(old)
                return
            await old.drain(drain_s)
            await self._end(old)
            self._add(old.config, name=old.name, may_fail=False)

    async def _start_beside(self, old: SupervisedReplica) -> bool:
        """Start a successor elsewhere; whether it serves now."""
        allocation = await self._allocate_quickly(old.config)
        if allocation is None:
            return False
        new = self._add_in(allocation, old.config)
        try:
            await self._started(new)
        except asyncio.CancelledError:
            await self._remove(new)
            raise
        except OutriderError as error:
            self._report(
                EventKind.TROUBLE, f"replica {old.name} cannot be moved and drains: {error}"
            )
            return False
        return True

    # -- rollout ------------------------------------------------------------------------------

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        """Replace replicas one by one. On a failure all are rolled back."""
        await self._begun.wait()
        async with self._changing:
            swaps = [_Swap(self, each, config, is_draft_only) for each in self.replicas]
            await roll(swaps, self._say)
            self.config = dataclasses.replace(config, cluster=self.config.cluster)

    async def _change_draft(self, replica: SupervisedReplica, config: EngineConfig) -> bool:
        """Change the draft in place; False if the replica must be replaced instead."""
        limit_s = config.cluster.restart_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                is_done = await replica.change_draft(config)
        except TimeoutError:
            raise ClusterError(f"the draft was not changed within {limit_s:g} s.") from None
        if is_done:
            self._report(EventKind.REPAIR, f"replica {replica.name} has the new draft")
        return is_done

    async def _retire_in_place(self, old: SupervisedReplica) -> None:
        """End a replica before its successor starts."""
        # No other replica could take over a single replica's requests: they wait, as in a restart.
        others = any(
            each.phase is ReplicaPhase.SERVING for each in self.replicas if each is not old
        )
        self._report(EventKind.STAGE, f"replica {old.name} ends before its successor starts")
        await old.drain(self.config.server.drain_s if others else 0.0)
        await self._end(old)

    async def _put_back(self, name: str, config: EngineConfig) -> None:
        """Restore an ended replica; retried for ever, as it has run before."""
        limit_s = config.cluster.placement_timeout_s + config.cluster.start_timeout_s
        back = self._add(config, name=name, may_fail=False)
        try:
            async with asyncio.timeout(limit_s):
                await back.ready()
        except TimeoutError:
            raise ClusterError(f"it does not serve after {limit_s:g} s; still retrying.") from None

    def _add_in(self, allocation: Allocation, config: EngineConfig) -> SupervisedReplica:
        try:
            return self._add(config, allocation)
        except ClusterError:
            self._backend.release(allocation)
            raise

    async def _started(self, new: SupervisedReplica) -> None:
        try:
            await new.ready()
        except OutriderError:
            await self._remove(new)
            raise
        self._report(EventKind.REPAIR, f"replica {new.name} serves with the new settings")

    async def _allocate_quickly(self, config: EngineConfig) -> Allocation | None:
        settled = await self._backend.settle(config)
        with contextlib.suppress(PlacementError):
            async with self._placing:
                return await self._backend.allocate(settled, QUICK_S)
        return None


class _Swap:
    """See `outrider.cluster.rolling.Swap`."""

    def __init__(
        self, owner: ReplicaSet, old: SupervisedReplica, config: EngineConfig, is_draft_only: bool
    ) -> None:
        self.name = old.name
        self._owner = owner
        self._old = old
        self._config = dataclasses.replace(config, cluster=old.config.cluster)
        self._old_config = old.config
        self._is_draft_only = is_draft_only
        self._is_in_place = False  # only the draft was changed
        self._is_retired = False
        self._allocation: Allocation | None = None
        self._new: SupervisedReplica | None = None  # once it serves

    async def can_surge(self) -> bool:
        if self._is_draft_only:
            self._is_in_place = await self._owner._change_draft(self._old, self._config)
        if not self._is_in_place:
            self._allocation = await self._owner._allocate_quickly(self._config)
        return self._is_in_place or self._allocation is not None

    async def start(self) -> None:
        if self._is_in_place:
            return
        if self._allocation is not None:
            new = self._owner._add_in(self._allocation, self._config)
        else:
            new = self._owner._add(self._config, name=self.name)
        await self._owner._started(new)
        self._new = new

    async def retire(self) -> None:
        if self._is_in_place:
            return
        self._is_retired = True
        if self._allocation is not None:
            await self._owner._retire(self._old)
        else:
            await self._owner._retire_in_place(self._old)

    async def undo(self) -> None:
        if self._is_in_place:
            await self._owner._change_draft(self._old, self._old_config)
        elif self._new is not None:
            back = _Swap(self._owner, self._new, self._old_config, is_draft_only=False)
            if await back.can_surge():
                await back.start()
                await back.retire()
            else:
                await back.retire()
                await self._owner._put_back(back.name, self._old_config)
        elif self._is_retired:
            await self._owner._put_back(self.name, self._old_config)


def _count(number: int) -> str:
    return "1 replica" if number == 1 else f"{number} replicas"
