"""Replicas without processes: a backend that counts, handles that start and are lost on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.replica_set import ReplicaSet
from outrider.config import EngineConfig
from outrider.links.cluster_view import ProcessView

TIMEOUT_S = 60.0


class FakeReplica:
    """Serves from its start on, until `lose`."""

    def __init__(self, backend: FakeBackend, config: EngineConfig, number: int, say: Say) -> None:
        self.config = config
        self.say = say
        self.number = number
        self.load: int | None = 0
        self.draft_restarts = 0
        self.is_over = False
        self.drafts: list[str | None] = []  # that it was given while it ran
        self._backend = backend
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def host(self) -> str:
        return f"host-{self.number}"

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"unix:/{self.number}",)

    @property
    def pids(self) -> Mapping[str, Sequence[int]]:
        return {"engine": [self.number]}

    def processes(self, restarts: int) -> list[ProcessView]:
        return [
            ProcessView("engine", 0, self.number, self.host, (), restarts, "ready"),
            ProcessView("draft", 0, self.number, f"draft-{self.host}", (), restarts, "ready"),
        ]

    async def start(self) -> None:
        self.say(Event(EventKind.STAGE, f"life {self.number} starts"))
        await self._backend.may_start.wait()
        reason = self._backend.refuse(self.config)
        if reason:
            raise ClusterError(reason)

    async def probe(self, timeout_s: float) -> None:
        reason = self._backend.mute.get(self.config.draft.model or "")
        if reason:
            raise ClusterError(reason)

    async def watch(self) -> str:
        return await self._lost

    async def end(self) -> None:
        await asyncio.sleep(0)
        self.is_over = True

    def lose(self, reason: str = "it was killed") -> None:
        self._lost.set_result(reason)

    def can_change_draft(self, config: EngineConfig) -> bool:
        return self._backend.can_change_drafts

    async def change_draft(self, config: EngineConfig) -> None:
        reason = self._backend.refuse(config)
        if reason:
            raise ClusterError(reason)
        self.drafts.append(config.draft.model)


@dataclass
class FakeBackend:
    """Room for so many replicas at once."""

    num_free: int = 8
    can_change_drafts: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # why no start with such a draft is one
    mute: dict[str, str] = field(default_factory=dict)  # why such a one answers no probe
    avoided: set[str] = field(default_factory=set)
    handles: list[FakeReplica] = field(default_factory=list)
    most_at_once: int = 0
    may_start: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_start.set()

    def refuse(self, config: EngineConfig) -> str:
        return self.refused.get(config.draft.model or "", "")

    async def settle(self, config: EngineConfig) -> EngineConfig:
        return config

    async def allocate(self, config: EngineConfig, timeout_s: float) -> str:
        await asyncio.sleep(0)
        if not self.num_free:
            raise PlacementError("target: 1 rank needs 1 CPU, but the cluster has none free.")
        self.num_free -= 1
        return "a room"

    def release(self, room: str) -> None:
        self.num_free += 1

    async def avoid(self, hosts: Collection[str]) -> None:
        self.avoided |= set(hosts)

    def create(self, config: EngineConfig, room: str, say: Say) -> FakeReplica:
        handle = FakeReplica(self, config, len(self.handles), say)
        self.handles.append(handle)
        self.most_at_once = max(self.most_at_once, len(self.running))
        return handle

    @property
    def running(self) -> list[FakeReplica]:
        return [each for each in self.handles if not each.is_over]


@dataclass
class RunningSet:
    replicas: ReplicaSet
    backend: FakeBackend
    events: list[Event]
    states: list[dict[str, str]]  # as published, one after the other
    running: asyncio.Task[None]

    @property
    def said(self) -> list[str]:
        return [each.text for each in self.events]

    @property
    def state(self) -> dict[str, str]:
        return self.states[-1]

    async def until(self, state: dict[str, str]) -> None:
        while self.state != state:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running_set(
    config: EngineConfig, backend: FakeBackend, *, is_first: bool = True
) -> AsyncIterator[RunningSet]:
    events: list[Event] = []
    replicas = ReplicaSet(config, backend, events.append, is_first=is_first)
    states: list[dict[str, str]] = [{}]
    replicas.on_change.append(
        lambda: states.append({each.name: each.state.value for each in replicas.places})
    )
    running = asyncio.create_task(replicas.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield RunningSet(replicas, backend, events, states, running)
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=TIMEOUT_S)
    assert not backend.running
