"""Ray nodes on this host, each a raylet of its own, and one replica there as its engine's gateways
see it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.cluster_utils import Cluster

from outrider.cluster.events import Event
from outrider.cluster.ray.placement import RolePlacement, needs_of, place, release, settle_devices
from outrider.cluster.ray.replica import ReplicaProcesses
from outrider.cluster.ray.spares import Spares
from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.links.channel import Channel
from outrider.links.codec import GATEWAY_CODEC
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import EngineFacts, Submit, SubmittedSample, Updates
from outrider.links.handshake import dial_in
from outrider.links.rank_messages import Hello, Role
from outrider.scheduler.types import RequestSpec

T = TypeVar("T")
SECRET = "a secret of the tests"
_STORE_BYTES = 80 * 2**20
# The fastest that does not take a raylet of a busy host for dead.
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """A cluster whose head has no CPUs for ranks: `add` nodes by a name, and `lose` them."""

    def __init__(self) -> None:
        os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self._folder = tempfile.mkdtemp(prefix="t-")  # short: it is part of socket names
        self._own_folder = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._folder
        self._nodes: dict[str, Any] = {}
        self._cluster: Any = Cluster()
        try:
            self._start()
        except BaseException:  # Ray gives a node half a minute, which a busy host may need itself
            self.close()
            raise

    def _start(self) -> None:
        self._cluster.add_node(
            num_cpus=0,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            _system_config=_HEALTH,
        )
        ray.init(
            address=self.address,
            namespace="outrider",
            log_to_driver=False,
            configure_logging=False,
        )

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, num_cpus: int, **labels: str) -> None:
        self._nodes[name] = self._cluster.add_node(
            num_cpus=num_cpus, labels=labels, object_store_memory=_STORE_BYTES
        )

    def lose(self, name: str) -> None:
        """As if its power were cut."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    @contextlib.contextmanager
    def some(self, **num_cpus: int) -> Iterator[None]:
        """These, and whatever is added meanwhile, as long as this is open."""
        before = set(self._nodes)
        try:
            for name, count in num_cpus.items():
                self.add(name, count)
            yield
        finally:
            for name in self._nodes.keys() - before:
                self.lose(name)

    def name_of(self, node_id: str) -> str:
        return next((name for name, node in self._nodes.items() if node.node_id == node_id), "?")

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        if self._own_folder is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._own_folder
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class Kept:
    """A replica, started anew whenever it is lost."""

    config: EngineConfig
    placed: Mapping[str, RolePlacement]
    spares: Spares = field(default_factory=lambda: Spares(enabled=False))
    events: list[Event] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why it was lost
    replica: ReplicaProcesses | None = None
    num_lives: int = 0

    async def keep(self) -> None:
        while True:
            replica = ReplicaProcesses(self.config, SECRET, self.placed, self.spares, self._note)
            try:
                await replica.start()
                self.num_lives, self.replica = self.num_lives + 1, replica
                self._note_loss(await replica.watch())
            except OutriderError as error:
                if not self.num_lives:
                    raise
                self._note_loss(str(error))
            finally:
                self.replica = None
                await replica.end()
            await asyncio.sleep(0.5)

    def _note(self, event: Event) -> None:
        print(f"{time.monotonic():.1f} {event.text}")  # shown if the test fails
        self.events.append(event)

    def _note_loss(self, reason: str) -> None:
        print(f"{time.monotonic():.1f} replica lost: {reason}")
        self.reasons.append(reason)

    async def ready(self) -> ReplicaProcesses:
        while self.replica is None:
            await asyncio.sleep(0.05)
        return self.replica

    @property
    def lines(self) -> str:
        return "\n".join(event.text for event in self.events)

    def nodes_of(self, role: str, nodes: Nodes) -> list[str]:
        return [nodes.name_of(node_id) for node_id in self.placed[role].node_ids]


class Loop:
    """An event loop in a thread of its own, for what lives longer than a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 400.0) -> T:
        async def bounded() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work
            except TimeoutError:
                for task in asyncio.all_tasks():
                    task.print_stack(limit=4, file=sys.stdout)
                raise

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def kept_replica(loop: Loop, config: EngineConfig) -> Iterator[Kept]:
    async def begin() -> tuple[Kept, asyncio.Task[None]]:
        settled = settle_devices(config, has_gpus=False)
        kept = Kept(settled, await place(needs_of(settled), 20.0, can_grow=True))
        keeping = asyncio.create_task(kept.keep())
        ready = asyncio.create_task(kept.ready())
        await asyncio.wait({ready, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            ready.cancel()
            release(kept.placed)
            keeping.result()
        return kept, keeping

    async def end(keeping: asyncio.Task[None]) -> None:
        keeping.cancel()
        await asyncio.wait({keeping})

    kept, keeping = loop.run(begin())
    try:
        yield kept
    finally:
        loop.run(end(keeping))
        release(kept.placed)


class Reader:
    """A gateway's part: holds a request, and asks the next engine for what is missing of it."""

    def __init__(self, kept: Kept, spec: RequestSpec, num_samples: int) -> None:
        self.outputs: list[list[int]] = [[] for _ in range(num_samples)]
        self.facts: EngineFacts | None = None
        self._kept = kept
        self._spec = spec
        self._unfinished = set(range(num_samples))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    async def run(self) -> list[list[int]]:
        while self._unfinished:
            replica = await self._kept.ready()
            assert replica.endpoint is not None
            with contextlib.suppress(LinkError, OSError, TimeoutError):
                await asyncio.to_thread(self._read, replica.endpoint.tcp or replica.endpoint.unix)
            await asyncio.sleep(0.2)
        return self.outputs

    def _read(self, address: str) -> None:
        hello = Hello(Role.GATEWAY, 0, 1, os.getpid(), socket.gethostname())
        sock = dial_in(address, SECRET, hello, 5.0)
        with Channel(sock, GATEWAY_CODEC, peer="the engine", silence_s=5.0) as channel:
            facts = channel.receive(10.0)
            assert isinstance(facts, EngineFacts)
            self.facts = facts
            samples = tuple(
                SubmittedSample(index, index, tuple(self.outputs[index]))
                for index in sorted(self._unfinished)
            )
            channel.send(Submit(self._spec, samples, None, is_resumed=True))
            while self._unfinished:
                self._take(channel.receive(20.0))

    def _take(self, message: object) -> None:
        assert isinstance(message, Updates), message
        for update in message.updates:
            self.outputs[update.sample_id.handle] += update.token_ids
            if update.finish_reason is not None:
                self._unfinished.discard(update.sample_id.handle)
