"""Room for further replicas on one host: as much memory as one takes, and few starts at a time."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cluster import host_memory, local_launch
from outrider.cluster.errors import PlacementError
from outrider.cluster.local_launch import MAX_STARTING, LocalLaunch, LocalRooms
from outrider.config import EngineConfig

GB = 2**30
CONFIG = EngineConfig()


def ready(is_ready: bool = True) -> Any:
    return SimpleNamespace(
        is_ready=is_ready, is_over=False, processes=lambda _: [SimpleNamespace(pid=1)]
    )


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> LocalRooms:
    """Each replica takes 10 GB, and 25 are free."""
    monkeypatch.setattr(local_launch, "used_bytes", lambda pids: 10 * GB * len(list(pids)))
    monkeypatch.setattr(local_launch, "available_bytes", lambda: 25 * GB)
    return LocalRooms("secret", 0)


def find(rooms: LocalRooms, config: EngineConfig = CONFIG) -> Any:
    return asyncio.run(rooms.find(config, 60.0))


def test_a_first_replica_has_room_whatever_is_free(rooms: LocalRooms) -> None:
    find(rooms)


def test_a_further_one_needs_what_one_takes(rooms: LocalRooms) -> None:
    find(rooms)
    rooms.lives = [ready()]
    find(rooms)  # starts
    find(rooms)
    with pytest.raises(
        PlacementError,
        match=r"^1 replica more would take 10.0 GB of memory, .* 25.0 GB are free, enough for 0;",
    ):
        find(rooms)


def test_many_more_are_refused_at_once(rooms: LocalRooms) -> None:
    launch = LocalLaunch(CONFIG, "secret")
    launch._rooms = rooms
    launch._set = SimpleNamespace(replicas=[object()])  # type: ignore[assignment]
    rooms.lives = [ready()]
    rooms._given = [SimpleNamespace()]  # type: ignore[list-item]
    with pytest.raises(
        PlacementError,
        match=r"^255 replicas more would take 2550.0 GB .* 25.0 GB are free, enough for 2;",
    ):
        asyncio.run(launch.scale(256))


def test_no_more_than_a_few_start_at_a_time(
    rooms: LocalRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_STARTING):
        find(rooms)
    with pytest.raises(PlacementError, match=f"^{MAX_STARTING} replicas have been starting for"):
        find(rooms, EngineConfig.from_settings({"cluster.start_timeout_s": 0.3}))
    given = rooms._given[0]
    rooms.give_back(given)  # it could not start
    find(rooms)

    async def one_is_ready() -> None:
        waiting = asyncio.create_task(rooms.find(CONFIG, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        rooms.lives = [ready()]
        await waiting

    monkeypatch.setattr(local_launch, "available_bytes", lambda: None)
    asyncio.run(one_is_ready())


def test_what_processes_have_and_what_is_left_is_known_here() -> None:
    available = host_memory.available_bytes()
    assert available is not None and available > 0
    assert host_memory.used_bytes([os.getpid()]) > 2**20
    assert host_memory.used_bytes([2**22 + 1]) == 0, "it has ended"
