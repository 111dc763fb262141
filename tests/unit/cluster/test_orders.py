"""What operators order is checked first and done one thing at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.orders import Orders, changed
from outrider.config import EngineConfig
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.links.cluster_view import ClusterView, OrderView
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

    async def keep(self, say: Say) -> None: ...

    async def stop(self) -> None: ...

    def abort(self) -> None: ...


def _accept(config: EngineConfig) -> None:
    """Any model."""


def _refuse(config: EngineConfig) -> None:
    raise ModelError("the draft's vocabulary has 3 tokens.")


async def _settled(orders: Orders) -> OrderView:
    async with asyncio.timeout(10):
        while orders.last is None or orders.last.state == "under way":
            await asyncio.sleep(0.005)
    return orders.last


def test_an_order_is_under_way_until_it_is_done_and_tells_how_far_it_is() -> None:
    async def run() -> None:
        launch, said = RecordingLaunch(), list[Event]()
        orders = Orders(CONFIG, launch, said.append, _accept)
        orders.scale(3)
        assert orders.last == OrderView("scale to 3 replicas", "under way", "")
        orders.say(Event(Kind.REPAIR, "replica 1 serves"))
        assert orders.last == OrderView("scale to 3 replicas", "under way", "replica 1 serves")
        launch.may.set()
        assert await _settled(orders) == OrderView("scale to 3 replicas", "done", "")
        assert launch.done == [3]
        assert [each.text for each in said] == [
            "ordered: scale to 3 replicas",
            "replica 1 serves",
            "done: scale to 3 replicas",
        ]

    asyncio.run(run())


def test_a_second_order_is_refused_while_the_first_is_under_way() -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        orders = Orders(CONFIG, launch, list[Event]().append, _accept)
        orders.scale(3)
        with pytest.raises(ClusterError, match=r"an order is under way \(scale to 3 replicas\)"):
            orders.roll_out({})
        launch.may.set()
        await _settled(orders)
        orders.scale(1)
        assert (await _settled(orders)).what == "scale to 1 replica"

    asyncio.run(run())


def test_a_failed_order_says_why_and_leaves_the_settings() -> None:
    async def run() -> None:
        launch, said = RecordingLaunch(), list[Event]()
        launch.may.set()
        launch.failure = ClusterError("there is no room.")
        orders = Orders(CONFIG, launch, said.append, _accept)
        orders.roll_out({"draft.model": "e"})
        assert await _settled(orders) == OrderView(
            "roll out draft.model=e", "failed", "there is no room."
        )
        assert orders.config is CONFIG
        assert said[-1] == Event(
            Kind.TROUBLE, "not done (roll out draft.model=e): there is no room."
        )

    asyncio.run(run())


def test_an_order_that_failed_unexpectedly_does_not_keep_the_server_from_ending() -> None:
    def fail(config: EngineConfig) -> None:
        raise OSError(36, "File name too long")

    async def run() -> None:
        orders = Orders(CONFIG, RecordingLaunch(), list[Event]().append, fail)
        orders.roll_out({"draft.model": "e" * 300})
        assert (await _settled(orders)).detail == "it failed for no expected reason; see the log."
        await orders.close()

    asyncio.run(run())


def test_a_server_that_ends_ends_its_order_and_takes_no_other() -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        orders = Orders(CONFIG, launch, list[Event]().append, _accept)
        orders.scale(3)
        await asyncio.sleep(0)  # it is under way
        await orders.close()
        launch.may.set()
        with pytest.raises(ClusterError, match=r"the server is ending; order it \(scale to 2"):
            orders.scale(2)
        await asyncio.sleep(0)
        assert launch.done == []

    asyncio.run(run())


def test_models_that_cannot_be_served_reach_no_replica() -> None:
    async def run() -> None:
        launch = RecordingLaunch()
        launch.may.set()
        orders = Orders(CONFIG, launch, list[Event]().append, _refuse)
        orders.roll_out({"draft.model": "e"})
        assert (await _settled(orders)).detail == "the draft's vocabulary has 3 tokens."
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
        orders = Orders(CONFIG, launch, list[Event]().append, _accept)
        orders.roll_out(settings)
        await _settled(orders)
        config = orders.config
        told = (config.draft.model, config.scheduler.max_num_seqs, is_draft_only)
        assert launch.done == [told]
        assert config.draft.model == settings.get("draft.model", "d")

    asyncio.run(run())


@pytest.mark.parametrize("number", [0, -1, 257])
def test_a_number_of_replicas_out_of_bounds_is_refused(number: int) -> None:
    async def run() -> None:
        orders = Orders(CONFIG, RecordingLaunch(), list[Event]().append, _accept)
        with pytest.raises(ConfigError, match=f"is {number}; it must be from 1 to 256"):
            orders.scale(number)
        assert orders.last is None

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
