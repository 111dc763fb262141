"""A controller that is directed by one driver after the other, and a driver whose controller is
silent, restarted or another's; no Ray is started."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from replica_tools import FakeBackend

from outrider.cluster import replica_set, supervised_replica
from outrider.cluster.errors import DetachedError
from outrider.cluster.events import Bookmark, Event
from outrider.cluster.ray import attach, controller
from outrider.cluster.ray import launch as ray_launch
from outrider.cluster.ray.attach import ControllerAttachment
from outrider.cluster.ray.controller import Controller
from outrider.cluster.ray.launch import RayLaunch
from outrider.cluster.ray.lease import DriverIdentity, Lease, LeaseLostError
from outrider.cluster.ray.session import RaySession
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.links.fleet_messages import ReplicaState

CONFIG = EngineConfig.from_settings({"target.model": "t", "draft.model": "d"})
SESSION = RaySession("node", "connected", None)
OLD, NEW = DriverIdentity("old, pid 1", "a"), DriverIdentity("new, pid 2", "b")
LIMIT_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Actor:
    """Calls a controller of this process as Ray would, or fails as Ray does."""

    def __init__(self, kept: Controller | None = None) -> None:
        self.kept = kept
        self.failure: Exception | None = None
        self.is_silent = False
        self.is_killed = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            remote=lambda *terms: self._call(method, *terms),
            options=lambda **_: getattr(self, method),
        )

    def _call(self, method: str, *terms: Any) -> Coroutine[Any, Any, Any]:
        async def call() -> Any:
            if self.is_silent:
                await asyncio.Event().wait()
            if self.failure is not None:
                raise self.failure
            try:
                return await getattr(self.kept, method)(*terms)
            except Exception as error:
                raise RayTaskError(method, "traceback", error) from error

        return call()


class Scene:
    """One cluster: its controller, if there is any, and what Ray says of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.backend: FakeBackend
        self.actor: Actor | None = None
        self.said: list[str] = []
        monkeypatch.setattr(
            ray,
            "get_runtime_context",
            lambda: SimpleNamespace(was_current_actor_reconstructed=False),
        )
        monkeypatch.setattr(controller, "RayBackend", self._make_backend)
        monkeypatch.setattr(controller, "Lease", lambda: Lease(self.clock))
        monkeypatch.setattr(attach, "find_controller", lambda: self.actor)
        monkeypatch.setattr(ControllerAttachment, "_make", lambda _, is_first: self.begin())
        monkeypatch.setattr(ray, "kill", self._kill)
        monkeypatch.setattr(ray_launch, "_ANSWER_S", 0.3)
        monkeypatch.setattr(attach, "_CLAIM_S", 0.05)
        monkeypatch.setattr(attach, "_TAKE_OVER_S", 0.05)
        monkeypatch.setattr(attach, "_POLL_S", 0.005)
        monkeypatch.setattr(ray_launch, "SILENCE_S", 1.0)
        monkeypatch.setattr(attach, "START_S", 1.0)
        for name in ("NOTICE_S", "_IDLE_POLL_S"):
            monkeypatch.setattr(supervised_replica, name, 0.005)
        monkeypatch.setattr(replica_set, "QUICK_S", 0.01)

    def _make_backend(self, *_: object, **__: object) -> FakeBackend:
        self.backend = FakeBackend()
        return self.backend

    def begin(self) -> Actor:
        self.actor = Actor(Controller(CONFIG, "secret", "node", {}, can_grow=True))
        return self.actor

    def _kill(self, actor: Actor) -> None:
        actor.is_killed = True
        if actor is self.actor:
            self.actor = None

    async def attach(
        self, driver: DriverIdentity, config: EngineConfig = CONFIG, secret: str = "secret"
    ) -> RayLaunch:
        def say(event: Event) -> None:
            self.said.append(event.text)

        return await ControllerAttachment(config, SESSION, secret, driver, say).attach(
            is_first=True
        )


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield Scene(monkeypatch)


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body()

    asyncio.run(run())


def _ignore(event: Event) -> None: ...


async def _served(launch: RayLaunch) -> asyncio.Task[None]:
    keeping = asyncio.create_task(launch.run(_ignore))
    while not launch.places or launch.places[0].state is not ReplicaState.SERVING:
        assert not keeping.done(), keeping.result()
        await asyncio.sleep(0.005)
    return keeping


async def _crash(keeping: asyncio.Task[None]) -> None:
    keeping.cancel()
    await asyncio.wait({keeping})


def _with(**settings: object) -> EngineConfig:
    named = {path.replace("__", "."): value for path, value in settings.items()}
    return EngineConfig.from_settings(CONFIG.to_settings() | named)


def test_the_next_driver_adopts_the_same_lives_and_the_first_one_ends(scene: Scene) -> None:
    async def test() -> None:
        first = await scene.attach(OLD)
        actor, keeping = scene.actor, await _served(first)
        assert actor is not None
        with pytest.raises(ConfigError, match=r"already runs in this cluster .*old, pid 1"):
            await scene.attach(NEW)
        scene.clock.now_s += 3.0
        second = await scene.attach(NEW)
        with pytest.raises(LeaseLostError, match=r"taken over by another server \(new, pid 2\)"):
            await keeping
        await first.stop()
        assert scene.actor is actor and not actor.is_killed
        await _served(second)
        assert scene.actor is actor and len(scene.backend.handles) == 1
        assert scene.said[-1] == "adopted the running replicas of old, pid 1"
        await second.stop()
        assert actor.is_killed and not scene.backend.running

    _run(test)


