"""What processes that wait need no Ray for: GPUs of others, and memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from outrider.cluster.errors import ClusterError
from outrider.cluster.ray import spares as spares_module
from outrider.cluster.ray.gpu_handover import await_gone, set_visible_gpus
from outrider.cluster.ray.spare_actors import check_spare_memory
from outrider.cluster.ray.spares import ProcessSlot, Spares
from outrider.cluster.tasks import all_of

_GB = 2**30
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_node_has_room_for_one_that_waits_unless_its_memory_is_nearly_all_used() -> None:
    check_spare_memory(20 * _GB, 24 * _GB)
    for used, total in ((22 * _GB, 24 * _GB), (_GB // 2, _GB)):
        with pytest.raises(ClusterError, match="too much for a standby process"):
            check_spare_memory(used, total)


def test_a_process_sees_the_gpus_it_takes_over_whatever_ray_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    set_visible_gpus(("3", "5"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"


def test_whoever_follows_waits_until_the_one_before_is_gone_but_not_for_ever() -> None:
    with subprocess.Popen(SLEEPER) as before:
        try:
            with pytest.raises(ClusterError, match=f"process {before.pid} was killed and still"):
                await_gone(before.pid, 0.1)
            ending = threading.Timer(0.1, before.kill)
            ending.start()
            await_gone(before.pid, 30.0)  # its exit code is still to be asked for
            ending.join()
        finally:
            before.kill()
    await_gone(before.pid, 0.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_somebody_waits_only_where_that_is_wanted_and_not_at_once(enabled: bool) -> None:
    begun: list[str] = []
    post = ProcessSlot("draft", 0, object(), lambda: None, lambda: begun.append("one that waits"))

    async def run() -> int:
        spares = Spares(enabled=enabled)
        spares.prepare([post])
        await asyncio.sleep(0.05)
        num_waiting = len(spares._standbys)
        spares.close()
        assert not spares._standbys
        return num_waiting

    assert asyncio.run(run()) == int(enabled)
    assert begun == []


def test_whatever_keeps_a_spare_from_beginning_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spares_module, "STANDBY_AFTER_S", 0.0)

    def fail() -> None:
        raise ValueError("a long way\nthe placement group is gone")

    post = ProcessSlot("draft", 0, object(), lambda: "a new actor", fail)

    async def run() -> None:
        spares = Spares(enabled=True)
        for _ in range(2):
            spares.prepare([post])
            await asyncio.sleep(0.05)
        assert spares._take(post) is None
        assert not spares._standbys
        spares.prepare([post])
        await asyncio.sleep(0.05)
        spares.close()

    asyncio.run(run())
    told = "no spare for draft rank 0: the placement group is gone"
    assert [each.message for each in caplog.records] == [told] * 3


def test_when_one_of_all_fails_the_others_have_ended_before_it_is_told() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ClusterError("it failed")

    async def go_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("cancelled")

    async def answer(value: int) -> int:
        return value

    with pytest.raises(ClusterError, match="it failed"):
        asyncio.run(all_of(go_on(), fail()))
    assert ended == ["cancelled"]
    assert asyncio.run(all_of(answer(1), answer(2))) == [1, 2]
