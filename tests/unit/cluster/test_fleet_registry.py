"""What gateways hear where they dial in, and what their orders are answered with."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster import fleet_registry
from outrider.cluster.errors import ClusterError
from outrider.cluster.fleet_registry import FleetHandlers, FleetRegistry
from outrider.compat_fields import without_added_fields
from outrider.links import pending_connections
from outrider.links.address import TcpAddress, bound_address, listen, parse
from outrider.links.aio import AsyncChannel, open_channel
from outrider.links.cluster_view import ClusterView, ReplicaView
from outrider.links.codec import FLEET_CODEC
from outrider.links.fleet_messages import (
    REVISION,
    AbortAll,
    AbortResult,
    Drain,
    DrainAll,
    NumProcesses,
    OperationResult,
    ReplicaPlace,
    ReplicaState,
    ReplicaTable,
    RollOut,
    ScaleTo,
    ViewCluster,
    ViewClusterResult,
    Welcome,
)
from outrider.links.frames import LinkError
from outrider.links.rank_messages import Hello, Role

SECRET = "a secret of the tests"
TIMEOUT_S = 60.0
SETTINGS = {"server.port": 1}
FIRST = (
    ReplicaPlace("0", ("unix:/e.sock", "tcp:0.0.0.0:7001"), ReplicaState.SERVING),
    ReplicaPlace("1", (), ReplicaState.STARTING),
)

VIEW = ClusterView("c", "serving", 0, 0, (), (ReplicaView("0", "serving", 0, 0, 1.0, 2.0),))
VIEW = dataclasses.replace(VIEW, num_configured=2)


class Listening:
    """A registry, and where it listens."""

    def __init__(self, registry: FleetRegistry, unix: str, tcp: str) -> None:
        self.registry = registry
        self.unix = unix
        self.tcp = tcp
        self.orders: list[Any] = []

    @asynccontextmanager
    async def dialled(
        self, index: int | None, revision: int = REVISION
    ) -> AsyncIterator[AsyncChannel]:
        """As that gateway of the registry's own, or as a guest."""
        rank, size = (revision, 0) if index is None else (index, index + 1)
        hello = Hello(Role.GATEWAY, rank, size, os.getpid(), socket.gethostname())
        address = self.tcp if index is None else self.unix
        channel = await open_channel(address, SECRET, hello, FLEET_CODEC, TIMEOUT_S)
        try:
            yield channel
        finally:
            channel.close()


def _test(tmp_path: Path, test: Callable[[Listening], Coroutine[Any, Any, None]]) -> None:
    async def view() -> ClusterView | None:
        return VIEW

    async def run() -> None:
        def scale(num_replicas: int) -> None:
            if num_replicas > 4:
                raise ClusterError("there is no room.")
            listening.orders.append(num_replicas)

        def roll_out(settings: Mapping[str, Any]) -> None:
            listening.orders.append(settings)

        registry = FleetRegistry(SETTINGS, SECRET, FleetHandlers(view, scale, roll_out))
        with listen(f"unix:{tmp_path}/d.sock") as unix, listen("tcp:127.0.0.1:0") as tcp:
            listening = Listening(registry, bound_address(unix), bound_address(tcp))
            registry.publish(FIRST)
            running = [asyncio.create_task(registry.run(each)) for each in (unix, tcp)]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await test(listening)
            finally:
                for task in running:
                    task.cancel()

    asyncio.run(run())


async def _next(channel: AsyncChannel, kind: type[Any]) -> Any:
    while True:
        found = await channel.receive()
        if isinstance(found, kind):
            return found


def test_a_gateway_kept_here_is_told_its_settings_and_where_the_replicas_are(
    tmp_path: Path,
) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(0) as kept:
            welcome = await kept.receive()
            assert isinstance(welcome, Welcome)
            assert welcome.settings == SETTINGS and welcome.num_processes == 1
            assert welcome.controller == listening.registry.name
            assert await kept.receive() == ReplicaTable(FIRST)
            gone = (ReplicaPlace("1", ("unix:/f.sock",), ReplicaState.SERVING),)
            listening.registry.publish(gone)
            assert await _next(kept, ReplicaTable) == ReplicaTable(gone)

    _test(tmp_path, test)


def test_a_guest_keeps_its_settings_and_hears_addresses_that_it_can_reach(tmp_path: Path) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(None) as guest:
            welcome = await guest.receive()
            assert isinstance(welcome, Welcome) and welcome.settings == {}
            found = await _next(guest, ReplicaTable)
            assert [each.addresses for each in found.places] == [("tcp:127.0.0.1:7001",), ()]
            assert listening.registry.members == {} and len(listening.registry.remote_members) == 1

    _test(tmp_path, test)


def test_guests_and_kept_gateways_share_the_limits_as_they_come_and_go(tmp_path: Path) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(0) as kept:
            assert await _next(kept, NumProcesses) == NumProcesses(1)
            async with listening.dialled(None), listening.dialled(None):
                while (await _next(kept, NumProcesses)).count != 3:
                    pass
            while (await _next(kept, NumProcesses)).count != 1:
                pass
        await listening.registry.wait_until(lambda: not listening.registry.all_members)

    _test(tmp_path, test)


