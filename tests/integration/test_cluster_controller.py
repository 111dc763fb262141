"""The controller and its placement in a Ray of their own, without a gateway."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from waits import wait_until

from outrider.cluster.errors import PlacementError
from outrider.cluster.events import Event
from outrider.cluster.ray.attach import ControllerAttachment
from outrider.cluster.ray.facts import cluster_resources, free_resources, logs_folder
from outrider.cluster.ray.launch import RayLaunch
from outrider.cluster.ray.lease import DriverIdentity
from outrider.cluster.ray.node_assignment import Need
from outrider.cluster.ray.placement import place
from outrider.cluster.ray.session import RaySession, ray_session
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaState

pytestmark = [pytest.mark.ray, pytest.mark.model]

SECRET = "a secret of the tests"
CONFIG = EngineConfig.from_kwargs(model="smollm2-135m-draft", draft_model="smollm2-135m-draft")


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with ray_session(None, num_ranks=2) as session:
        yield session


@asynccontextmanager
async def _serving(session: RaySession) -> AsyncIterator[RayLaunch]:
    launch = await ControllerAttachment(CONFIG, session, SECRET, DriverIdentity(), _print).attach(
        is_first=True
    )
    keeping = asyncio.create_task(launch.run(_print))
    try:
        while not launch.places or launch.places[0].state is not ReplicaState.SERVING:
            if keeping.done():
                keeping.result()  # why it did not start
            await asyncio.sleep(0.05)
        yield launch
    finally:
        await launch.stop()
        await keeping


def _print(event: Event) -> None:
    print(f"{time.monotonic():.1f} {event.text}")  # shown if the test fails


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_its_status_names_every_process_and_its_end_is_theirs(session: RaySession) -> None:
    async def run() -> ClusterView:
        async with _serving(session) as launch:
            [place] = launch.places
            [address] = place.addresses  # nobody could be elsewhere
            assert place.name == "0" and address.startswith("unix:")
            with pytest.raises(ConfigError, match="a server already runs in this cluster"):
                other = ControllerAttachment(
                    CONFIG, session, SECRET, DriverIdentity("other"), _print
                )
                await other.attach(is_first=True)
            status = await launch.view()
            assert status is not None
            return status

    status = asyncio.run(run())
    assert (status.state, status.restarts, status.draft_restarts) == ("serving", 0, 0)
    assert {each.replica for each in status.processes} == {"0"}
    found = {(each.role, each.rank, each.state) for each in status.processes}
    assert found == {("engine", 0, "ready"), ("target", 0, "ready"), ("draft", 0, "ready")}
    pids = [each.pid for each in status.processes]
    assert len(set(pids)) == 3
    wait_until(lambda: not any(map(_is_running, pids)), 10)
    wait_until(lambda: free_resources().get("CPU") == cluster_resources()["CPU"], 10)


def test_nobody_else_gets_into_the_folder_of_a_ray_started_here(session: RaySession) -> None:
    [folder] = [each for each in logs_folder().parents if each.name.startswith("outrider-ray-")]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_roles_are_placed_together_or_not_at_all(session: RaySession) -> None:
    needs = [Need("target", 1, {"CPU": 1.0}), Need("draft", 2, {"CPU": 64.0})]
    with pytest.raises(PlacementError, match=r"^draft: 2 ranks need 64 CPUs each, 128 CPUs in all"):
        asyncio.run(place(needs, timeout_s=1.0, can_grow=True))
    wait_until(lambda: free_resources().get("CPU") == cluster_resources()["CPU"], 10)
