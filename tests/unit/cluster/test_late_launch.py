"""A launch on what is not there yet is like any other once it is, and nothing before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection

import pytest

from outrider.cluster.errors import ClusterError, DetachedError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.ray import late_launch
from outrider.cluster.ray.late_launch import REATTACH_S, LateLaunch
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState

PLACE = ReplicaPlace("0", ("unix:/e.sock",), ReplicaState.SERVING)
VIEW = ClusterView("somebody", "serving", 0, 0, ())
LIMIT_S = 60.0


class Noting:
    """A launch that notes what it is asked, and has a place once it is kept."""

    def __init__(self, session: str) -> None:
        self.on_change: list[Callable[[], None]] = []
        self.places: tuple[ReplicaPlace, ...] = ()
        self.asked: list[object] = [session]
        self.loss: Exception | None = None
        self._is_over = asyncio.Event()

    @property
    def config(self) -> EngineConfig | None:
        return None

    async def view(self) -> ClusterView | None:
        return VIEW

    async def run(self, say: Say) -> None:
        self.places = (PLACE,)
        for hear in self.on_change:
            hear()
        await self._is_over.wait()
        if self.loss is not None:
            raise self.loss

    def lose(self, loss: Exception) -> None:
        self.loss = loss
        self._is_over.set()

    async def scale(self, num_replicas: int) -> None:
        self.asked.append(num_replicas)

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        self.asked.append(is_draft_only)

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        self.asked.append(tuple(hosts))

    async def stop(self) -> None:
        self.asked.append("stop")
        self._is_over.set()

    def abort(self) -> None:
        self.asked.append("abort")


def _ignore(event: Event) -> None:
    assert event.kind is EventKind.STAGE


def test_it_is_nothing_until_what_it_needs_is_there_and_then_what_was_made() -> None:
    is_there = threading.Event()
    made: list[Noting] = []

    def wait(timeout_s: float) -> str:
        assert is_there.wait(LIMIT_S)
        return "a session"

    async def make(session: str) -> Noting:
        made.append(Noting(session))
        return made[0]

    async def run() -> None:
        changed = asyncio.Event()
        launch = LateLaunch(wait, make)
        launch.on_change.append(changed.set)
        keeping = asyncio.create_task(launch.run(_ignore))
        await asyncio.sleep(0.01)
        assert not launch.places and await launch.view() is None and not made
        for order in (launch.scale(2), launch.roll_out(EngineConfig(), is_draft_only=True)):
            with pytest.raises(ClusterError, match="starting; try again once it serves"):
                await order
        launch.abort()  # there is nothing to end
        is_there.set()
        await asyncio.wait_for(changed.wait(), LIMIT_S)
        assert launch.places == (PLACE,) and await launch.view() is VIEW
        await launch.scale(2)
        await launch.roll_out(EngineConfig(), is_draft_only=True)
        launch.abort()
        await launch.stop()
        await asyncio.wait_for(keeping, LIMIT_S)

    asyncio.run(run())
    assert made[0].asked == ["a session", 2, True, "abort", "stop"]


def test_who_is_stopped_before_has_made_nothing() -> None:
    is_there = threading.Event()

    async def make(session: bool) -> Noting:
        raise AssertionError("it was stopped")

    async def run() -> None:
        launch = LateLaunch(lambda _: is_there.wait(LIMIT_S), make)
        keeping = asyncio.create_task(launch.run(_ignore))
        await asyncio.sleep(0.01)
        await launch.stop()
        keeping.cancel()
        is_there.set()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    asyncio.run(run())


def test_what_never_comes_is_told() -> None:
    def wait(timeout_s: float) -> str:
        raise ConfigError("no Ray cluster can be used there.")

    async def make(session: str) -> Noting:
        raise AssertionError("there is no session")

    async def run() -> None:
        await LateLaunch(wait, make).run(_ignore)

    with pytest.raises(ConfigError, match="no Ray cluster can be used there"):
        asyncio.run(run())


def test_a_session_that_is_lost_is_opened_again_and_its_places_are_withdrawn_meanwhile() -> None:
    may_return = threading.Event()
    waits: list[float] = []
    made: list[Noting] = []
    said: list[str] = []

    def wait(timeout_s: float) -> str:
        waits.append(timeout_s)
        assert len(waits) == 1 or may_return.wait(LIMIT_S)
        return f"session {len(waits)}"

    async def make(session: str) -> Noting:
        made.append(Noting(session))
        return made[-1]

    async def run() -> None:
        changed = asyncio.Event()
        launch = LateLaunch(wait, make, first_wait_s=7.0)
        launch.on_change.append(changed.set)
        keeping = asyncio.create_task(launch.run(lambda event: said.append(event.text)))
        await asyncio.wait_for(changed.wait(), LIMIT_S)
        assert launch.places == (PLACE,)
        changed.clear()
        made[0].lose(DetachedError("the controller has not answered for 10 s (alive)"))
        while len(waits) < 2:
            await asyncio.sleep(0.005)
        assert not launch.places and await launch.view() is None
        assert not changed.is_set()  # gateways go on with what they know
        with pytest.raises(ClusterError, match="try again once it serves"):
            await launch.scale(2)
        may_return.set()
        await asyncio.wait_for(changed.wait(), LIMIT_S)
        assert launch.places == (PLACE,)
        await launch.stop()
        await asyncio.wait_for(keeping, LIMIT_S)

    asyncio.run(run())
    assert waits == [7.0, REATTACH_S]
    assert [each.asked[0] for each in made] == ["session 1", "session 2"]
    assert said == [
        "the controller has not answered for 10 s (alive); reattaching to Ray, requests wait"
    ]


def test_a_session_that_does_not_come_back_ends_the_server() -> None:
    def wait(timeout_s: float) -> str:
        if timeout_s:
            raise ConfigError("no Ray cluster can be used there.")
        return "a session"

    async def make(session: str) -> Noting:
        made = Noting(session)
        made.lose(DetachedError("Ray is lost"))
        return made

    async def run() -> None:
        await LateLaunch(wait, make).run(lambda event: None)

    with pytest.raises(ConfigError, match="no Ray cluster can be used there"):
        asyncio.run(run())


def test_a_session_that_was_lost_before_anything_ran_ends_the_server() -> None:
    async def make(session: str) -> Noting:
        raise DetachedError("Ray has not answered for 20 s")

    async def run() -> None:
        await LateLaunch(lambda _: "a session", make).run(_ignore)

    with pytest.raises(DetachedError, match="has not answered for 20 s"):
        asyncio.run(run())


def test_a_session_that_hangs_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_launch, "OPEN_S", 0.01)
    is_there = threading.Event()

    async def make(session: bool) -> Noting:
        raise AssertionError("there is no session")

    async def run() -> None:
        await LateLaunch(lambda _: is_there.wait(LIMIT_S), make).run(_ignore)

    with pytest.raises(ClusterError, match="Ray did not accept this server within 0.01 s"):
        asyncio.run(run())
    is_there.set()
