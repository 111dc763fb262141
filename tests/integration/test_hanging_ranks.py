"""Ranks whose main thread hangs while their process lives on and, mostly, sends heartbeats."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hanging_rank
import pytest
from process_tools import is_alive, pids_of, status_of

from outrider import LLM, OutriderError, SamplingParams
from outrider.links.listener import Listener
from outrider.links.rank_messages import Role
from outrider.links.secret import SECRET_VARIABLE

pytestmark = pytest.mark.model

STALL_S = 2.5
LIMIT_S = 60.0


@contextmanager
def hanging_llm(pair: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    command = (sys.executable, hanging_rank.__file__)
    monkeypatch.setattr("outrider.engine.launch.ranks.SpawnedRanks.command", command)
    monkeypatch.setenv(hanging_rank.HANG_VARIABLE, kind)
    llm = LLM(
        str(pair.target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        workers="processes",
        stall_timeout_s=STALL_S,
        kv_cache_gb=0.05,
        num_threads=1,
        log_level="error",
    )
    pids = [rank.pid for rank in status_of(llm).ranks]
    try:
        yield llm
    finally:
        llm.close()
    assert not [pid for pid in pids if is_alive(pid)], "ranks are left behind"


def until(done: Callable[[], bool], work: Callable[[], object] = lambda: time.sleep(0.02)) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline_s, "it takes too long"
        work()


def stream(llm: LLM, num_tokens: int) -> Callable[[], int]:
    """A long text under way, past its first passes; how many tokens it has."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, speculation="draft", seed=1)
    output = llm.engine.add(f"{time.monotonic()}", "hello there", params)

    def length() -> int:
        return len(output.outputs[0].token_ids)

    until(lambda: length() > 20, llm.engine.step)
    return length


@pytest.mark.parametrize("kind", ["python", "kernel that holds the lock"])
def test_a_draft_that_hangs_is_killed_and_replaced_while_the_text_goes_on(
    pair: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with hanging_llm(pair, kind, monkeypatch) as llm:
        length = stream(llm, 200)
        [draft] = pids_of(llm, "draft")
        os.kill(draft, signal.SIGUSR2)
        until(lambda: length() == 200, llm.engine.step)
        assert status_of(llm).draft_losses == 1
        until(lambda: not is_alive(draft))
        until(lambda: status_of(llm).proposal_backend != "", lambda: stream(llm, 30))
        assert pids_of(llm, "draft") != [draft]


def test_a_target_that_hangs_in_a_kernel_ends_the_engine_with_a_sentence(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging_llm(pair, "kernel", monkeypatch) as llm:
        length = stream(llm, 400)
        os.kill(pids_of(llm, "target")[0], signal.SIGUSR2)
        with pytest.raises(OutriderError, match="target rank 0 .* has not answered"):
            until(lambda: length() == 400, llm.engine.step)


def test_a_rank_that_nobody_keeps_ends_when_its_engine_has_given_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, secret = f"unix:{tmp_path}/engine.sock", secrets.token_hex(8)
    monkeypatch.setenv(hanging_rank.HANG_VARIABLE, "python")
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    listener = Listener([address], secret, {Role.TARGET: 1})
    command = [sys.executable, hanging_rank.__file__, "--engine", address]
    command += ["--role", Role.TARGET, "--rank", "0", "--size", "1"]
    with subprocess.Popen(command) as rank:
        try:
            [arrival] = listener.take_group(Role.TARGET, LIMIT_S)
            until(lambda: listener._store_slots._value < 2)  # it watches its link by now
            rank.send_signal(signal.SIGUSR2)
            arrival.channel.close()
            assert rank.wait(LIMIT_S) == 1
        finally:
            rank.kill()
            listener.close()
