"""Drafts that come and go, with ranks that are threads and have no model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine, build_served
from outrider.engine.launch.ranks import ExternalRanks
from outrider.engine.over_ranks import group_sizes
from outrider.engine.rank_group import RankGroup, rank_settings
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.handshake import dial_in
from outrider.links.listener import Listener
from outrider.links.rank_messages import (
    Allocate,
    DraftGroupJoined,
    Hello,
    Join,
    LoadWeights,
    RankDescription,
    Ready,
    Role,
    Setup,
    WeightsLoaded,
)
from outrider.scheduler.costs import CostTable, StepCosts

SECRET = "of this test"
VERIFY = CostTable((1, 8), (0.01, 0.02))
FIRST_DRAFT, NEXT_DRAFT = CostTable((1,), (0.003,)), CostTable((1,), (0.002,))
MODEL = "smollm2-135m-draft"


class ScriptedRank(threading.Thread):
    """Says what a rank says while it starts, and ends after the answer to `last`."""

    def __init__(
        self,
        address: str,
        role: str,
        last: type | None = None,
        *,
        rank: int = 0,
        size: int = 1,
        gpu_bytes: int | None = None,
        prefill_s: float = 1.0,
    ) -> None:
        super().__init__(daemon=True)
        self._prefill_s = prefill_s
        self._address = address
        self._role = role
        self._last = last
        self._rank, self._size = rank, size
        self._gpu_bytes = gpu_bytes
        self.allocated: Allocate | None = None

    def run(self) -> None:
        hello = Hello(Role(self._role), self._rank, self._size, os.getpid(), "here")
        sock = dial_in(self._address, SECRET, hello, 10)
        with Channel(sock, RANK_CODEC) as channel, suppress(LinkError):
            while True:
                message = channel.receive()
                if (answer := self._answer(message)) is not None:
                    channel.send(answer)
                if type(message) is self._last:
                    return

    def _answer(self, message: object) -> object | None:
        match message:
            case Setup():
                return described(self._gpu_bytes)
            case LoadWeights():
                return WeightsLoaded(1000, None, "none", 0.0)
            case Allocate() if self._role == "draft":
                self.allocated = message
                return Ready(None, FIRST_DRAFT, NEXT_DRAFT, self._prefill_s)
            case Allocate():
                self.allocated = message
                return Ready(VERIFY)
            case Join() if self._role == "draft":
                return DraftGroupJoined("tcp")
        return None


def described(gpu_bytes: int | None = None) -> RankDescription:
    return RankDescription(
        device="cpu" if gpu_bytes is None else "cuda:0",
        gpu_bytes=gpu_bytes,
        gpu_uuid=None if gpu_bytes is None else "GPU-0",
        vocab_size=100,
        eos_ids=(2,),
        max_position=2048,
        is_extendable=False,
    )


class NotedRanks(ExternalRanks):
    """Keeps why a draft was given up."""

    def __init__(self, lost: list[str]) -> None:
        self._lost = lost

    def replace_draft(self, reason: str) -> None:
        self._lost.append(reason)


@contextmanager
def running(
    tmp_path: Path, lost: list[str], **options: Any
) -> Iterator[tuple[BuiltEngine, str, list[ScriptedRank]]]:
    config = EngineConfig.from_kwargs(model=MODEL, draft_model=MODEL, **options)
    address = f"unix:{tmp_path}/engine.sock"
    listener = Listener([address], SECRET, group_sizes(config))
    ranks = [ScriptedRank(address, role) for role in group_sizes(config)]
    for rank in ranks:
        rank.start()
    engine = build_served(config, listener, NotedRanks(lost), print)
    try:
        yield engine, address, ranks
    finally:
        engine.close()


def step_until_drafting(engine: BuiltEngine, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not engine.status().proposal_backend:
        assert time.monotonic() < deadline_s, "the draft was not taken in"
        engine.check()
        engine.loop.step(time.monotonic())
        time.sleep(0.01)


def test_a_draft_that_ends_between_ready_and_join_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    with running(tmp_path, lost, max_model_len=128) as (engine, address, _):
        step_until_drafting(engine)
        draft: Any = engine.loop._proposers
        draft.give_up(draft.link)
        allocate = RankGroup.allocate
        dying = ScriptedRank(address, "draft", last=Allocate)

        def allocate_and_die(group: RankGroup, *sizes: Any) -> None:
            allocate(group, *sizes)
            dying.join(60)

        monkeypatch.setattr(RankGroup, "allocate", allocate_and_die)
        dying.start()
        deadline_s = time.monotonic() + 60
        while len(lost) < 2:
            assert time.monotonic() < deadline_s, "no restart was requested"
            time.sleep(0.01)
        assert "draft rank 0" in lost[1]
        ScriptedRank(address, "draft").start()
        step_until_drafting(engine)


def test_the_smallest_gpu_of_the_target_decides_on_seats(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    config = EngineConfig.from_kwargs(model=MODEL, tensor_parallel_size=2)
    listener = Listener([address], SECRET, group_sizes(config))
    ranks = [
        ScriptedRank(address, "target", rank=rank, size=2, gpu_bytes=gb * 2**30)
        for rank, gb in enumerate((80, 40))
    ]
    for rank in ranks:
        rank.start()
    engine = build_served(config, listener, NotedRanks([]), print)
    try:
        assert [rank.allocated and rank.allocated.num_rows for rank in ranks] == [128, 128]
        assert engine.facts.settings["scheduler.max_num_seqs"] == 128
        assert engine.loop.scheduler.limits.max_num_batched_tokens == 1024
        assert engine.config.scheduler.num_seats == 128
    finally:
        engine.close()


def test_each_group_is_told_its_own_number_of_blocks(tmp_path: Path) -> None:
    with running(tmp_path, [], max_num_seqs=4) as (engine, address, (target, draft)):
        assert target.allocated is not None and draft.allocated is not None
        assert target.allocated.num_blocks == engine.status().kv_blocks == 4 * 2048 // 16
        assert draft.allocated.num_blocks == 4 * 768 // 16
        assert engine.facts.num_draft_blocks == 4 * 768 // 16
        assert target.allocated.num_rows == draft.allocated.num_rows == 4
        step_until_drafting(engine)
        source: Any = engine.loop._proposers
        source.give_up(source.link)
        restarted = ScriptedRank(address, "draft")
        restarted.start()
        step_until_drafting(engine)
        assert restarted.allocated == draft.allocated


def test_the_costs_of_a_step_are_what_both_groups_measured(tmp_path: Path) -> None:
    with running(tmp_path, []) as (engine, address, _):
        step_until_drafting(engine)
        models: Any = engine.check.__self__  # type: ignore[attr-defined]
        assert models.costs == StepCosts(VERIFY, FIRST_DRAFT, NEXT_DRAFT, prefill_s=1.0)
        draft: Any = engine.loop._proposers
        draft.give_up(draft.link)
        ScriptedRank(address, "draft", prefill_s=2.0).start()
        step_until_drafting(engine)
        assert models.costs.prefill_s == 2.0, "a draft that comes back brings its own"


def test_ranks_log_in_the_format_of_their_engine() -> None:
    config = EngineConfig.from_kwargs(model="m", draft_model="d", log_format="json")
    for role in (Role.TARGET, Role.DRAFT):
        assert rank_settings(config, role).log_format == "json"
