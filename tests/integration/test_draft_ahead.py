"""A draft in a process of its own that drafts ahead of outcomes: the text of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from process_tools import pids_of, status_of
from same_text import CASES, PLAIN, all_temperatures, case_requests, contents, run

from outrider import LLM

pytestmark = pytest.mark.model
ATTEMPTS = 20  # on a busy machine the draft may get no time while the target verifies


@pytest.fixture(scope="module")
def ahead(pair: Any) -> Any:
    with LLM(
        str(pair.target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        num_speculative_tokens=3,
        draft_ahead="on",
        workers="processes",
        deterministic=True,
        kv_cache_gb=0.05,
        num_threads=1,
        log_level="error",
    ) as llm:
        yield llm


@pytest.mark.parametrize("name", CASES)
def test_it_writes_what_one_process_writes(
    engine: Callable[..., LLM], ahead: LLM, name: str
) -> None:
    requests = case_requests(CASES[name])
    expected = contents(run(engine(), case_requests(CASES[name], **PLAIN)))
    assert contents(run(ahead, requests)) == expected


def test_outcomes_are_among_the_branches(engine: Callable[..., LLM], ahead: LLM) -> None:
    requests = all_temperatures(max_tokens=40)
    expected = contents(run(engine(), requests))
    before = after = status_of(ahead).counters.ahead
    for _ in range(ATTEMPTS):
        assert contents(run(ahead, requests)) == expected
        after = status_of(ahead).counters.ahead
        if after.hits > before.hits:
            break
    assert after.hits > before.hits and after.rounds - before.rounds > 10
    assert after.hits <= after.rounds and after.used <= after.drafted


def test_a_draft_that_dies_while_it_drafts_ahead_loses_nothing(
    engine: Callable[..., LLM], ahead: LLM
) -> None:
    requests = all_temperatures(max_tokens=60)
    expected = contents(run(engine(), requests))
    outputs = [ahead.engine.add(f"killed/{n}", *each) for n, each in enumerate(requests)]
    for _ in range(8):
        ahead.engine.step()
    [pid] = pids_of(ahead, "draft")
    os.kill(pid, signal.SIGKILL)
    while ahead.engine.has_work:
        ahead.engine.step()
    assert contents(outputs) == expected
