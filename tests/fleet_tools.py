"""Gateway processes before a fake engine, kept as a server keeps them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from fake_engine import SECRET, FakeEngine, fake_facts
from waits import wait_until

from outrider.cluster.events import Event
from outrider.cluster.fleet import Fleet
from outrider.cluster.fleet_registry import FleetHandlers
from outrider.config import EngineConfig, ServerConfig
from outrider.gateway.ports import ReservedPorts
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from outrider.proto import control_pb2_grpc, generation_pb2, generation_pb2_grpc

T = TypeVar("T")

START_S = 300.0
ENDLESS = 1_000_000


@dataclass(slots=True)
class RunningFleet:
    """In a thread of its own."""

    fleet: Fleet
    engine: FakeEngine
    config: ServerConfig
    events: list[Event]
    orders: list[Any]  # the numbers of replicas and the settings that operators have wanted
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = START_S) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    @property
    def grpc_address(self) -> str:
        return f"{self.config.host}:{self.config.grpc_port}"

    def pid(self, index: int) -> int:
        return self.fleet.view()[index].pid

    def wait_said(self, words: str, timeout_s: float = START_S) -> None:
        wait_until(lambda: any(words in each.text for each in self.events), timeout_s)


@contextmanager
def running_fleet(folder: Path, size: int, **server: Any) -> Iterator[RunningFleet]:
    facts = dataclasses.replace(fake_facts(), max_model_len=2 * ENDLESS)
    engine = FakeEngine(f"unix:{folder}/engine.sock", facts=facts, step_s=0.02).start()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fleet", daemon=True)
    thread.start()
    events: list[Event] = []
    orders: list[Any] = []

    async def view() -> ClusterView | None:
        return None

    with ReservedPorts(ServerConfig(port=0, grpc_port=0, processes=size, **server)) as ports:
        config = EngineConfig(server=ports.config, log_level="error")
        settings = {p: v for p, v in config.to_settings().items() if p.startswith("server.")}
        settings["log_level"] = "error"

        async def begin() -> tuple[Fleet, asyncio.Task[None]]:
            answers = FleetHandlers(view, orders.append, orders.append)
            fleet = Fleet(size, settings, SECRET, answers, events.append)
            fleet.registry.publish((ReplicaPlace("0", (engine.address,), ReplicaState.SERVING),))
            return fleet, asyncio.create_task(fleet.run())

        async def end() -> None:
            await fleet.stop(0.0)
            keeping.cancel()
            await asyncio.wait({keeping})

        fleet, keeping = asyncio.run_coroutine_threadsafe(begin(), loop).result(START_S)
        running = RunningFleet(fleet, engine, ports.config, events, orders, loop)
        try:
            running.call(fleet.wait_serving())
            yield running
        finally:
            running.call(end())
            fleet.close()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
            loop.close()
            engine.stop()


class Connection:
    """A connection of its own to whichever process takes it, read in a thread."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.generation = generation_pb2_grpc.GenerationStub(self._channel)
        self.control = control_pb2_grpc.ControlStub(self._channel)
        self.arrivals: list[float] = []
        self.error: grpc.RpcError | None = None
        self._thread: threading.Thread | None = None

    def stream(self, request_id: str = "", max_tokens: int = ENDLESS) -> None:
        """Until it ends, well or not; waits for its first token."""
        request = generation_pb2.GenerateRequest(request_id=request_id)
        request.token_ids.ids.extend((5, 6, 7))
        request.sampling.max_tokens = max_tokens
        request.sampling.ignore_eos = True
        call = self.generation.Generate(request, timeout=START_S)

        def read() -> None:
            try:
                for response in call:
                    if response.token_ids:
                        self.arrivals.append(time.monotonic())
            except grpc.RpcError as error:
                self.error = error

        self._thread = threading.Thread(target=read, daemon=True)
        self._thread.start()
        wait_until(lambda: bool(self.arrivals) or self.is_over)

    @property
    def is_over(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def close(self) -> None:
        self._channel.close()
        if self._thread is not None:
            self._thread.join(60)
