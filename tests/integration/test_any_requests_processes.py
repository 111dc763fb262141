"""Requests drawn at random write the plain text over ranks in processes, though the draft dies.

The batches are those of `test_any_requests.py`; each engine is built once for all of them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from any_requests import (
    BATCH,
    BLOCK_SIZE,
    assert_drafts_came_to_use,
    draw_requests,
    plainly,
    seeds,
    settings,
)
from process_tools import pids_of, status_of
from same_text import Asked, contents, run

from outrider import LLM
from outrider.text.outputs import RequestOutput

pytestmark = pytest.mark.model

EngineFactory = Callable[..., LLM]


@pytest.fixture(scope="module")
def ways(pair: Any) -> Mapping[str, Mapping[str, Any]]:
    return settings(BATCH, pair.target, pair.draft)


@pytest.fixture(scope="module")
def plain(engine: EngineFactory) -> LLM:
    """No draft model, nothing cached, one request at a time."""
    return engine(draft_model=None, max_num_seqs=1, enable_prefix_caching=False, device="cpu")


@pytest.fixture(scope="module")
def spawned(pair: Any) -> Iterator[EngineFactory]:
    """Engines of the pair with ranks as processes; one for each set of options."""
    built: dict[str, LLM] = {}

    def get(**options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in built:
            built[key] = LLM(
                str(pair.target),
                draft_model=str(pair.draft),
                speculation_policy="fixed",
                workers="processes",
                device="cpu",
                deterministic=True,
                num_threads=1,
                log_level="error",
                **{"kv_cache_gb": 0.05, "block_size": BLOCK_SIZE, **options},
            )
        return built[key]

    yield get
    for llm in built.values():
        llm.close()


def run_and_kill_the_draft(llm: LLM, requests: list[Asked], at_step: int) -> list[RequestOutput]:
    """All texts; the draft dies in the middle of them, and a new one may join before they end."""
    name = f"{time.monotonic()}"
    outputs = [
        llm.engine.add(f"{name}-{i}", prompt, params) for i, (prompt, params) in enumerate(requests)
    ]
    [draft] = pids_of(llm, "draft")
    deadline_s = time.monotonic() + 60
    step = 0
    while llm.engine.has_work:
        assert time.monotonic() < deadline_s, "it takes too long"
        if step == at_step:
            os.kill(draft, signal.SIGKILL)
        llm.engine.step()
        step += 1
    assert step > at_step, "all texts ended before the draft did"
    return outputs


def wait_for_a_draft(llm: LLM) -> None:
    """The engine takes a new one in between steps, so it must have something to do."""
    deadline_s = time.monotonic() + 60
    while status_of(llm).proposal_backend == "":
        assert time.monotonic() < deadline_s, "no new draft has come"
        run(llm, plainly(draw_requests(BATCH, seed=0))[:1])
        time.sleep(0.05)


@pytest.mark.parametrize(("way", "lag"), [("in chunks", 0), ("tight", 1)])
@pytest.mark.parametrize("seed", seeds(usual=4, many=60))
def test_any_requests_write_the_plain_text_over_processes(
    seed: int, way: str, lag: int, plain: LLM, spawned: EngineFactory, ways: Mapping[str, Any]
) -> None:
    requests = draw_requests(BATCH, seed)
    llm = spawned(lag=lag, **ways[way])
    wait_for_a_draft(llm)
    outputs = run(llm, requests)
    assert contents(outputs) == contents(run(plain, plainly(requests)))
    assert_drafts_came_to_use(outputs)


@pytest.mark.parametrize(("way", "lag"), [("in chunks", 0), ("tight", 1)])
@pytest.mark.parametrize("seed", seeds(usual=1, many=12))
def test_any_requests_write_the_plain_text_while_the_draft_dies(
    seed: int, way: str, lag: int, plain: LLM, spawned: EngineFactory, ways: Mapping[str, Any]
) -> None:
    requests = draw_requests(BATCH, seed)
    llm = spawned(lag=lag, **ways[way])
    wait_for_a_draft(llm)
    losses = status_of(llm).draft_losses
    outputs = run_and_kill_the_draft(llm, requests, at_step=3 + seed % 9)
    assert contents(outputs) == contents(run(plain, plainly(requests)))
    assert status_of(llm).draft_losses == losses + 1
