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
from outrider.engine.doorway import Doorway
from outrider.engine.launch.ranks import AwaitedRanks
from outrider.engine.over_ranks import group_sizes
from outrider.engine.rank_group import RankGroup
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.handshake import dial_in
from outrider.links.rank_messages import (
    Allocate,
    Described,
    Hello,
    Join,
    Joined,
    Load,
    Loaded,
    Ready,
    Role,
    Setup,
)

SECRET = "of this test"
MODEL = "smollm2-135m-draft"


class ScriptedRank(threading.Thread):
    """Says what a rank says while it starts, and ends after the answer to `last`."""

    def __init__(self, address: str, role: str, last: type | None = None) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._role = role
        self._last = last

    def run(self) -> None:
        hello = Hello(Role(self._role), 0, 1, os.getpid(), "here")
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
                return described()
            case Load():
                return Loaded(1000, None, "none", 0.0)
            case Allocate():
                return Ready()
            case Join() if self._role == "draft":
                return Joined("gloo")
        return None


def described() -> Described:
    return Described(
        device="cpu",
        vocab_size=100,
        eos_ids=(2,),
        max_position=512,
        is_extendable=False,
    )


class NotedRanks(AwaitedRanks):
    """Keeps why a draft was given up."""

    def __init__(self, lost: list[str]) -> None:
        self._lost = lost

    def replace_draft(self, reason: str) -> None:
        self._lost.append(reason)


@contextmanager
def running(tmp_path: Path, lost: list[str]) -> Iterator[tuple[BuiltEngine, str]]:
    config = EngineConfig.from_kwargs(model=MODEL, draft_model=MODEL, max_model_len=128)
    address = f"unix:{tmp_path}/engine.sock"
    doorway = Doorway([address], SECRET, group_sizes(config))
    for role in group_sizes(config):
        ScriptedRank(address, role).start()
    engine = build_served(config, doorway, NotedRanks(lost), print)
    try:
        yield engine, address
    finally:
        engine.close()


def step_until_drafting(engine: BuiltEngine, limit_s: float = 10.0) -> None:
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
    with running(tmp_path, lost) as (engine, address):
        step_until_drafting(engine)
        draft: Any = engine.loop._proposers
        draft.give_up()
        allocate = RankGroup.allocate
        dying = ScriptedRank(address, "draft", last=Allocate)

        def allocate_and_die(group: RankGroup, *sizes: Any) -> None:
            allocate(group, *sizes)
            dying.join(10)

        monkeypatch.setattr(RankGroup, "allocate", allocate_and_die)
        dying.start()
        deadline_s = time.monotonic() + 10
        while len(lost) < 2:
            assert time.monotonic() < deadline_s, "nobody was told to start it anew"
            time.sleep(0.01)
        assert "draft rank 0" in lost[1]
        ScriptedRank(address, "draft").start()
        step_until_drafting(engine)
