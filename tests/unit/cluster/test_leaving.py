"""A host that is about to end waits until the controller has no replica on it, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest

from outrider.cli import main
from outrider.cluster.deploy import leaving
from outrider.cluster.deploy.leaving import leave, own_addresses
from outrider.cluster.errors import ClusterError
from outrider.cluster.fleet_registry import FleetHandlers, FleetRegistry
from outrider.links.address import bound_address, listen

SECRET = "a secret of the tests"
LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(120)

Test = Callable[["Controller"], Awaitable[None]]


class Controller:
    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.limit_s = 0.0
        self.error = ""
        self.is_empty = asyncio.Event()  # no replica is on the host any more
        self.asked = asyncio.Event()
        self.registry = FleetRegistry(
            {}, SECRET, FleetHandlers(self._view, _refuse, _refuse, self._leave)
        )
        self._listener = listen("tcp:127.0.0.1:0")
        self.address = bound_address(self._listener)
        self._task = asyncio.create_task(self.registry.run(self._listener))

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self._listener.close()

    async def _view(self) -> None:
        return None

    async def _leave(self, hosts: Collection[str], limit_s: float) -> None:
        self.hosts, self.limit_s = set(hosts), limit_s
        self.asked.set()
        await self.is_empty.wait()
        if self.error:
            raise ClusterError(self.error)


def _refuse(_: Any) -> None:
    raise AssertionError("no order is given here")


def run(test: Test) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            controller = Controller()
            try:
                await test(controller)
            finally:
                await controller.end()

    asyncio.run(limited())


def test_it_waits_for_the_last_replica_and_no_longer() -> None:
    async def test(controller: Controller) -> None:
        task = asyncio.create_task(leave(controller.address, SECRET, 50.0, 50.0))
        await controller.asked.wait()
        assert controller.limit_s == 50.0
        assert controller.hosts == {*own_addresses(), "127.0.0.1"}  # as it was reached from
        assert not controller.registry.all_members  # it is no gateway, and shares no limits
        assert not task.done()
        controller.is_empty.set()
        assert await task == "no replica is left on this host"

    run(test)


def test_a_controller_that_ends_has_drained_what_was_here() -> None:
    async def test(controller: Controller) -> None:
        task = asyncio.create_task(leave(controller.address, SECRET, 50.0, 50.0))
        await controller.asked.wait()
        await controller.end()
        assert await task == "the controller has ended"

    run(test)


def test_what_failed_is_told() -> None:
    async def test(controller: Controller) -> None:
        controller.error = "the server is ending."
        controller.is_empty.set()
        told = await leave(controller.address, SECRET, 50.0, 50.0)
        assert told == "the controller answered: the server is ending."

    run(test)


def test_nothing_takes_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "DIAL_S", 0.1)

    async def test(controller: Controller) -> None:
        told = await leave(controller.address, SECRET, 0.5, 50.0)
        assert told == "the controller has not answered for 0.5 s"
        with listen("tcp:127.0.0.1:0") as closed:
            nobody = bound_address(closed)
        assert "no controller was reached" in await leave(nobody, SECRET, 50.0, 0.2)
        assert "no controller was reached" in await leave("tcp:no.invalid:1", SECRET, 50.0, 0.2)
        assert "no controller was reached" in await leave(controller.address, "other", 50.0, 0.2)

    run(test)


def test_the_command_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FQ_RAY_IP", raising=False)
    monkeypatch.delenv("OUTRIDER_SECRET", raising=False)
    for given, words in (([], "FQ_RAY_IP"), (["--controller", "h:1"], "OUTRIDER_SECRET")):
        with pytest.raises(SystemExit):
            main(["leave", *given])
        assert words in capsys.readouterr().err
