"""Replicas in a Ray cluster: one added, another draft for both, and all of it after the loss of the
controller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import ray
from waits import wait_until

from outrider.cluster.events import Event
from outrider.cluster.operations import changed
from outrider.cluster.ray.attach import ControllerAttachment
from outrider.cluster.ray.controller import NAME, NAMESPACE
from outrider.cluster.ray.facts import cluster_resources, free_resources
from outrider.cluster.ray.launch import RayLaunch
from outrider.cluster.ray.lease import DriverIdentity
from outrider.cluster.ray.session import RaySession, ray_session
from outrider.config import EngineConfig
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaState

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow]

CHANGE_S = 200.0


class Pair(Protocol):
    """Folders of checkpoints; see `conftest.py`."""

    target: Any
    draft: Any


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with ray_session(None, num_ranks=6) as session:
        yield session


def _pids(view: ClusterView, role: str) -> list[int]:
    return sorted(each.pid for each in view.processes if each.role == role)


async def _serving(launch: RayLaunch, num_replicas: int) -> ClusterView:
    """Until so many replicas serve, and all their ranks are ready."""
    async with asyncio.timeout(CHANGE_S):
        while True:
            states = [each.state for each in launch.places]
            view = await launch.view()
            is_ready = view is not None and all(each.state == "ready" for each in view.processes)
            if states == [ReplicaState.SERVING] * num_replicas and is_ready:
                assert view is not None and len(view.processes) == 3 * num_replicas
                return view
            await asyncio.sleep(0.2)


def test_orders_are_carried_out_and_outlast_the_controller(session: RaySession, pair: Pair) -> None:
    config = EngineConfig.from_kwargs(
        model=str(pair.target), draft_model=str(pair.draft), kv_cache_gb=0.01, colocate=False
    )

    async def run() -> None:
        events: list[Event] = []
        attaching = ControllerAttachment(
            config, session, "a secret of the tests", DriverIdentity(), events.append
        )
        launch = await attaching.attach(is_first=True)
        keeping = asyncio.create_task(launch.run(events.append))
        try:
            one = await _serving(launch, 1)
            await asyncio.wait_for(launch.scale(2), CHANGE_S)
            two = await _serving(launch, 2)
            assert set(_pids(one, "target")) < set(_pids(two, "target"))

            other = changed(config, {"draft.model": str(pair.target)})
            await asyncio.wait_for(launch.roll_out(other, is_draft_only=True), CHANGE_S)
            redrafted = await _serving(launch, 2)
            assert _pids(redrafted, "target") == _pids(two, "target")
            assert _pids(redrafted, "engine") == _pids(two, "engine")
            assert set(_pids(redrafted, "draft")).isdisjoint(_pids(two, "draft"))

            ray.kill(ray.get_actor(NAME, NAMESPACE), no_restart=False)
            while not any("the controller was lost" in each.text for each in events):
                await asyncio.sleep(0.1)
            anew = await _serving(launch, 2)
            assert set(_pids(anew, "engine")).isdisjoint(_pids(two, "engine"))
            assert launch.config.draft.model == str(pair.target)
        finally:
            await launch.stop()
            await keeping

    asyncio.run(run())
    wait_until(lambda: free_resources().get("CPU") == cluster_resources()["CPU"], 20)
