"""Actors that wait beside those that work: they take over, are replaced, and never stay behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray as untyped_ray
from cluster_tools import ServeProcess, streamed_tokens
from waits import wait_until

from outrider.client import Client
from outrider.cluster.ray import spares as spares_module
from outrider.cluster.ray.actor_group import ActorGroup
from outrider.cluster.ray.facts import free_resources
from outrider.cluster.ray.node_assignment import Need
from outrider.cluster.ray.placement import RolePlacement, place, release
from outrider.cluster.ray.spares import Spares
from outrider.errors import OutriderError

pytestmark = pytest.mark.ray

ray: Any = untyped_ray

MODEL = "smollm2-135m-draft"
PROMPT = "Once upon a time there was a"
PARAMS: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "seed": 7, "ignore_eos": True}
WAITS = "^ray::Spare(Rank|Engine) *$"  # one that begins or works has a call after its name
ROLES = {"engine", "target", "draft"}
RANK = ("target", 0)
_LIMIT_S = 300.0
_OBJECT_STORE_BYTES = 80 * 2**20


def _working(client: Client) -> dict[str, int]:
    """Processes that are ready, as the server tells of them."""
    try:
        cluster = client.status().cluster
    except OutriderError:  # away for now
        return {}
    told = () if cluster is None else cluster.processes
    return {each.role: each.pid for each in told if each.role in ROLES and each.state == "ready"}


def _wait_working(server: ServeProcess, client: Client, lost: int = 0) -> dict[str, int]:
    def is_whole() -> bool:
        found = _working(client)
        return found.keys() == ROLES and lost not in found.values()

    wait_until(is_whole, _LIMIT_S, lambda: server.output)
    return _working(client)


def _wait_spares(server: ServeProcess, client: Client) -> set[int]:
    """One for each process that works, once all wait."""

    def found() -> set[int]:
        return set(server.pids_of(WAITS)) - set(_working(client).values())

    wait_until(lambda: len(found()) == len(ROLES), _LIMIT_S, lambda: server.output)
    return found()


def _is_any_left(server: ServeProcess, pids: Set[int]) -> bool:
    return not pids.isdisjoint(server.left_pids())


@pytest.mark.model
@pytest.mark.slow
def test_who_waits_takes_over_is_replaced_and_ends_with_the_controller_and_the_server() -> None:
    arguments = ["--model", MODEL, "--draft-model", MODEL, "--set", "deterministic=true"]
    with ServeProcess(*arguments, "--set", "cluster.colocate=false") as server:
        with server.wait_ready() as client:
            undisturbed = streamed_tokens(client, PROMPT, **PARAMS)
            for role in ("target", "engine"):
                spares = _wait_spares(server, client)
                lost = _working(client)[role]
                assert streamed_tokens(client, PROMPT, kill=lost, **PARAMS) == undisturbed
                assert set(_wait_working(server, client, lost).values()) == spares
            before = _wait_working(server, client)
            spares = _wait_spares(server, client)
            assert streamed_tokens(client, PROMPT, kill=before["draft"], **PARAMS) == undisturbed
            after = _wait_working(server, client, before["draft"])
            assert after["draft"] in spares
            assert {**after, "draft": 0} == {**before, "draft": 0}
            _wait_spares(server, client)
            [controller] = server.pids_of("^ray::Controller")
            all_before = set(server.pids_of("^ray::(Spare|Rank|Engine)"))
            os.kill(controller, signal.SIGKILL)
            wait_until(lambda: not _is_any_left(server, all_before), _LIMIT_S)
            _wait_working(server, client)
            assert streamed_tokens(client, PROMPT, **PARAMS) == undisturbed
            _wait_spares(server, client)
        server.terminate()
        assert server.wait() == 0, server.output
        server.wait_nothing_left()
        assert server.left_files() == []


# -- one rank on one GPU, which need not exist for Ray to give it ---------------------------------


@pytest.fixture(scope="module")
def gpus() -> Iterator[None]:
    """A node that says it has two."""
    folder = tempfile.mkdtemp(prefix="t-")
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    monkeypatch = pytest.MonkeyPatch()
    for name, value in (variables | {"CUDA_VISIBLE_DEVICES": "4,7"}).items():
        monkeypatch.setenv(name, value)
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    monkeypatch.undo()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "STANDBY_AFTER_S", 0.0)


@asynccontextmanager
async def _room() -> AsyncIterator[tuple[RolePlacement, Spares]]:
    placed = await place([Need("target", 1, {"CPU": 1.0, "GPU": 1.0})], 60.0, can_grow=False)
    spares = Spares(enabled=True)
    try:
        yield placed["target"], spares
    finally:
        spares.close()
        release(placed)


async def _spare_of(group: ActorGroup, spares: Spares) -> Any:
    group.prepare_spares()
    async with asyncio.timeout(_LIMIT_S):
        return await asyncio.shield(spares._standbys[RANK].actor)


async def _pid(actor: Any) -> int:
    found: int = await actor.__ray_call__.remote(lambda self: os.getpid())
    return found


def _free() -> dict[str, float]:
    """CPUs and GPUs, of the node and of its bundles."""
    found = free_resources().items()
    return {name: amount for name, amount in found if name.startswith(("CPU", "GPU"))}


def _living() -> list[str]:
    return [each["State"] for each in ray._private.state.actors().values() if _is_alive(each)]


def _is_alive(actor: Any) -> bool:
    return bool(actor["State"] != "DEAD")


@pytest.mark.usefixtures("gpus", "at_once")
def test_who_takes_over_has_the_gpus_of_the_one_before_and_nothing_of_the_bundle() -> None:
    async def run() -> None:
        async with _room() as (placed, spares):
            first = ActorGroup(placed, spares)
            [before] = await first.describe()
            assert before.gpu_ids in (("4",), ("7",))
            free = _free()
            spare = await _spare_of(first, spares)
            assert _free() == free
            pid = await _pid(spare)
            first.kill()
            second = ActorGroup(placed, spares)
            [after] = await second.describe()
            assert (after.pid, after.gpu_ids) == (pid, before.gpu_ids)
            seen = spare.__ray_call__.remote(lambda self: os.environ["CUDA_VISIBLE_DEVICES"])
            assert await seen == before.gpu_ids[0]
            waiting = await _spare_of(second, spares)
            os.kill(await _pid(waiting), signal.SIGKILL)
            second.kill()
            third = ActorGroup(placed, spares)  # nobody is left to take over
            [fresh] = await third.describe()
            assert fresh.pid not in (before.pid, after.pid)
            assert fresh.gpu_ids == before.gpu_ids
            await _spare_of(third, spares)
            third.kill()
        wait_until(lambda: not _living(), _LIMIT_S)

    asyncio.run(run())


@pytest.mark.usefixtures("gpus", "at_once")
def test_a_spare_that_no_node_has_room_for_is_done_without() -> None:
    async def run() -> None:
        async with _room() as (placed, spares):
            group = ActorGroup(placed, spares)
            [before] = await group.describe()
            asks_too_much = ray.remote(num_cpus=64)(object).remote
            [post] = [dataclasses.replace(each, begin_spare=asks_too_much) for each in group._slots]
            spares.prepare([post])
            await asyncio.sleep(0.5)
            assert not spares._standbys[RANK].actor.done()
            group.kill()
            successor = ActorGroup(placed, spares)
            [after] = await successor.describe()
            assert after.pid != before.pid
            successor.kill()
        wait_until(lambda: not _living(), _LIMIT_S)

    asyncio.run(run())
