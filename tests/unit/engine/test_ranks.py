"""Ranks that are children of this process; a sleeping one stands for each, without a model."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider.engine.launch.ranks import SpawnedRanks

ASLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@contextmanager
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SpawnedRanks, queue.Queue[str]]]:
    monkeypatch.setattr("outrider.engine.launch.ranks.SpawnedRanks.command", ASLEEP)
    monkeypatch.setattr("outrider.engine.launch.ranks._STOP_TIMEOUT_S", 0.0)
    lines: queue.Queue[str] = queue.Queue()
    ranks = SpawnedRanks({"target": 1, "draft": 2}, "cpu")
    ranks.start(lines.put)
    try:
        draft_pids(ranks, others_than=[])
        ranks.restart_drafts()
        yield ranks, lines
    finally:
        ranks.close()


def draft_pids(ranks: SpawnedRanks, others_than: list[int], limit_s: float = 60.0) -> list[int]:
    deadline_s = time.monotonic() + limit_s
    while True:
        pids = [process.pid for process in ranks._processes.get("draft", [])]
        if pids and not set(pids) & set(others_than):
            return pids
        assert time.monotonic() < deadline_s, "no draft was started"
        time.sleep(0.01)


def test_when_one_rank_of_a_draft_ends_all_of_it_is_started_anew_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with started(monkeypatch) as (ranks, lines):
        before = draft_pids(ranks, others_than=[])
        target = ranks._processes["target"][0]
        os.kill(before[1], signal.SIGKILL)
        told = lines.get(timeout=60)
        assert told.startswith("draft lost, decoding goes on without it: draft rank 1 ended with")
        assert told.endswith("exit code -9; restarting in 0 s")
        assert len(draft_pids(ranks, others_than=before)) == 2
        assert target.poll() is None


def test_a_draft_that_the_engine_gave_up_is_replaced_for_the_engines_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with started(monkeypatch) as (ranks, lines):
        before = draft_pids(ranks, others_than=[])
        ranks.replace_draft("it hangs.")
        assert "without it: it hangs; restarting" in lines.get(timeout=60)
        after = draft_pids(ranks, others_than=before)
        os.kill(after[0], signal.SIGKILL)
        assert "draft rank 0 ended with exit code -9" in lines.get(timeout=60)


def test_ranks_without_a_draft_keep_the_thread_that_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel ends a child with the thread that has started it, not with the process."""
    monkeypatch.setattr("outrider.engine.launch.ranks.SpawnedRanks.command", ASLEEP)
    monkeypatch.setattr("outrider.engine.launch.ranks._STOP_TIMEOUT_S", 0.0)
    before = set(threading.enumerate())
    ranks = SpawnedRanks({"target": 1}, "cpu")
    ranks.start(print)
    try:
        [starter] = set(threading.enumerate()) - before
        starter.join(0.5)
        assert ranks._processes["target"][0].poll() is None
        assert starter.is_alive()
    finally:
        ranks.close()
    starter.join(60)
    assert not starter.is_alive()


def test_on_a_host_without_drivers_of_gpus_an_engine_starts_its_ranks_without_torch() -> None:
    code = (
        "import sys; import outrider.engine.__main__;"
        "from outrider.engine.launch import ranks; ranks._GPU_DRIVERS = ();"
        "made = ranks.SpawnedRanks({'target': 1}, 'auto');"
        "print(made._gpu_variables('target', 0), 'torch' in sys.modules); made.close()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "{} False\n", found.stderr
