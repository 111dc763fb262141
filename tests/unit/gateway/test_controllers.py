"""A gateway keeps the addresses a controller's name had while the name fails, and looks the name up
anew whenever a connection is lost."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.cluster.fleet_registry import FleetHandlers, FleetRegistry
from outrider.config import ServerConfig
from outrider.gateway.frontend import Frontend
from outrider.gateway.gateway import Gateway
from outrider.gateway.routing import controllers as controllers_module
from outrider.gateway.routing.controllers import Controllers
from outrider.links.address import TcpAddress, bound_address, listen
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState

SECRET = "a secret of the tests"
LIMIT_S = 60.0
GONE = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

pytestmark = pytest.mark.timeout(120)


class Dns:
    """What names stand for, as tests want it; an `OSError` is raised."""

    def __init__(self, **names: set[str] | OSError) -> None:
        self.names = names
        self.num_lookups = 0
        self.hanging: asyncio.Event | None = None  # lookups wait for it

    async def resolve(self, place: TcpAddress) -> set[str]:
        self.num_lookups += 1
        if self.hanging is not None:
            await self.hanging.wait()
        found = self.names[place.host]
        if isinstance(found, OSError):
            raise found
        return found


class Pod:
    """A controller with one replica that cannot be reached, and the address of its pod."""

    def __init__(self, name: str) -> None:
        async def view() -> None:
            return None

        def refuse(_: Any) -> None:
            raise AssertionError("no order is given here")

        self.registry = FleetRegistry({}, SECRET, FleetHandlers(view, refuse, refuse))
        self.registry.name = name
        self.registry.publish((ReplicaPlace("0", (), ReplicaState.STARTING),))
        self._listener = listen("tcp:127.0.0.1:0")
        self.address = bound_address(self._listener)
        self._task = asyncio.create_task(self.registry.run(self._listener))

    async def end(self) -> None:
        self._listener.close()
        self._task.cancel()
        await asyncio.wait({self._task})
        for member in self.registry.all_members:
            member.channel.close()


@asynccontextmanager
async def gateway_of(dns: Dns, *names: str) -> AsyncIterator[tuple[Gateway, Controllers]]:
    gateway = Gateway(SECRET, ServerConfig())
    front = SimpleNamespace(gateway=gateway, http_address="h:1", grpc_address="g:1")
    controllers = Controllers([f"{name}:1" for name in names], SECRET, dns.resolve)
    task = controllers.begin(cast(Frontend, front))
    try:
        yield gateway, controllers
    finally:
        task.cancel()
        await asyncio.wait({task})
        await gateway.replicas.stop()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body()

    asyncio.run(limited())


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers_module, "FIRST_PAUSE_S", 0.02)


def names_of(gateway: Gateway) -> list[str]:
    return [each.name for each in gateway.replicas]


def test_all_addresses_of_all_names_are_dialled() -> None:
    async def body() -> None:
        pods = [Pod(name) for name in "abc"]
        first, second, third = (pod.address for pod in pods)
        async with gateway_of(Dns(x={first, second}, y={third}), "x", "y") as (gateway, _):
            await until(lambda: names_of(gateway) == ["a/0", "b/0", "c/0"])
        for pod in pods:
            await pod.end()

    run(body)


def test_a_name_that_fails_keeps_its_last_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another name resolves: each has its own."""
    monkeypatch.setattr(controllers_module, "RESOLVE_S", 0.05)

    async def body() -> None:
        pod, other = Pod("a"), Pod("b")
        dns = Dns(x={pod.address}, y={other.address})
        async with gateway_of(dns, "x", "y") as (gateway, controllers):
            await until(lambda: len(names_of(gateway)) == 2)
            dns.names["x"] = GONE
            before = dns.num_lookups
            for member in pod.registry.all_members:  # the connection is lost as well
                member.channel.close()
            await until(lambda: not pod.registry.all_members)
            await until(lambda: dns.num_lookups > before + 6 and bool(pod.registry.all_members))
            assert set(controllers._addresses) == {pod.address, other.address}
            await until(lambda: names_of(gateway) == ["a/0", "b/0"])
        await pod.end()
        await other.end()

    run(body)


def test_a_lost_connection_has_the_name_looked_up_at_once() -> None:
    """The address changes with the pod, and the next regular lookup is seconds away."""

    async def body() -> None:
        pod, successor = Pod("a"), Pod("b")
        dns = Dns(x={pod.address})
        async with gateway_of(dns, "x") as (gateway, controllers):
            await until(lambda: names_of(gateway) == ["a/0"])
            dns.names["x"] = GONE
            await pod.end()
            before = dns.num_lookups
            await until(lambda: dns.num_lookups > before)
            assert set(controllers._addresses) == {pod.address}
            dns.names["x"] = {successor.address}
            await until(lambda: names_of(gateway) == ["b/0"])
            await until(lambda: set(controllers._addresses) == {successor.address})
        await successor.end()

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(controllers_module, "RESOLVE_S", LIMIT_S)  # no regular lookup helps
        patched.setattr(controllers_module, "LONGEST_PAUSE_S", 0.1)
        run(body)


def test_a_resolver_that_hangs_holds_up_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers_module, "RESOLVE_S", 0.05)

    async def body() -> None:
        pod = Pod("a")
        dns = Dns(x={pod.address})
        async with gateway_of(dns, "x") as (gateway, controllers):
            await until(lambda: names_of(gateway) == ["a/0"])
            await until(lambda: dns.num_lookups > 1)
            dns.hanging = asyncio.Event()
            before = dns.num_lookups
            await asyncio.sleep(0.5)
            assert dns.num_lookups <= before + 1  # one at a time, however long it takes
            assert set(controllers._addresses) == {pod.address}
            dns.hanging.set()
            await until(lambda: dns.num_lookups > before + 2)
        await pod.end()

    run(body)


def test_names_are_resolved_by_the_system_unless_tests_do() -> None:
    async def body() -> None:
        found = await controllers_module.resolve_name(TcpAddress("127.0.0.1", 7))
        assert found == {"tcp:127.0.0.1:7"}
        with pytest.raises(OSError):
            await controllers_module.resolve_name(TcpAddress(f"no-such-{os.getpid()}.invalid", 7))

    run(body)
