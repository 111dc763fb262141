"""Replicas are kept apart from each other, added, retired and replaced; no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from replica_tools import FakeBackend, RunningSet, running_set

from outrider import restarts
from outrider.cluster import replica_set, supervised_replica
from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.events import Event, EventKind
from outrider.config import EngineConfig

SERVING = "serving"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervised_replica, "NOTICE_S", 0.02)
    monkeypatch.setattr(supervised_replica, "_IDLE_POLL_S", 0.005)
    monkeypatch.setattr(replica_set, "QUICK_S", 0.01)
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    yield


def _config(settings: Mapping[str, Any], num_replicas: int = 2) -> EngineConfig:
    values = {"target.model": "t", "draft.model": "old", "cluster.replicas": num_replicas}
    return EngineConfig.from_settings({**values, "server.drain_s": 5.0, **settings})


OLD = _config({})
NEW = _config({"draft.model": "new"})


def _run(
    test: Callable[[RunningSet], Awaitable[None]],
    num_replicas: int = 2,
    backend: FakeBackend | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    async def run() -> None:
        found = FakeBackend() if backend is None else backend
        async with running_set(_config(settings, num_replicas), found) as running:
            await running.until({str(n): SERVING for n in range(num_replicas)})
            await test(running)

    asyncio.run(run())


def _addresses(running: RunningSet) -> list[tuple[str, ...]]:
    return [each.addresses for each in running.replicas.places]


# -- restarts ---------------------------------------------------------------------------------


def test_one_that_is_lost_is_started_anew_while_the_other_serves() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.may_start.clear()
        running.backend.handles[1].lose("target rank 0 was lost")
        await running.until({"0": SERVING, "1": "starting"})
        assert _addresses(running) == [("unix:/0",), ()]
        running.backend.may_start.set()
        await running.until({"0": SERVING, "1": SERVING})
        assert _addresses(running) == [("unix:/0",), ("unix:/2",)]
        assert [each.restarts for each in running.replicas.view()] == [0, 1]
        assert not running.backend.handles[0].is_over
        [lost] = [each for each in running.said if "was lost" in each]
        assert lost == (
            "replica 1: target rank 0 was lost; restarting engine and models in 0 s, its "
            "requests go on elsewhere"
        )
        assert any(each.startswith("replica 1: serving again after") for each in running.said)

    _run(test)


def test_how_one_starts_again_is_no_news_but_what_it_tells_once_it_serves_is() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[0].lose()
        while len(running.backend.handles) < 2 or running.state["0"] != SERVING:
            await asyncio.sleep(0.005)
        running.backend.handles[1].say(Event(EventKind.STAGE, "draft lost"))
        assert [each for each in running.said if each.startswith(("life", "draft"))] == [
            "life 0 starts",
            "draft lost",
        ]

    _run(test, num_replicas=1)


def test_a_lone_replica_says_that_its_requests_wait() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[0].lose("the engine was lost")
        while len(running.backend.handles) < 2:
            await asyncio.sleep(0.005)
        [lost] = [each for each in running.said if "was lost" in each]
        assert lost.startswith("the engine was lost; ") and lost.endswith("running requests wait")

    _run(test, num_replicas=1)


def test_one_that_keeps_failing_waits_longer_each_time_and_is_reported_each_time() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.refused["old"] = "there is no memory"
        running.backend.handles[0].lose()
        while sum("there is no memory" in each for each in running.said) < 3:
            await asyncio.sleep(0.005)
        pauses = [
            each.split(" and models in ")[1].split(" s,")[0]
            for each in running.said
            if " and models in " in each
        ]
        assert pauses[:4] == ["0", "0.01", "0.02", "0.04"]
        assert running.state["1"] == SERVING
        running.backend.refused.clear()
        await running.until({"0": SERVING, "1": SERVING})

    _run(test)


def _exhaust(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(FakeBackend, "create", create)


def test_a_host_that_has_no_more_to_give_keeps_its_replicas_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(running: RunningSet) -> None:
        with monkeypatch.context() as exhausted:
            _exhaust(exhausted)
            running.backend.handles[1].lose()
            while not any("Too many open files" in each for each in running.said):
                await asyncio.sleep(0.005)
            assert running.state["0"] == SERVING and not running.running.done()
        await running.until({"0": SERVING, "1": SERVING})

    _run(test)


def test_more_replicas_than_a_host_can_bear_leave_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(running: RunningSet) -> None:
        _exhaust(monkeypatch)
        with pytest.raises(ClusterError, match=r"2 replicas serve: replica 2 cannot be added: .*"):
            await running.replicas.scale(3)
        await asyncio.sleep(0.02)
        assert running.state == {"0": SERVING, "1": SERVING} and not running.running.done()

    _run(test)


def test_the_server_fails_if_one_of_the_first_never_comes_to_run() -> None:
    async def run() -> None:
        backend = FakeBackend(refused={"old": "the weights are damaged"})
        async with running_set(OLD, backend) as running:
            await asyncio.wait({running.running})
            with pytest.raises(ClusterError, match="the weights are damaged"):
                running.running.result()

    asyncio.run(run())


def test_the_server_fails_if_there_is_no_room_for_one_of_the_first() -> None:
    async def run() -> None:
        backend = FakeBackend(num_free=1)
        async with running_set(OLD, backend) as running:
            await asyncio.wait({running.running})
            with pytest.raises(PlacementError, match="1 rank needs 1 CPU"):
                running.running.result()
        assert backend.num_free == 1

    asyncio.run(run())


def test_a_successor_tries_for_ever_to_have_what_has_run_before() -> None:
    async def run() -> None:
        backend = FakeBackend(num_free=1, refused={"old": "there is no memory"})
        async with running_set(OLD, backend, is_first=False) as running:
            while len(backend.handles) < 2 or "1 rank needs" not in " ".join(running.said):
                await asyncio.sleep(0.005)
            backend.refused.clear()
            backend.num_free += 1
            await running.until({"0": SERVING, "1": SERVING})

    asyncio.run(run())


# -- more or fewer ----------------------------------------------------------------------------


def test_scaling_up_publishes_the_new_ones_once_they_serve() -> None:
    async def test(running: RunningSet) -> None:
        await running.replicas.scale(3)
        assert running.state == {"0": SERVING, "1": SERVING, "2": SERVING}
        assert running.replicas.config.cluster.replicas == 3
        assert "replica 2 serves" in running.said
        assert {each.replica for each in running.replicas.processes()} == {"0", "1", "2"}

    _run(test)


def test_scaling_down_waits_until_the_highest_has_nothing_in_hand() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[1].load = 3
        scaling = asyncio.create_task(running.replicas.scale(1))
        await running.until({"0": SERVING, "1": "draining"})
        await asyncio.sleep(0.1)
        assert not scaling.done() and running.replicas.places[1].addresses == ("unix:/1",)
        running.backend.handles[1].load = 0
        await running.until({"0": SERVING})
        assert not running.backend.handles[1].is_over  # until gateways have let go of it
        await scaling
        assert running.backend.handles[1].is_over and running.backend.num_free == 7

    _run(test)


def test_a_retired_replica_has_no_longer_than_requests_get_to_finish() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[1].load = 3
        await running.replicas.scale(1)
        assert running.backend.handles[1].is_over and running.backend.handles[1].load == 3

    _run(test, settings={"server.drain_s": 0.1})


def test_one_that_is_lost_while_it_drains_is_not_started_anew() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[1].load = 3
        scaling = asyncio.create_task(running.replicas.scale(1))
        await running.until({"0": SERVING, "1": "draining"})
        running.backend.handles[1].lose()
        await scaling
        assert len(running.backend.handles) == 2

    _run(test)


def test_one_that_still_starts_may_be_taken_away() -> None:
    async def run() -> None:
        backend = FakeBackend()
        backend.may_start.clear()
        async with running_set(OLD, backend) as running:
            while len(backend.handles) < 2:
                await asyncio.sleep(0.005)
            await running.replicas.scale(1)
            backend.may_start.set()
            await running.until({"0": SERVING})
            assert not running.running.done()

    asyncio.run(run())


def test_one_without_room_is_given_up_and_the_others_go_on() -> None:
    async def test(running: RunningSet) -> None:
        with pytest.raises(ClusterError, match=r"^3 replicas serve: replica 3 cannot be added: "):
            await running.replicas.scale(4)
        assert running.state == {"0": SERVING, "1": SERVING, "2": SERVING}
        assert running.replicas.config.cluster.replicas == 3
        [given_up] = [each for each in running.said if "cannot be added" in each]
        assert given_up.endswith("the cluster has none free; the others go on")
        assert not running.running.done()

    _run(test, backend=FakeBackend(num_free=3))


# -- hosts that end ---------------------------------------------------------------------------


def test_with_room_elsewhere_a_replica_serves_there_before_it_drains() -> None:
    async def test(running: RunningSet) -> None:
        began = len(running.states)
        await running.replicas.leave({"host-0"}, 60.0)
        assert running.backend.avoided == {"host-0"}
        assert [each.host for each in running.backend.running] == ["host-1", "host-2"]
        serving = [sum(s == SERVING for s in each.values()) for each in running.states[began:]]
        assert min(serving) == 2

    _run(test, backend=FakeBackend(num_free=3))


def test_without_room_it_drains_while_the_other_serves_and_comes_back_with_room() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[0].load = 3
        began = len(running.states)
        leaving = asyncio.create_task(running.replicas.leave({"host-0"}, 60.0))
        await running.until({"0": "draining", "1": SERVING})
        assert not leaving.done()  # it has requests in hand
        running.backend.num_free -= 1  # its own room goes with the host
        running.backend.handles[0].load = 0
        await leaving
        assert running.backend.handles[0].is_over
        assert running.state == {"0": "starting", "1": SERVING}
        running.backend.num_free += 1  # a host is added
        await running.until({"0": SERVING, "1": SERVING})
        assert all(SERVING in each.values() for each in running.states[began:])

    _run(test, backend=FakeBackend(num_free=2))


def test_one_that_does_not_start_elsewhere_in_time_drains() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.may_start.clear()
        leaving = asyncio.create_task(running.replicas.leave({"host-0"}, 5.2))
        await leaving
        assert running.backend.handles[0].is_over
        assert "replica 0 was not moved in time and drains" in running.said
        running.backend.may_start.set()
        await running.until({"0": SERVING, "1": SERVING})
        assert running.backend.num_free == 1

    _run(test, backend=FakeBackend(num_free=3))


def test_hosts_that_end_together_move_a_replica_once() -> None:
    async def test(running: RunningSet) -> None:
        hosts = [{"host-0"}, {"host-0", "draft-host-0"}]
        await asyncio.gather(*(running.replicas.leave(each, 60.0) for each in hosts))
        assert len(running.backend.handles) == 3 and len(running.state) == 2

    _run(test, backend=FakeBackend(num_free=4))


def test_the_host_of_a_draft_alone_moves_nothing() -> None:
    async def test(running: RunningSet) -> None:
        began = len(running.states)
        await running.replicas.leave({"draft-host-0"}, 60.0)
        assert len(running.states) == began and len(running.backend.handles) == 2

    _run(test)


# -- other settings ---------------------------------------------------------------------------


def test_with_room_the_new_one_serves_before_the_old_one_drains() -> None:
    async def test(running: RunningSet) -> None:
        await running.replicas.roll_out(NEW, is_draft_only=True)
        assert [each.config.draft.model for each in running.backend.running] == ["new", "new"]
        assert all(sum(s == SERVING for s in each.values()) >= 2 for each in _since(running, "2"))
        assert running.backend.most_at_once == 3
        assert set(running.state.values()) == {SERVING} and len(running.state) == 2
        assert running.replicas.config.draft.model == "new"

    _run(test, backend=FakeBackend(num_free=3))


def _since(running: RunningSet, name: str) -> list[dict[str, str]]:
    first = next(n for n, each in enumerate(running.states) if each.get(name) == SERVING)
    return running.states[first:]


def test_without_room_the_old_one_ends_first_and_the_other_serves_meanwhile() -> None:
    async def test(running: RunningSet) -> None:
        began = len(running.states)
        await running.replicas.roll_out(NEW, is_draft_only=True)
        assert [each.config.draft.model for each in running.backend.running] == ["new", "new"]
        assert running.backend.most_at_once == 2
        assert all(SERVING in each.values() for each in running.states[began:])
        assert any("draining" in each.values() for each in running.states[began:])
        assert running.state == {"0": SERVING, "1": SERVING}

    _run(test, backend=FakeBackend(num_free=2))


def test_a_lone_replica_without_room_is_replaced_at_once_and_stays_listed() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.handles[0].load = 3  # which nobody else could take
        began = len(running.states)
        await running.replicas.roll_out(_config({"draft.model": "new"}, 1), is_draft_only=True)
        assert all(set(each) == {"0"} for each in running.states[began:])
        assert running.state == {"0": SERVING}
        assert running.backend.running[0].config.draft.model == "new"

    _run(test, num_replicas=1, backend=FakeBackend(num_free=1))


@pytest.mark.parametrize("num_free", [2, 3])
def test_settings_that_do_not_start_leave_the_old_ones_serving(num_free: int) -> None:
    async def test(running: RunningSet) -> None:
        running.backend.refused["new"] = "the draft has another vocabulary"
        with pytest.raises(ClusterError, match="replica 0 stays as it was: the draft has another"):
            await running.replicas.roll_out(NEW, is_draft_only=True)
        await running.until({"0": SERVING, "1": SERVING})
        assert [each.config.draft.model for each in running.backend.running] == ["old", "old"]
        assert running.replicas.config.draft.model == "old"
        running.backend.running[0].lose()
        while len(running.backend.running) < 2 or running.state != {"0": SERVING, "1": SERVING}:
            await asyncio.sleep(0.005)
        assert [each.config.draft.model for each in running.backend.running] == ["old", "old"]

    _run(test, backend=FakeBackend(num_free=num_free))


@pytest.mark.parametrize("num_free", [2, 3])
def test_one_that_answers_no_probe_replaces_none(num_free: int) -> None:
    async def test(running: RunningSet) -> None:
        running.backend.mute["new"] = "the engine does not answer"
        began = len(running.states)
        with pytest.raises(ClusterError, match="replica 0 stays as it was: the engine does not"):
            await running.replicas.roll_out(NEW, is_draft_only=True)
        assert [each.config.draft.model for each in running.backend.running] == ["old", "old"]
        assert all(SERVING in each.values() for each in running.states[began:])
        assert running.state == {"0": SERVING, "1": SERVING}

    _run(test, backend=FakeBackend(num_free=num_free))


@pytest.mark.parametrize("num_free", [3, 4])
def test_a_failure_rolls_back_what_was_replaced_before(num_free: int) -> None:
    async def test(running: RunningSet) -> None:
        began = len(running.states)
        replaced = asyncio.create_task(running.replicas.roll_out(NEW, is_draft_only=False))
        while sum("serves with the new" in each for each in running.said) < 1:
            await asyncio.sleep(0.001)
        running.backend.refused["new"] = "the memory is full"
        with pytest.raises(ClusterError, match="replica . stays as it was: the memory is full"):
            await replaced
        assert [each.config.draft.model for each in running.backend.running] == ["old"] * 3
        assert any(" is rolled back" in each for each in running.said)
        assert set(running.state.values()) == {SERVING} and len(running.state) == 3
        serving = [sum(s == SERVING for s in each.values()) for each in running.states[began:]]
        assert min(serving) >= 2
        assert running.replicas.config.draft.model == "old"

    _run(test, 3, backend=FakeBackend(num_free=num_free))


def test_a_draft_that_was_changed_in_place_is_changed_back() -> None:
    async def test(running: RunningSet) -> None:
        handles = running.backend.handles
        refuse = FakeBackend.refuse

        def once(self: FakeBackend, config: EngineConfig) -> str:
            return "no memory" if config.draft.model == "new" and handles[0].drafts else ""

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FakeBackend, "refuse", once)
            with pytest.raises(ClusterError, match="replica 1 stays as it was: no memory"):
                await running.replicas.roll_out(NEW, is_draft_only=True)
        assert FakeBackend.refuse is refuse
        assert [each.drafts for each in handles] == [["new", "old"], []]

    _run(test, backend=FakeBackend(can_change_drafts=True))


def test_another_draft_is_given_to_replicas_that_can_take_it_and_outlasts_a_restart() -> None:
    async def test(running: RunningSet) -> None:
        await running.replicas.roll_out(NEW, is_draft_only=True)
        assert [each.drafts for each in running.backend.handles] == [["new"], ["new"]]
        running.backend.handles[0].lose()
        while len(running.backend.handles) < 3:
            await asyncio.sleep(0.005)
        assert running.backend.handles[2].config.draft.model == "new"

    _run(test, backend=FakeBackend(can_change_drafts=True))


def test_other_settings_than_the_drafts_replace_replicas_that_could_take_another_draft() -> None:
    async def test(running: RunningSet) -> None:
        config = _config({"scheduler.max_num_seqs": 7})
        await running.replicas.roll_out(config, is_draft_only=False)
        assert [each.config.scheduler.max_num_seqs for each in running.backend.running] == [7, 7]

    _run(test, backend=FakeBackend(can_change_drafts=True))


def test_the_end_of_the_server_ends_what_an_order_has_begun() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.may_start.clear()
        rolling = asyncio.create_task(running.replicas.roll_out(NEW, is_draft_only=False))
        while len(running.backend.handles) < 3:
            await asyncio.sleep(0.005)
        running.running.cancel()
        with pytest.raises(ClusterError, match="it was ended while it started"):
            await rolling
        assert not running.backend.running and running.backend.num_free == 8

    _run(test)


# -- how long it took -------------------------------------------------------------------------


def test_how_many_there_should_be_is_known_while_they_start_and_after_a_failure() -> None:
    async def test(running: RunningSet) -> None:
        running.backend.may_start.clear()
        scaling = asyncio.create_task(running.replicas.scale(3))
        await running.until({"0": SERVING, "1": SERVING, "2": "starting"})
        assert running.replicas.num_configured == 3
        running.backend.may_start.set()
        await scaling
        assert running.replicas.num_configured == 3
        running.backend.may_start.clear()
        running.backend.handles[0].lose("it was lost")
        await running.until({"0": "starting", "1": SERVING, "2": SERVING})
        assert running.replicas.num_configured == 3
        running.backend.may_start.set()

    _run(test)


def test_placement_and_start_of_each_replica_are_timed() -> None:
    async def test(running: RunningSet) -> None:
        for each in running.replicas.view():
            assert each.placement_s is not None and each.placement_s >= 0
            assert each.start_s is not None and each.start_s >= 0

    _run(test)


def test_replicas_are_numbered_from_the_one_that_is_set() -> None:
    async def run() -> None:
        config = _config({"cluster.first_replica": 4})
        async with running_set(config, FakeBackend()) as running:
            await running.until({"4": SERVING, "5": SERVING})
            await running.replicas.scale(1)
            await running.until({"4": SERVING})

    asyncio.run(run())
