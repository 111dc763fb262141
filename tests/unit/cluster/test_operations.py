"""What operators order is checked first and done one thing at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.operations import Operations, changed
from outrider.config import EngineConfig
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.links.cluster_view import ClusterView, OperationView
from outrider.links.fleet_messages import ReplicaPlace

CONFIG = EngineConfig.from_settings({"target.model": "t", "draft.model": "d"})


class RecordingLaunch:
    """Does as it is told once it `may`."""

    def __init__(self) -> None:
        self.on_change: list[Callable[[], None]] = []
        self.places: tuple[ReplicaPlace, ...] = ()
        self.done: list[Any] = []
        self.may = asyncio.Event()
        self.failure: OutriderError | None = None

    async def scale(self, num_replicas: int) -> None:
        await self._do(num_replicas)

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._do((config.draft.model, config.scheduler.max_num_seqs, is_draft_only))

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        raise NotImplementedError  # no order

    async def _do(self, what: Any) -> None:
        await self.may.wait()
        if self.failure is not None:
            raise self.failure
        self.done.append(what)

    @property
    def config(self) -> EngineConfig | None:
        return None

    async def view(self) -> ClusterView | None:
        return None

    async def run(self, say: Say) -> None: ...

    async def stop(self) -> None: ...

    def abort(self) -> None: ...


def _accept(config: EngineConfig) -> None:
    """Any model."""


def _refuse(config: EngineConfig) -> None:
    raise ModelError("the draft's vocabulary has 3 tokens.")


async def _settled(operations: Operations) -> OperationView:
    async with asyncio.timeout(10):
        while operations.last is None or operations.last.state == "under way":
            await asyncio.sleep(0.005)
    return operations.last


def test_an_order_is_under_way_until_it_is_done_and_tells_how_far_it_is() -> None:
    async def run() -> None:
        launch, said = RecordingLaunch(), list[Event]()
        operations = Operations(CONFIG, launch, said.append, _accept)
        operations.scale(3)
        assert operations.last == OperationView("scale to 3 replicas", "under way", "")
        operations.say(Event(EventKind.REPAIR, "replica 1 serves"))
        assert operations.last == OperationView(
            "scale to 3 replicas", "under way", "replica 1 serves"
        )
        launch.may.set()
        assert await _settled(operations) == OperationView("scale to 3 replicas", "done", "")
        assert launch.done == [3]
        assert [each.text for each in said] == [
            "requested: scale to 3 replicas",
            "replica 1 serves",
            "done: scale to 3 replicas",
        ]

    asyncio.run(run())


def test_a_second_order_is_refused_while_the_first_is_under_way() -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        operations = Operations(CONFIG, launch, list[Event]().append, _accept)
        operations.scale(3)
        with pytest.raises(
            ClusterError, match=r"an operation is under way \(scale to 3 replicas\)"
        ):
            operations.roll_out({})
        launch.may.set()
        await _settled(operations)
        operations.scale(1)
        assert (await _settled(operations)).what == "scale to 1 replica"

    asyncio.run(run())


def test_a_failed_order_says_why_and_leaves_the_settings() -> None:
    async def run() -> None:
        launch, said = RecordingLaunch(), list[Event]()
        launch.may.set()
        launch.failure = ClusterError("there is no room.")
        operations = Operations(CONFIG, launch, said.append, _accept)
        operations.roll_out({"draft.model": "e"})
        assert await _settled(operations) == OperationView(
            "roll out draft.model=e", "failed", "there is no room."
        )
        assert operations.config is CONFIG
        assert said[-1] == Event(
            EventKind.TROUBLE, "failed: roll out draft.model=e: there is no room."
        )

    asyncio.run(run())


def test_an_order_that_failed_unexpectedly_does_not_keep_the_server_from_ending() -> None:
    def fail(config: EngineConfig) -> None:
        raise OSError(36, "File name too long")

    async def run() -> None:
        operations = Operations(CONFIG, RecordingLaunch(), list[Event]().append, fail)
        operations.roll_out({"draft.model": "e" * 300})
        assert (await _settled(operations)).detail == "unexpected error; see the log."
        await operations.close()

    asyncio.run(run())


def test_a_server_that_ends_ends_its_order_and_takes_no_other() -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        operations = Operations(CONFIG, launch, list[Event]().append, _accept)
        operations.scale(3)
        await asyncio.sleep(0)  # it is under way
        await operations.close()
        launch.may.set()
        with pytest.raises(ClusterError, match=r"the server is ending; request it \(scale to 2"):
            operations.scale(2)
        await asyncio.sleep(0)
        assert launch.done == []

    asyncio.run(run())


def test_models_that_cannot_be_served_reach_no_replica() -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        launch.may.set()
        operations = Operations(CONFIG, launch, list[Event]().append, _refuse)
        operations.roll_out({"draft.model": "e"})
        assert (await _settled(operations)).detail == "the draft's vocabulary has 3 tokens."
        assert launch.done == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "is_draft_only"),
    [
        ({"draft.model": "e"}, True),
        ({"draft.model": "e", "scheduler.max_num_seqs": 3}, False),
        ({}, False),
    ],
)
def test_only_settings_of_the_draft_leave_the_target_alone(
    settings: dict[str, Any], is_draft_only: bool
) -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        launch.may.set()
        operations = Operations(CONFIG, launch, list[Event]().append, _accept)
        operations.roll_out(settings)
        await _settled(operations)
        config = operations.config
        told = (config.draft.model, config.scheduler.max_num_seqs, is_draft_only)
        assert launch.done == [told]
        assert config.draft.model == settings.get("draft.model", "d")

    asyncio.run(run())


@pytest.mark.parametrize("number", [0, -1, 257])
def test_a_number_of_replicas_out_of_bounds_is_refused(number: int) -> None:
    async def run() -> None:
        operations = Operations(CONFIG, RecordingLaunch(), list[Event]().append, _accept)
        with pytest.raises(ConfigError, match=f"is {number}; it must be from 1 to 256"):
            operations.scale(number)
        assert operations.last is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"draft.modle": "e"}, r"draft.modle is no setting. .*draft.model"),
        ({"server.port": 80}, r"server.port cannot be rolled out; it must be a setting of target"),
        ({"seed": 3}, r"seed cannot be rolled out"),
        ({"target.model": "u"}, r"target.model is 'u', another model; start another server"),
        ({"scheduler.max_num_seqs": 0}, r"scheduler.max_num_seqs is 0; it must be"),
        ({"speculation.method": "draft", "draft.model": None}, "there is no draft"),
    ],
)
def test_settings_that_cannot_be_rolled_out_are_refused_in_a_sentence(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        changed(CONFIG, settings)


def test_the_same_target_may_be_named_again() -> None:
    config = changed(CONFIG, {"target.model": "t", "target.tensor_parallel": 2})
    assert config.target.tensor_parallel == 2
