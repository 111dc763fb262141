"""All replicas of a server: kept apart from each other, more or fewer of them, replaced in turn."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection
from functools import partial

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.kept_replica import EndedError, KeptReplica, Phase, Room, Rooms
from outrider.cluster.rolling import roll
from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.links.cluster_view import ProcessView, ReplicaView
from outrider.links.fleet_messages import ReplicaPlace
from outrider.links.rank_messages import Role

LET_GO_S = 0.2  # for gateways to let go of a replica before it ends
QUICK_S = 2.0  # for room beside what runs; without it, what runs makes room


class ReplicaSet:
    """`run` keeps them until `stop`; `scale` and `roll_out`, one of them at a time, return when the
    change is made and raise if it was not. Those in `on_change` hear of every change of `places`.
    """

    def __init__(
        self, config: EngineConfig, rooms: Rooms, say: Say, *, is_first: bool = True
    ) -> None:
        """Unless it `is_first`, replicas like these have run before, and are tried for ever."""
        self.config = config  # of the next replica
        self.on_change: list[Callable[[], None]] = []
        self._rooms = rooms
        self._say = say
        self._is_first = is_first
        self._placing = asyncio.Lock()
        self._replicas: dict[str, KeptReplica] = {}
        self._num_ordered: int | None = None  # while a change of their number is under way
        self._past_restarts = [0, 0]  # of replicas that are gone, and of their drafts
        self._broken: asyncio.Future[None] | None = None
        self._begun = asyncio.Event()
        self._changing = asyncio.Lock()  # held while replicas are added, replaced or moved
        self._moves: dict[str, asyncio.Task[None]] = {}  # by replica
        self._is_over = False

    # -- what is known ------------------------------------------------------------------------

    @property
    def replicas(self) -> list[KeptReplica]:
        """The oldest number first."""
        return sorted(self._replicas.values(), key=lambda each: int(each.name))

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        return tuple(
            ReplicaPlace(each.name, () if each.life is None else each.life.addresses, each.state)
            for each in self.replicas
            if not each.is_leaving
        )

    @property
    def phase(self) -> Phase:
        """How the server fares: as well as any of them."""
        phases = {each.phase for each in self._replicas.values()}
        order = (Phase.SERVING, Phase.RESTARTING, Phase.STARTING, Phase.PLACING, Phase.DRAINING)
        return next((each for each in order if each in phases), Phase.ENDED)

    @property
    def restarts(self) -> int:
        return self._past_restarts[0] + sum(each.restarts for each in self.replicas)

    @property
    def draft_restarts(self) -> int:
        return self._past_restarts[1] + sum(each.draft_restarts for each in self.replicas)

    @property
    def num_configured(self) -> int:
        """Replicas there should be, whatever starts or drains at the moment."""
        return self._num_ordered or self.config.cluster.replicas

    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(each.view() for each in self.replicas)

    def processes(self) -> tuple[ProcessView, ...]:
        return tuple(
            dataclasses.replace(process, replica=each.name)
            for each in self.replicas
            for process in each.processes()
        )

    # -- life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled; raises if one of the first never comes to run."""
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

    async def _first_ready(self, replica: KeptReplica) -> None:
        with contextlib.suppress(EndedError):  # fewer were ordered meanwhile
            await replica.ready()

    def _add(
        self,
        config: EngineConfig,
        room: Room | None = None,
        name: str | None = None,
        *,
        may_fail: bool = True,
    ) -> KeptReplica:
        if self._is_over:
            raise ClusterError("the server is ending.")
        numbers = itertools.count(config.cluster.first_replica)
        name = name or next(n for n in map(str, numbers) if n not in self._replicas)
        added = KeptReplica(
            name, config, self._rooms, self._say_of(name), self._tell_change, may_fail=may_fail
        )
        added.others_serve = lambda: any(
            each.phase is Phase.SERVING for each in self._replicas.values() if each is not added
        )
        self._replicas[name] = added
        added.begin(self._placing, room).add_done_callback(self._note_end)
        self._tell_change()
        return added

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Whoever waits for its start hears of what was expected to go wrong."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, OutriderError) and self._broken and not self._broken.done():
            self._broken.set_exception(error)

    async def _remove(self, replica: KeptReplica) -> None:
        """Its place may be another's by then."""
        await self._end(replica)
        if self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
        self._tell_change()

    async def _end(self, replica: KeptReplica) -> None:
        await replica.end()
        self._past_restarts[0] += replica.restarts
        self._past_restarts[1] += replica.draft_restarts

    def _tell_change(self) -> None:
        for hear in self.on_change:
            hear()

    def _say_of(self, name: str) -> Say:
        def say(event: Event) -> None:
            is_known = event.kind is Kind.LOG or list(self._replicas) == [name]
            self._say(event if is_known else Event(event.kind, f"replica {name}: {event.text}"))

        return say

    def _tell(self, kind: Kind, text: str) -> None:
        self._say(Event(kind, text))

    # -- more or fewer ------------------------------------------------------------------------

    async def scale(self, num_replicas: int) -> None:
        """Those that cannot be added are given up; the others go on."""
        await self._begun.wait()
        self._num_ordered = num_replicas
        try:
            async with self._changing:
                await self._scale(num_replicas)
        finally:
            self._num_ordered = None

    async def _scale(self, num_replicas: int) -> None:
        surplus = self.replicas[num_replicas:]
        num_missing = num_replicas - len(self._replicas)
        added = [self._add(self.config) for _ in range(num_missing)]
        outcomes = await asyncio.gather(
            *(self._retire(each) for each in surplus), *(self._settle_in(each) for each in added)
        )
        self._keep_number()
        failures = [each for each in outcomes if each is not None]
        if failures:
            raise ClusterError(f"{_count(len(self._replicas))} serve: {failures[0]}")

    async def _settle_in(self, added: KeptReplica) -> str | None:
        """Why it does not come to run, if it does not."""
        try:
            await added.ready()
        except OutriderError as error:
            await self._remove(added)
            reason = f"replica {added.name} cannot be added: {error}"
            self._tell(Kind.TROUBLE, f"{reason.rstrip('.')}; the others go on")
            return reason
        self._tell(Kind.REPAIR, f"replica {added.name} serves")
        return None

    async def _retire(self, replica: KeptReplica) -> None:
        limit_s = self.config.server.drain_s
        has = f"has {limit_s:g} s to finish what it has in hand"
        self._tell(Kind.STAGE, f"replica {replica.name} {has}")
        await replica.drain(limit_s)
        replica.is_leaving = True
        self._tell_change()
        await asyncio.sleep(LET_GO_S)
        await self._remove(replica)
        self._tell(Kind.STAGE, f"replica {replica.name} has ended")

    def _keep_number(self) -> None:
        """For a successor of the process that keeps them."""
        cluster = dataclasses.replace(self.config.cluster, replicas=len(self._replicas))
        self.config = dataclasses.replace(self.config, cluster=cluster)

    # -- hosts that end -----------------------------------------------------------------------

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        """Returns when no replica is on such a host. One that finds room elsewhere by then, less
        the time to drain, serves there first; else it drains, and is placed when there is room."""
        await self._begun.wait()
        await self._rooms.avoid(hosts)
        there = [
            replica
            for replica in self.replicas
            # Without its draft a replica goes on, and gets another when that is lost.
            if any(p.node in hosts for p in replica.processes() if p.role != Role.DRAFT)
        ]
        for replica in there:  # hosts that end together may have parts of the same one
            if replica.name not in self._moves:
                task = asyncio.create_task(self._move(replica, limit_s))
                task.add_done_callback(partial(self._note_moved, replica.name))
                self._moves[replica.name] = task
        for move in [self._moves[each.name] for each in there if each.name in self._moves]:
            await asyncio.shield(move)

    def _note_moved(self, name: str, task: asyncio.Task[None]) -> None:
        del self._moves[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell(Kind.TROUBLE, f"replica {name} has not left its host: {error}")

    async def _move(self, old: KeptReplica, limit_s: float) -> None:
        drain_s = self.config.server.drain_s
        async with self._changing:
            if self._replicas.get(old.name) is not old:
                return
            self._tell(Kind.STAGE, f"replica {old.name} leaves a host that is about to end")
            is_moved = False
            try:
                async with asyncio.timeout(max(limit_s - drain_s, QUICK_S)):
                    is_moved = await self._start_beside(old)
            except TimeoutError:
                self._tell(Kind.TROUBLE, f"replica {old.name} was not moved in time and drains")
            if is_moved:
                await self._retire(old)
                return
            await old.drain(drain_s)
            await self._end(old)
            self._add(old.config, name=old.name, may_fail=False)

    async def _start_beside(self, old: KeptReplica) -> bool:
        """Whether another like it serves now."""
        room = await self._find_quickly(old.config)
        if room is None:
            return False
        new = self._begun_in(room, old.config)
        try:
            await self._started(new)
        except asyncio.CancelledError:
            await self._remove(new)
            raise
        except OutriderError as error:
            self._tell(Kind.TROUBLE, f"replica {old.name} cannot be moved and drains: {error}")
            return False
        return True

    # -- other settings -----------------------------------------------------------------------

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        """One after the other. If one fails, those replaced before are rolled back as well."""
        await self._begun.wait()
        async with self._changing:
            swaps = [_Swap(self, each, config, is_draft_only) for each in self.replicas]
            await roll(swaps, self._say)
            self.config = dataclasses.replace(config, cluster=self.config.cluster)

    async def _change_draft(self, replica: KeptReplica, config: EngineConfig) -> bool:
        """False if the replica must be replaced for it."""
        limit_s = config.cluster.restart_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                is_done = await replica.change_draft(config)
        except TimeoutError:
            raise ClusterError(f"the draft was not changed within {limit_s:g} s.") from None
        if is_done:
            self._tell(Kind.REPAIR, f"replica {replica.name} has another draft")
        return is_done

    async def _make_room(self, old: KeptReplica) -> None:
        """End it for a successor in its place."""
        # Nobody could take what a lone replica has in hand: it waits, as in a restart.
        others = any(each.phase is Phase.SERVING for each in self.replicas if each is not old)
        self._tell(Kind.STAGE, f"replica {old.name} makes room for its successor")
        await old.drain(self.config.server.drain_s if others else 0.0)
        await self._end(old)

    async def _put_back(self, name: str, config: EngineConfig) -> None:
        """In place of one that has ended; tried for ever, as it has run before."""
        limit_s = config.cluster.placement_timeout_s + config.cluster.start_timeout_s
        back = self._add(config, name=name, may_fail=False)
        try:
            async with asyncio.timeout(limit_s):
                await back.ready()
        except TimeoutError:
            raise ClusterError(f"it does not serve after {limit_s:g} s; trying on.") from None

    def _begun_in(self, room: Room, config: EngineConfig) -> KeptReplica:
        try:
            return self._add(config, room)
        except ClusterError:
            self._rooms.give_back(room)
            raise

    async def _started(self, new: KeptReplica) -> None:
        try:
            await new.ready()
        except OutriderError:
            await self._remove(new)
            raise
        self._tell(Kind.REPAIR, f"replica {new.name} serves with the new settings")

    async def _find_quickly(self, config: EngineConfig) -> Room | None:
        settled = await self._rooms.settle(config)
        with contextlib.suppress(PlacementError):
            async with self._placing:
                return await self._rooms.find(settled, QUICK_S)
        return None


class _Swap:
    """See `outrider.cluster.rolling.Swap`."""

    def __init__(
        self, owner: ReplicaSet, old: KeptReplica, config: EngineConfig, is_draft_only: bool
    ) -> None:
        self.name = old.name
        self._owner = owner
        self._old = old
        self._config = dataclasses.replace(config, cluster=old.config.cluster)
        self._old_config = old.config
        self._is_draft_only = is_draft_only
        self._is_in_place = False  # the draft alone was changed
        self._is_retired = False
        self._room: Room | None = None
        self._new: KeptReplica | None = None  # once it serves

    async def has_room(self) -> bool:
        if self._is_draft_only:
            self._is_in_place = await self._owner._change_draft(self._old, self._config)
        if not self._is_in_place:
            self._room = await self._owner._find_quickly(self._config)
        return self._is_in_place or self._room is not None

    async def start(self) -> None:
        if self._is_in_place:
            return
        if self._room is not None:
            new = self._owner._begun_in(self._room, self._config)
        else:
            new = self._owner._add(self._config, name=self.name)
        await self._owner._started(new)
        self._new = new

    async def retire(self) -> None:
        if self._is_in_place:
            return
        self._is_retired = True
        if self._room is not None:
            await self._owner._retire(self._old)
        else:
            await self._owner._make_room(self._old)

    async def undo(self) -> None:
        if self._is_in_place:
            await self._owner._change_draft(self._old, self._old_config)
        elif self._new is not None:
            back = _Swap(self._owner, self._new, self._old_config, is_draft_only=False)
            if await back.has_room():
                await back.start()
                await back.retire()
            else:
                await back.retire()
                await self._owner._put_back(back.name, self._old_config)
        elif self._is_retired:
            await self._owner._put_back(self.name, self._old_config)


def _count(number: int) -> str:
    return "1 replica" if number == 1 else f"{number} replicas"
