"""A server that fails in its own process: its engine is ended all the same."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from fake_engine import MODEL, SECRET, FakeEngine, fake_facts

from outrider.cluster.deadline import Deadline
from outrider.cluster.events import Event, Say
from outrider.cluster.serve_callbacks import Addresses, OnReady, ServeCallbacks, kv_sentence
from outrider.cluster.serving import ServerSockets, Serving
from outrider.config import EngineConfig
from outrider.gateway.ports import ReservedPorts
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from outrider.links.speculation import SpeculationStatus

CONFIG = EngineConfig.from_kwargs(model=MODEL, draft_model=MODEL, port=0, grpc_port=0)


class RunningEngine:
    """A launch of an engine that is there already."""

    def __init__(self, address: str) -> None:
        self.on_change: list[Callable[[], None]] = []
        self.places: tuple[ReplicaPlace, ...] = ()
        self.stopped = asyncio.Event()
        self.left: list[set[str]] = []
        self._address = address

    @property
    def config(self) -> EngineConfig | None:
        return None

    async def view(self) -> ClusterView | None:
        return None

    async def run(self, say: Say) -> None:
        self.places = (ReplicaPlace("0", (self._address,), ReplicaState.SERVING),)
        for hear in self.on_change:
            hear()
        await self.stopped.wait()

    async def scale(self, num_replicas: int) -> None:
        raise AssertionError("nobody wants more")

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        raise AssertionError("nobody wants others")

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        self.left.append(set(hosts))

    async def stop(self) -> None:
        self.stopped.set()

    def abort(self) -> None:
        raise AssertionError("it ends in time")


def _fail(*_: object) -> None:
    raise RuntimeError("it cannot be told")


def _say_nothing(event: Event) -> None:
    pass


def _show_nothing(
    addresses: Addresses, speculation: SpeculationStatus | None, settled: EngineConfig
) -> None:
    pass


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("say", "on_ready"), [(_fail, _show_nothing), (_say_nothing, _fail), (_fail, _fail)]
)
def test_a_failure_in_the_loop_of_the_gateway_ends_the_engine_and_is_raised(
    tmp_path: Path, say: Say, on_ready: OnReady
) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/e.sock").start()

    async def run() -> RunningEngine:
        launch = RunningEngine(engine.address)
        with ReservedPorts(CONFIG.server) as ports, Deadline() as deadline:
            config = dataclasses.replace(CONFIG, server=ports.config)
            with pytest.raises(RuntimeError, match="it cannot be told"):
                doors = ServerSockets(ports, SECRET)
                await Serving(
                    config, launch, ServeCallbacks(say, on_ready), deadline, doors, "warning"
                ).run()
        return launch

    try:
        launch = asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        engine.stop()
    assert launch.stopped.is_set()


def test_how_gateways_log_is_no_setting_of_the_engine(tmp_path: Path) -> None:
    """Else a draft that is rolled out would not be all that changes."""
    engine = FakeEngine(f"unix:{tmp_path}/e.sock").start()

    async def settings() -> EngineConfig:
        with ReservedPorts(CONFIG.server) as ports, Deadline() as deadline:
            config = dataclasses.replace(CONFIG, server=ports.config, log_level="info")
            launch, callbacks = (
                RunningEngine(engine.address),
                ServeCallbacks(_say_nothing, _show_nothing),
            )
            serving = Serving(
                config, launch, callbacks, deadline, ServerSockets(ports, SECRET), "warning"
            )
            return serving._operations.config

    try:
        assert asyncio.run(settings()).log_level == "info"
    finally:
        engine.stop()


def test_readiness_is_what_was_heard_lately_and_found_and_links_outlive_a_silent_launch(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/e.sock").start()

    async def run() -> None:
        launch = RunningEngine(engine.address)
        with ReservedPorts(CONFIG.server) as ports, Deadline() as deadline:
            server = dataclasses.replace(ports.config, processes=0)
            config = dataclasses.replace(CONFIG, server=server)
            callbacks = ServeCallbacks(_say_nothing, _show_nothing)
            serving = Serving(
                config, launch, callbacks, deadline, ServerSockets(ports, SECRET), "error"
            )
            running = asyncio.create_task(serving.run())

            async def until(state: str) -> None:
                while serving._state() != state:
                    assert not running.done()
                    await asyncio.sleep(0.01)

            await until("serving")
            places, launch.places = launch.places, ()
            assert serving._state() == "engine away"
            for hear in launch.on_change:
                hear()
            await asyncio.sleep(0.05)
            assert serving._replicas.is_any_usable  # who can reach it may go on
            launch.places = places
            await until("serving")
            engine.stop()
            await until("engine away")  # whatever the launch was told last
            serving._signalled.set()
            await running

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        engine.stop()


def test_a_node_that_ends_with_the_server_waits_for_its_drain(tmp_path: Path) -> None:
    """All pods of a RayCluster may be told to end at once."""

    async def run() -> None:
        with ReservedPorts(CONFIG.server) as ports, Deadline() as deadline:
            config = dataclasses.replace(CONFIG, server=ports.config)
            launch, callbacks = (
                RunningEngine("unix:/e"),
                ServeCallbacks(_say_nothing, _show_nothing),
            )
            serving = Serving(
                config, launch, callbacks, deadline, ServerSockets(ports, SECRET), "warning"
            )
            await serving._leave({"10.0.0.1"}, 60.0)
            assert launch.left == [{"10.0.0.1"}]
            serving._signalled.set()
            with pytest.raises(TimeoutError):  # until the end of the process
                await asyncio.wait_for(serving._leave({"10.0.0.2"}, 60.0), 0.05)
            assert len(launch.left) == 1

    asyncio.run(run())


STUCK = """
import threading
from outrider.cluster.deadline import Deadline
with Deadline(0.1) as deadline:
    deadline.begin(lambda: print("aborted", flush=True))
    threading.Event().wait()
"""


def test_a_server_that_does_not_end_in_time_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"aborted\n")


def test_a_server_whose_abort_hangs_is_ended_all_the_same() -> None:
    hangs = STUCK.replace("lambda: print(", "lambda: threading.Event().wait() or print(")
    quick = "from outrider.cluster import deadline as d; d._ABORT_S = 0.1" + hangs
    done = subprocess.run([sys.executable, "-c", quick], stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")


def test_room_for_text_is_told_of_target_and_draft_apart() -> None:
    facts = dataclasses.replace(fake_facts(), num_blocks=64, num_draft_blocks=48)
    assert kv_sentence(facts, 16) == ("KV: 64 blocks, room for 1024 tokens; the draft's for 768")
    alone = dataclasses.replace(facts, num_draft_blocks=0)
    assert kv_sentence(alone, 16) == "KV: 64 blocks, room for 1024 tokens"
