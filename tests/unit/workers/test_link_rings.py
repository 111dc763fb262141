"""The memory through which outcomes and rounds go between two devices."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpu_tools import HAS_CUDA

from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.scheduler.types import RowPlan, StepPlan
from outrider.workers.gpu import link_rings
from outrider.workers.gpu.link_rings import (
    LinkRings,
    RingShape,
    SharedMemory,
    in_plan_order,
    open_shared,
)
from outrider.workers.ranks.proposal_link import LinkOpener

SHAPE = RingShape(rows=3, depth=2)
CPU = torch.device("cpu")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="only GPUs wait for memory")]


def test_a_step_is_there_once_it_is_filled_and_remains_for_some_steps() -> None:
    rings = LinkRings.own(SHAPE, CPU)
    assert not rings.rounds.has(0)
    for step in range(6):
        rings.rounds.fill(step, np.full(SHAPE.rounds, step, dtype=np.int32))
        assert rings.rounds.has(step) and not rings.rounds.has(step + 1)
        assert not rings.outcomes.has(step)
    for step in (3, 4, 5):
        assert (rings.rounds.values(step) == step).all()


def test_steps_may_wrap_around() -> None:
    rings = LinkRings.own(SHAPE, CPU)
    last = 2**32 - 2
    rings.rounds.fill(last, np.zeros(SHAPE.rounds, dtype=np.int32))
    assert rings.rounds.has(last) and rings.rounds.has(last - 5) and not rings.rounds.has(last + 1)
    rings.rounds.fill(last + 3, np.zeros(SHAPE.rounds, dtype=np.int32))
    assert rings.rounds.has(last) and rings.rounds.has(last + 3)


def test_outcomes_are_laid_out_as_the_plan_has_its_rows() -> None:
    rows = tuple(
        RowPlan(row, 1, 1, 0, 0, samples, "", 0, (), 0, (), 0)
        for row, samples in ((2, True), (0, False), (1, True))
    )
    records = np.array(
        [[1, 7, 0, 10, 0, 0, 55, -1], [2, 7, 0, 20, 1, 1, 66, 77]], dtype=np.int64
    )  # row, generation, drafted; base_len, verified, accepted, tokens
    found = in_plan_order(StepPlan(1, 4, rows), records)
    assert found.tolist() == [[20, 1, 1, 66, 77], [0] * 5, [10, 0, 0, 55, -1]]


def test_no_process_opens_what_is_not_there() -> None:
    assert open_shared("outrider-none", SHAPE) is None
    assert open_shared("../../etc/passwd", SHAPE) is None


def _handshake(monkeypatch: pytest.MonkeyPatch, theirs: RingShape | None, register: Any) -> Any:
    """What both ends of a link agree on."""
    monkeypatch.setattr(link_rings, "_register", register)
    pair = [Channel(each, RANK_CODEC) for each in socket.socketpair()]
    ends = [LinkOpener(cast(Any, None), "", CPU, 1.0, ring_shape=each) for each in (SHAPE, theirs)]
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(ends[1]._accept, pair[1])
        offered = ends[0]._offer(pair[0])
        found = offered, accepted.result()
    for each in pair:
        each.close()
    return found


def test_ends_on_one_host_share_memory_that_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = set(os.listdir("/dev/shm"))
    target, draft = _handshake(monkeypatch, SHAPE, lambda memory: None)
    assert {each for each in os.listdir("/dev/shm") if each.startswith("outrider-")} <= files
    draft.rounds.fill(3, np.full(SHAPE.rounds, 7, dtype=np.int32))
    assert target.is_shared and target.rounds.has(3) and (target.rounds.values(3) == 7).all()
    assert not target.outcomes.has(3)


@pytest.mark.parametrize("theirs", [None, RingShape(rows=4, depth=2)])
def test_ends_that_differ_share_nothing(
    monkeypatch: pytest.MonkeyPatch, theirs: RingShape | None
) -> None:
    assert _handshake(monkeypatch, theirs, lambda memory: None) == (None, None)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_device_that_cannot_address_the_memory_leaves_it_to_messages(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    files, calls = set(os.listdir("/dev/shm")), []

    def register(memory: torch.Tensor) -> None:
        calls.append(memory)
        if len(calls) == fails_at:
            raise RuntimeError("cudaHostRegister failed with error 1")

    assert _handshake(monkeypatch, SHAPE, register) == (None, None)
    assert len(calls) == fails_at
    assert {each for each in os.listdir("/dev/shm") if each.startswith("outrider-")} <= files


def _echo(name: str) -> None:
    rings = open_shared(name, SHAPE)
    assert rings is not None
    got = torch.zeros(SHAPE.outcomes, dtype=torch.int32, device="cuda")
    for step in range(8):
        rings.outcomes.expect(step, got)
        sent = got[:1, :1].expand(SHAPE.rounds[1:]) + torch.zeros(SHAPE.rounds, device="cuda")
        rings.rounds.send(step, sent.int())
    torch.cuda.synchronize()


@pytest.mark.parametrize("by_host", [pytest.param(each, marks=on_gpu) for each in (False, True)])
def test_devices_of_two_processes_wait_for_each_other(by_host: bool) -> None:
    memory = SharedMemory(SHAPE)
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(memory.name,))
    other.start()
    rings, seen = memory.rings, torch.zeros(SHAPE.rounds, dtype=torch.int32, device="cuda")
    found = torch.zeros(8, dtype=torch.int32, device="cuda")
    for step in range(8):
        values = torch.full(SHAPE.outcomes, 10 + step, dtype=torch.int32)
        if by_host:
            threading.Timer(0.05 * step, rings.outcomes.fill, (step, values.numpy())).start()
        else:
            rings.outcomes.send(step, values.cuda()[:2])
        rings.rounds.expect(step, seen)
        found[step] = seen[0, 0, 0]
        if by_host:
            torch.cuda.synchronize()
    end_s = time.monotonic() + 60
    while not rings.rounds.has(7) and time.monotonic() < end_s:
        time.sleep(0.01)
    rings.unblock()
    assert found.tolist() == [10 + step for step in range(8)]
    other.join(30)
    memory.unlink()
    assert other.exitcode == 0