def test_orders_are_answered_and_a_refusal_says_why(tmp_path: Path) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(None) as guest:
            guest.send(ScaleTo(7, 3))
            assert await _next(guest, OperationResult) == OperationResult(7)
            guest.send(ScaleTo(8, 5))
            assert await _next(guest, OperationResult) == OperationResult(8, "there is no room.")
            guest.send(RollOut(9, {"draft.model": "e"}))
            assert await _next(guest, OperationResult) == OperationResult(9)
            assert listening.orders == [3, {"draft.model": "e"}]

    _test(tmp_path, test)


def test_the_end_of_a_server_drains_its_own_gateways_only_an_operator_all(tmp_path: Path) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(0) as kept, listening.dialled(None) as guest:
            await _next(guest, ReplicaTable)
            listening.registry.drain()
            await _next(kept, Drain)
            listening.registry.publish(())
            while not isinstance(heard := await guest.receive(), ReplicaTable):
                assert not isinstance(heard, Drain)
            guest.send(DrainAll())
            await _next(guest, Drain)

    _test(tmp_path, test)


@pytest.mark.parametrize(
    ("revision", "expected"),
    [(REVISION, VIEW), (0, without_added_fields(VIEW))],
    ids=["new", "old"],
)
def test_a_guest_is_told_no_more_than_its_release_knows(
    revision: int, expected: ClusterView, tmp_path: Path
) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(None, revision) as guest:
            guest.send(ViewCluster(7))
            while not isinstance(found := await guest.receive(), ViewClusterResult):
                pass
            assert found == ViewClusterResult(7, expected)

    _test(tmp_path, test)


def test_a_request_is_sought_at_guests_too(tmp_path: Path) -> None:
    async def test(listening: Listening) -> None:
        async with listening.dialled(0) as kept, listening.dialled(None) as guest:
            kept.send(AbortAll(5, "r"))
            for channel in (kept, guest):
                while not hasattr(asked := await channel.receive(), "request_id"):
                    pass
                channel.send(AbortResult(asked.query, 1))
            assert await _next(kept, AbortResult) == AbortResult(5, 2)

    _test(tmp_path, test)


def test_whoever_does_not_know_the_secret_hears_nothing(tmp_path: Path) -> None:
    async def test(listening: Listening) -> None:
        hello = Hello(Role.GATEWAY, 0, 0, 1, "elsewhere")
        with pytest.raises(LinkError):
            await open_channel(listening.tcp, "another secret", hello, FLEET_CODEC, 2.0)
        assert listening.registry.all_members == []

    _test(tmp_path, test)


def test_strangers_leave_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(listening: Listening) -> None:
        hello = Hello(Role.GATEWAY, 0, 0, 1, "elsewhere")
        for _ in range(10):
            with pytest.raises(LinkError):
                await open_channel(listening.tcp, "another secret", hello, FLEET_CODEC, TIMEOUT_S)

    _test(tmp_path, test)
    (record,) = caplog.records
    assert "with another secret" in record.getMessage()


def test_strangers_who_keep_still_do_not_keep_guests_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_connections, "MAX_PENDING", 4)
    monkeypatch.setattr(fleet_registry, "GREETING_TIMEOUT_S", TIMEOUT_S)

    async def test(listening: Listening) -> None:
        place = parse(listening.tcp)
        assert isinstance(place, TcpAddress)
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(socket.create_connection((place.host, place.port)))
            async with asyncio.timeout(TIMEOUT_S / 4), listening.dialled(None) as guest:
                assert isinstance(await guest.receive(), Welcome)

    _test(tmp_path, test)


def test_a_door_that_fails_once_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(listening: Listening) -> None:
        loop = asyncio.get_running_loop()
        failures = [OSError(24, "Too many open files")]
        accept = loop.sock_accept

        async def sock_accept(listener: socket.socket) -> tuple[socket.socket, Any]:
            if failures and listener.family == socket.AF_INET:
                raise failures.pop()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        async with listening.dialled(None) as guest:
            assert isinstance(await guest.receive(), Welcome)
        assert failures == []

    _test(tmp_path, test)


def test_whoever_comes_over_a_network_is_told_no_keys_whatever_it_says_it_is(
    tmp_path: Path,
) -> None:
    async def test(listening: Listening) -> None:
        hello = Hello(Role.GATEWAY, 0, 1, os.getpid(), socket.gethostname())
        async with listening.dialled(0) as kept:
            assert isinstance(await kept.receive(), Welcome)
            own = listening.registry.members[0]
            channel = await open_channel(listening.tcp, SECRET, hello, FLEET_CODEC, TIMEOUT_S)
            welcome = await channel.receive()
            assert isinstance(welcome, Welcome) and welcome.settings == {}
            assert listening.registry.members == {0: own}
            channel.close()

    _test(tmp_path, test)


def test_two_desks_of_one_host_have_different_names() -> None:
    def registry() -> FleetRegistry:
        return FleetRegistry({}, SECRET, FleetHandlers(_nothing, list[int]().append, _ignore))

    assert registry().name != registry().name
    assert registry().name.startswith(f"{socket.gethostname()}-{os.getpid()}-")


async def _nothing() -> ClusterView | None:
    return None


def _ignore(settings: Mapping[str, Any]) -> None:
    """Nobody orders anything."""
