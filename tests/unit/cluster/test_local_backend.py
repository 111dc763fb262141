"""Room for further replicas on one host: as much memory as one takes, and few starts at a time."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cluster.errors import PlacementError
from outrider.cluster.local import host_memory
from outrider.cluster.local import launch as local_launch
from outrider.cluster.local.launch import MAX_STARTING, LocalBackend, LocalLaunch
from outrider.config import EngineConfig

GB = 2**30
CONFIG = EngineConfig()


def ready(is_ready: bool = True) -> Any:
    return SimpleNamespace(
        is_ready=is_ready, is_over=False, processes=lambda _: [SimpleNamespace(pid=1)]
    )


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    """Each replica takes 10 GB, and 25 are free."""
    monkeypatch.setattr(local_launch, "used_bytes", lambda pids: 10 * GB * len(list(pids)))
    monkeypatch.setattr(local_launch, "available_bytes", lambda: 25 * GB)
    return LocalBackend("secret", 0)


def find(backend: LocalBackend, config: EngineConfig = CONFIG) -> Any:
    return asyncio.run(backend.allocate(config, 60.0))


def test_a_first_replica_has_room_whatever_is_free(backend: LocalBackend) -> None:
    find(backend)


def test_a_further_one_needs_what_one_takes(backend: LocalBackend) -> None:
    find(backend)
    backend.handles = [ready()]
    find(backend)  # starts
    find(backend)
    with pytest.raises(
        PlacementError,
        match=r"^1 replica more would take 10.0 GB of memory, .* 25.0 GB are free, enough for 0;",
    ):
        find(backend)


def test_many_more_are_refused_at_once(backend: LocalBackend) -> None:
    launch = LocalLaunch(CONFIG, "secret")
    launch._backend = backend
    launch._set = SimpleNamespace(replicas=[object()])  # type: ignore[assignment]
    backend.handles = [ready()]
    backend._allocations = [SimpleNamespace()]  # type: ignore[list-item]
    with pytest.raises(
        PlacementError,
        match=r"^255 replicas more would take 2550.0 GB .* 25.0 GB are free, enough for 2;",
    ):
        asyncio.run(launch.scale(256))


def test_no_more_than_a_few_start_at_a_time(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_STARTING):
        find(backend)
    with pytest.raises(PlacementError, match=f"^{MAX_STARTING} replicas have been starting for"):
        find(backend, EngineConfig.from_settings({"cluster.start_timeout_s": 0.3}))
    given = backend._allocations[0]
    backend.release(given)  # it could not start
    find(backend)

    async def one_is_ready() -> None:
        waiting = asyncio.create_task(backend.allocate(CONFIG, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        backend.handles = [ready()]
        await waiting

    monkeypatch.setattr(local_launch, "available_bytes", lambda: None)
    asyncio.run(one_is_ready())


def test_what_processes_have_and_what_is_left_is_known_here() -> None:
    available = host_memory.available_bytes()
    assert available is not None and available > 0
    assert host_memory.used_bytes([os.getpid()]) > 2**20
    assert host_memory.used_bytes([2**22 + 1]) == 0, "it has ended"
