"""Gateways that have settings of their own, and learn of replicas from controllers elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_engine import SECRET, FakeEngine, fake_tokenizer_source, places_of
from metrics_tools import get
from waits import wait_until

from outrider.api_types.errors import UnavailableError
from outrider.cli import main
from outrider.client import AsyncClient, Client
from outrider.cluster.fleet_registry import FleetHandlers, FleetRegistry
from outrider.config import ServerConfig
from outrider.errors import RequestError
from outrider.gateway.frontend import Frontend
from outrider.gateway.gateway import GatewayState
from outrider.gateway.routing import controllers as controllers_module
from outrider.gateway.routing.controllers import Controllers, united
from outrider.links.address import bound_address, listen
from outrider.links.aio import AsyncChannel, accept_channel
from outrider.links.cluster_view import ClusterView, ProcessView, ReplicaView
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import (
    Abort,
    AbortAll,
    AbortResult,
    Drain,
    DrainAll,
    GatewayListening,
    GatewayLoad,
    NumProcesses,
    OperationResult,
    ReplicaPlace,
    ReplicaState,
    ReplicaTable,
    RollOut,
    ScaleTo,
    SpeculationChanged,
    StopGateway,
    ViewCluster,
    ViewClusterResult,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello
from outrider.links.speculation import SpeculationChange


@dataclass(slots=True, eq=False)
class Controller:
    """The other end of the links: says what controllers say, and keeps what it is told."""

    name: str
    places: list[ReplicaPlace]
    num_processes: int = 1
    error: str = ""  # of orders
    address: str = "tcp:127.0.0.1:0"
    channels: list[AsyncChannel] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    _listener: socket.socket | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> Controller:
        self._listener = listen(self.address)
        self._listener.setblocking(False)
        self.address = bound_address(self._listener)
        self._tasks.append(asyncio.create_task(self._accept()))
        return self

    @property
    def place(self) -> str:
        return self.address.removeprefix("tcp:")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self.channels:
            channel.close()
        self.channels.clear()
        if self._listener is not None:
            self._listener.close()

    def say(self, message: object) -> None:
        for channel in self.channels:
            channel.send(message)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            self._tasks.append(asyncio.create_task(self._serve(sock)))

    async def _serve(self, sock: socket.socket) -> None:
        hello, channel = await accept_channel(sock, SECRET, FLEET_CODEC, 5.0, peer="a guest")
        self.hellos.append(hello)
        self.channels.append(channel)
        channel.send(Welcome(self.name, {}, self.num_processes, True, SpeculationChange()))
        channel.send(ReplicaTable(tuple(self.places)))
        with contextlib.suppress(LinkError):
            while True:
                self._take(channel, await channel.receive())

    def _take(self, channel: AsyncChannel, message: Any) -> None:
        if not isinstance(message, GatewayLoad):
            self.told.append(message)
        match message:
            case ScaleTo(query=query) | RollOut(query=query):
                channel.send(OperationResult(query, self.error))
            case AbortAll(query=query, request_id=request_id):
                channel.send(Abort(100, request_id))
                channel.send(AbortResult(query, 7))
            case DrainAll():
                channel.send(Drain())
            case ViewCluster(query=query):
                replica = ReplicaView("0", "serving", 3, 4)
                process = ProcessView("engine", 0, 11, "host", (), 3, "ready", "0")
                view = ClusterView(self.name, "serving", 3, 4, (process,), (replica,))
                channel.send(ViewClusterResult(query, view))


@dataclass(frozen=True, slots=True)
class Guest:
    front: Frontend
    controllers: Controllers
    client: AsyncClient

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.front.gateway.replicas]


@asynccontextmanager
async def guest_of(*found: Controller) -> AsyncIterator[Guest]:
    places = tuple(each.place for each in found)
    # A name that nobody knows is no reason to do without the others.
    config = ServerConfig(port=0, grpc_port=0, controllers=("nobody.invalid:1", *places))
    controllers = Controllers(config.controllers, SECRET)
    front = Frontend(
        SECRET, config, controllers.view, broadcast=controllers, resubmit_timeout_s=10.0
    )
    await front.start()
    task = controllers.begin(front)
    try:
        async with AsyncClient(front.grpc_address) as client:
            guest = Guest(front, controllers, client)
            await guest.wait(lambda: front.gateway.state is GatewayState.SERVING)
            yield guest
    finally:
        task.cancel()
        await asyncio.wait({task})
        await front.stop(drain_s=0.0)
        for each in found:
            await each.stop()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[FakeEngine]]:
    made = [FakeEngine(f"unix:{tmp_path}/engine{i}.sock", step_s=0.005).start() for i in range(2)]
    with mock.patch("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source):
        yield made
    for each in made:
        each.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers_module, "RESOLVE_S", 0.1)
    monkeypatch.setattr(controllers_module, "FIRST_PAUSE_S", 0.05)


def asynchronously(body: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(run())


def test_replicas_of_several_controllers_are_united(engines: list[FakeEngine]) -> None:
    async def body() -> None:
        first, second = (
            Controller(name, places_of([engine]), num_processes=number).start()
            for name, engine, number in zip("ab", engines, (2, 5), strict=True)
        )
        async with guest_of(first, second) as guest:
            await guest.wait(lambda: len(guest.front.gateway.replicas.connected) == 2)
            assert guest.names == ["a/0", "b/0"]
            assert [(hello.size, hello.role) for hello in first.hellos] == [(0, "gateway")]
            for number in range(12):
                await guest.client.generate([number] * 40, max_tokens=2)
            assert all(engine.submitted for engine in engines)
            assert guest.front.gateway.num_processes == 5
            first.say(NumProcesses(9))
            await guest.wait(lambda: guest.front.gateway.num_processes == 9)
            status = await guest.client.status()
            assert [(r.name, r.restarts, r.draft_restarts) for r in status.replicas] == [
                ("a/0", 3, 4),
                ("b/0", 3, 4),
            ]
            assert status.cluster is not None and status.cluster.restarts == 6
            wanted = GatewayListening(guest.front.http_address, guest.front.grpc_address)
            assert first.told[0] == second.told[0] == wanted

    asynchronously(body)


def test_a_guest_serves_on_without_its_controller_and_finds_it_again(
    engines: list[FakeEngine],
) -> None:
    async def body() -> None:
        controller = Controller("a", places_of(engines[:1])).start()
        async with guest_of(controller) as guest:
            stream = guest.client.stream([1, 2, 3], max_tokens=100)
            await anext(stream)
            controller.say(StopGateway(0.0))
            await controller.stop()
            await guest.wait(lambda: not guest.controllers._links)
            with pytest.raises(UnavailableError, match="no controller is connected"):
                await guest.controllers.scale(2)
            assert len((await stream.result()).samples[0].token_ids) == 100
            assert stream.completion.resubmissions == 0
            assert (await guest.client.generate([1], max_tokens=2)).usage.completion_tokens == 2
            again = Controller("b", places_of(engines), address=controller.address).start()
            try:
                await guest.wait(lambda: guest.names == ["b/0", "b/1"])
                await guest.wait(lambda: guest.front.gateway.state is GatewayState.SERVING)
            finally:
                await again.stop()

    asynchronously(body)


def test_orders_go_through_one_controller_and_its_refusal_is_told(
    engines: list[FakeEngine],
) -> None:
    async def body() -> None:
        found = [Controller(name, places_of(engines)).start() for name in "ab"]
        async with guest_of(*found) as guest:
            await guest.wait(lambda: len(guest.controllers._links) == 2)
            await guest.controllers.scale(3)
            await guest.controllers.roll_out({"draft.model": "x"})
            orders = [m for each in found for m in each.told if isinstance(m, ScaleTo | RollOut)]
            assert [type(each) for each in orders] == [ScaleTo, RollOut]
            for each in found:
                each.error = "there is no room for 3."
            with pytest.raises(RequestError, match=r"^there is no room for 3\.$"):
                await guest.controllers.scale(3)
            assert await guest.controllers.abort("x") == 7
            await guest.client.set_speculation(max_depth=2)
            wanted = SpeculationChanged(SpeculationChange(None, True, 2))
            await guest.wait(lambda: all(wanted in each.told for each in found))
            await guest.controllers.drain()
            assert guest.front.gateway.state is GatewayState.DRAINING
            await guest.wait(lambda: any(DrainAll() in each.told for each in found))
            assert sum(each.told.count(DrainAll()) for each in found) == 1

    asynchronously(body)


def _free_address() -> str:
    with listen("tcp:127.0.0.1:0") as listener:
        return bound_address(listener)


def test_a_guest_and_a_controller_understand_each_other(engines: list[FakeEngine]) -> None:
    """The registry is that of a server."""
    engine = FakeEngine(_free_address(), step_s=0.005).start()
    wanted: list[Any] = []

    async def view() -> ClusterView:
        return ClusterView("c", "serving", 0, 0, (), (ReplicaView("0", "serving", 1, 2),))

    def refuse(settings: Any) -> None:
        raise RequestError("nothing is rolled out here.")

    async def body() -> None:
        registry = FleetRegistry({}, SECRET, FleetHandlers(view, wanted.append, refuse))
        controller = Controller("unused", [])
        with listen("tcp:127.0.0.1:0") as listener:
            controller.address = bound_address(listener)
            running = asyncio.create_task(registry.run(listener))
            # One address is of the engine's host only.
            place = ReplicaPlace("0", ("unix:/nowhere/x", engine.address), ReplicaState.SERVING)
            registry.publish((place,))
            async with guest_of(controller) as guest:
                assert guest.names == [f"{registry.name}/0"]
                done = await guest.client.generate([1, 2], max_tokens=4)
                assert done.usage.completion_tokens == 4
                await guest.client.scale(3)
                assert wanted == [3]
                with pytest.raises(RequestError, match="nothing is rolled out here"):
                    await guest.controllers.roll_out({})
                (found,) = (await guest.client.status()).replicas
                assert (found.restarts, found.draft_restarts) == (1, 2)
                registry.drain()  # as a server that stops does, which is no reason for guests
                registry.publish((dataclasses.replace(place, state=ReplicaState.DRAINING),))
                await guest.wait(lambda: guest.front.gateway.state is GatewayState.ENGINE_AWAY)
            running.cancel()

    try:
        asynchronously(body)
    finally:
        engine.stop()


def test_accounts_of_several_controllers_are_one() -> None:
    gateway = ProcessView("gateway", 0, 5, "host", (), 0, "ready")
    engine = ProcessView("engine", 0, 6, "host", (), 1, "ready", "a/0")
    first = ClusterView("a", "serving", 1, 2, (gateway, engine), (ReplicaView("a/0", "s", 1, 2),))
    second = ClusterView("b", "starting", 3, 4, (gateway,), (ReplicaView("b/0", "s", 3, 4),))
    both = united([first, second])
    assert (both.restarts, both.draft_restarts, both.state) == (4, 6, "serving, starting")
    assert both.processes == (gateway, engine)
    assert [each.name for each in both.replicas] == ["a/0", "b/0"]
    assert united([first]) == first


# -- as a process -----------------------------------------------------------------------------


@contextmanager
def outrider_gateway(*arguments: str, secret: str = SECRET) -> Iterator[Any]:
    """`outrider gateway` on free ports; yields the process and what its first line says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "gateway", *arguments]
        + ["--port", "0", "--grpc-port", "0", "--admin-port", "0"],
        env=os.environ | {"OUTRIDER_SECRET": secret},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.thorough