def test_changed_settings_are_rolled_out_after_the_order_that_was_under_way(scene: Scene) -> None:
    async def test() -> None:
        first = await scene.attach(OLD)
        keeping = await _served(first)
        scene.backend.may_start.clear()
        order = asyncio.create_task(first.scale(2))
        while len(scene.backend.handles) < 2:
            await asyncio.sleep(0.005)
        await _crash(keeping)
        scene.clock.now_s += 3.0
        second = await scene.attach(NEW, _with(draft__model="other"))
        assert scene.said[-1] == "their settings differ: roll out draft.model=other"
        view = await second.view()
        assert view is not None and view.order is not None
        assert (view.order.what, view.order.state) == ("scale to 2", "under way")
        await _served(second)
        scene.backend.may_start.set()
        while [each.config.draft.model for each in scene.backend.running] != ["other"] * 2:
            await asyncio.sleep(0.005)
        order.cancel()
        await second.stop()

    _run(test)


def test_orders_of_before_count_where_the_settings_are_those_it_began_with(scene: Scene) -> None:
    async def test() -> None:
        first = await scene.attach(OLD)
        keeping = await _served(first)
        await first.roll_out(_with(draft__model="ordered"), is_draft_only=False)
        await _crash(keeping)
        scene.clock.now_s += 3.0
        second = await scene.attach(NEW)
        await _served(second)
        assert [each.config.draft.model for each in scene.backend.running] == ["ordered"]
        assert second.config.draft.model == "ordered"
        await second.stop()

    _run(test)


@pytest.mark.parametrize(
    ("wanted", "secret", "reason"),
    [
        (_with(target__model="another"), "secret", "target.model is 'another'"),
        (CONFIG, "other", "they have another OUTRIDER_SECRET"),
    ],
)
def test_replicas_that_cannot_be_adopted_are_started_anew(
    scene: Scene, wanted: EngineConfig, secret: str, reason: str
) -> None:
    async def test() -> None:
        keeping = await _served(await scene.attach(OLD))
        old = scene.actor
        await _crash(keeping)
        scene.clock.now_s += 3.0
        second = await scene.attach(NEW, wanted, secret)
        assert old is not None and old.is_killed and scene.actor is not old
        assert scene.said[-1].startswith("replicas already run and are restarted: ")
        assert reason in scene.said[-1]
        await _served(second)
        await second.stop()

    _run(test)


def test_a_controller_that_does_not_answer_is_replaced(scene: Scene) -> None:
    async def test() -> None:
        await _crash(await _served(await scene.attach(OLD)))
        old = scene.actor
        assert old is not None
        old.is_silent = True
        second = await scene.attach(NEW)
        assert old.is_killed and scene.said[-1].endswith("their controller does not answer")
        await _served(second)
        await second.stop()

    _run(test)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_silent_controller_is_given_up(scene: Scene, is_silent: bool) -> None:
    async def test() -> None:
        launch = await scene.attach(OLD)
        keeping = await _served(launch)
        assert scene.actor is not None
        scene.backend.may_start.clear()
        order = asyncio.create_task(launch.scale(2))
        while len(scene.backend.handles) < 2:
            await asyncio.sleep(0.005)
        scene.actor.is_silent = is_silent
        scene.actor.failure = ActorUnavailableError("Socket closed", None)
        with pytest.raises(DetachedError, match="the controller is silent for"):
            await keeping
        with pytest.raises(Exception, match="try again once the server serves"):
            await order
        assert launch.has_served and await launch.view() is None

    _run(test)


def test_a_controller_that_has_ended_is_not_waited_for(scene: Scene) -> None:
    async def test() -> None:
        keeping = await _served(await scene.attach(OLD))
        assert scene.actor is not None
        scene.actor.failure = ActorDiedError()
        with pytest.raises(DetachedError, match="the controller has ended"):
            await keeping

    _run(test)


def test_a_controller_that_is_away_for_a_moment_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        launch = await scene.attach(OLD)
        keeping = await _served(launch)
        assert scene.actor is not None
        scene.actor.failure = ActorUnavailableError("The actor is restarting", None)
        await asyncio.sleep(1.0)
        assert not keeping.done() and launch.places
        scene.actor.failure = None
        await launch.stop()
        await keeping

    monkeypatch.setattr(ray_launch, "SILENCE_S", LIMIT_S)
    _run(test)


def test_a_ray_of_the_server_s_own_whose_services_ended_is_given_up_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        own = dataclasses.replace(SESSION, end_own=lambda: None)
        launch = RayLaunch(CONFIG, own, OLD, Actor(), Bookmark())
        launch._controller.is_silent = True
        with pytest.raises(DetachedError, match="Ray's gcs_server on this machine ended"):
            await launch.run(_ignore)

    monkeypatch.setattr("outrider.cluster.ray.session.dead_services", lambda: ["gcs_server"])
    _run(test)