def test_the_command_serves_answers_probes_and_drains_on_sigterm(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock", step_s=0.02)
    with outrider_gateway("--engine", engine.address) as (process, line):
        pattern = r"listening on (\S+) \(HTTP\) and (\S+); for probes on (\S+)"
        found = re.fullmatch(pattern, line.strip())
        assert found is not None, line
        _, grpc_address, admin = found.groups()
        try:
            assert get(admin, "/livez")[0] == 200
            assert get(admin, "/readyz")[0] == 503
            engine.start()
            with Client(grpc_address) as client:
                client.wait_ready(20)
                assert get(admin, "/readyz")[0] == 200
                assert b'outrider:engine_up{replica="engine"} 1.0' in get(admin, "/metrics")[1]
                stream = client.stream([1, 2, 3], max_tokens=60, ignore_eos=True)
                next(stream)
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: get(admin, "/readyz")[0] == 503)
                assert len(stream.result().samples[0].token_ids) == 60
            assert process.wait(60) == 0
        finally:
            engine.stop()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "server.controllers is empty and no engine is given"),
        (["--engine", "nowhere"], "the address 'nowhere' cannot be read"),
        (["--controllers", "a:1", "--set", "server.processes=2"], "server.processes is 2"),
        (["--controllers", "nowhere"], "the address 'tcp:nowhere' cannot be read"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", SECRET)
    with pytest.raises(SystemExit):
        main(["gateway", *arguments])
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}") and said.count("\n") == 1
