"""Target and draft in processes of their own: the text of one process, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from checkpoints import save_checkpoint
from process_tools import is_alive, pids_of, status_of
from same_text import (
    CASES,
    PLAIN,
    all_temperatures,
    assert_same_texts,
    by_every_method,
    case_requests,
    contents,
    repeated_for_every_method,
    run,
    texts_of,
)

from outrider import LLM, OutriderError

pytestmark = pytest.mark.model

LONG = 400


@pytest.fixture(scope="module")
def spawned(pair: Any) -> Iterator[Callable[..., LLM]]:
    """Engines of the pair with ranks as processes; one for each set of options."""
    built: dict[str, LLM] = {}

    def get(**options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in built:
            defaults = {
                "draft_model": str(pair.draft),
                "speculation_policy": "fixed",
                "workers": "processes",
                "deterministic": True,
                "kv_cache_gb": 0.05,
                "num_threads": 1,
                "log_level": "error",
            }
            built[key] = LLM(str(pair.target), **(defaults | options))
        return built[key]

    yield get
    pids = [rank.pid for llm in built.values() for rank in status_of(llm).ranks if rank.pid]
    for llm in built.values():
        llm.close()
    assert not [pid for pid in pids if is_alive(pid)], "ranks are left behind"


def test_every_rank_is_a_process_of_its_own(spawned: Callable[..., LLM]) -> None:
    status = status_of(spawned(tensor_parallel_size=2))
    roles = [(rank.role, rank.rank, rank.state) for rank in status.ranks]
    assert roles == [("target", 0, "ready"), ("target", 1, "ready"), ("draft", 0, "ready")]
    assert len({rank.pid for rank in status.ranks} | {os.getpid()}) == 4


@pytest.mark.parametrize("name", CASES)
def test_processes_write_what_one_process_writes(
    engine: Callable[..., LLM], spawned: Callable[..., LLM], name: str
) -> None:
    """Every sampling parameter by every method: with one rank each, bit for bit."""
    case = CASES[name]
    n = case.params.get("n", 1)
    expected = contents(run(engine(), case_requests(case, **PLAIN)))
    outputs = run(spawned(), by_every_method(case_requests(case)))
    assert contents(outputs) == repeated_for_every_method(expected, n)


def test_two_target_ranks_write_what_one_writes(
    engine: Callable[..., LLM], spawned: Callable[..., LLM], pair: Any
) -> None:
    llm = spawned(tensor_parallel_size=2)
    requests = by_every_method(all_temperatures(max_tokens=20))
    before = status_of(llm).proposal_sends
    expected, outputs = run(engine(), requests), run(llm, requests)
    params = [asked for _, asked in requests]
    assert_same_texts(
        zip(
            texts_of(llm, pair.reference, expected, params),
            texts_of(llm, pair.reference, outputs, params),
            strict=True,
        )
    )
    status = status_of(llm)
    assert status.proposal_backend == "tcp"
    assert status.proposal_sends > before


def test_ranks_without_our_kernels_sum_over_gloo(
    engine: Callable[..., LLM], spawned: Callable[..., LLM], pair: Any
) -> None:
    llm = spawned(tensor_parallel_size=2, cpu_kernels="torch")
    requests = by_every_method(all_temperatures(max_tokens=8))[::3]
    params = [asked for _, asked in requests]
    expected, outputs = run(engine(), requests), run(llm, requests)
    assert_same_texts(
        zip(
            texts_of(llm, pair.reference, expected, params),
            texts_of(llm, pair.reference, outputs, params),
            strict=True,
        )
    )


def test_a_plan_made_before_the_last_verdict_changes_nothing(
    engine: Callable[..., LLM], spawned: Callable[..., LLM]
) -> None:
    """One step behind, as on a GPU: the draft is told of plans and verdicts out of step."""
    requests = all_temperatures(max_tokens=20)
    expected = contents(run(engine(), [(p, replace(s, **PLAIN)) for p, s in requests]))
    outputs = run(spawned(lag=1), by_every_method(requests))
    assert contents(outputs) == repeated_for_every_method(expected)
    drafted = sum(output.outputs[0].speculation.drafted for output in outputs)
    assert drafted > 0


def test_rejection_sampling_gets_the_drafts_distributions(
    engine: Callable[..., LLM], spawned: Callable[..., LLM]
) -> None:
    """Its texts depend on q, and on how far each round drafts, so they are one process's only if q
    arrives whole and plans are made at the same moments."""
    requests = all_temperatures(max_tokens=20, speculation="draft", num_speculative_tokens=3)
    expected = run(engine(verification="rejection"), requests)
    assert contents(run(spawned(verification="rejection", lag=0), requests)) == contents(expected)


class Stream:
    """Steps an engine by hand, so that something can happen between two tokens."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        requests = all_temperatures(max_tokens=LONG, ignore_eos=True, speculation="draft")
        self.outputs = [
            llm.engine.add(f"{time.monotonic()}-{i}", prompt, params)
            for i, (prompt, params) in enumerate(requests)
        ]

    def step_until(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while self.llm.engine.has_work and not done():
            assert time.monotonic() < deadline_s, "it takes too long"
            self.llm.engine.step()

    def num_tokens(self) -> int:
        return min(len(output.outputs[0].token_ids) for output in self.outputs)

    def texts(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_draft_costs_no_token_and_comes_back(
    spawned: Callable[..., LLM], lag: int
) -> None:
    llm = spawned(tensor_parallel_size=2, lag=lag)
    undisturbed = Stream(llm)
    undisturbed.step_until(lambda: False)
    target_pids, [draft_pid] = pids_of(llm, "target"), pids_of(llm, "draft")
    losses = status_of(llm).draft_losses

    stream = Stream(llm)
    stream.step_until(lambda: stream.num_tokens() > 30)
    os.kill(draft_pid, signal.SIGKILL)
    stream.step_until(lambda: status_of(llm).draft_losses > losses)
    assert status_of(llm).draft_losses == losses + 1
    assert pids_of(llm, "target") == target_pids
    tokens_at_loss = stream.num_tokens()
    stream.step_until(lambda: stream.num_tokens() > tokens_at_loss + 20)
    while stream.llm.engine.has_work and status_of(llm).proposal_backend == "":
        stream.llm.engine.step()
        time.sleep(0.05)  # the new rank needs the cores, and the text must not end before it is up
    rejoined_at = stream.num_tokens()
    stream.step_until(lambda: False)
    assert tokens_at_loss < rejoined_at < LONG, "it came back too late to show anything"
    assert pids_of(llm, "draft") != [draft_pid]
    assert status_of(llm).proposal_sends > 0, "the new draft has drafted"
    assert status_of(llm).draft_losses == losses + 1, "and has stayed"
    assert stream.texts() == undisturbed.texts()


@pytest.mark.slow
def test_a_hanging_draft_is_given_up_and_replaced(
    spawned: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.links.listener.RANK_SILENCE_S", 2.5)
    llm = spawned(seed=3)
    [draft_pid] = pids_of(llm, "draft")
    stream = Stream(llm)
    stream.step_until(lambda: stream.num_tokens() > 10)
    os.kill(draft_pid, signal.SIGSTOP)
    stream.step_until(lambda: status_of(llm).draft_losses > 0)
    stream.step_until(lambda: False)
    assert not is_alive(draft_pid) or pids_of(llm, "draft") != [draft_pid]


def test_a_lost_target_rank_ends_the_engine_with_a_sentence(spawned: Callable[..., LLM]) -> None:
    llm = spawned(tensor_parallel_size=2, seed=4)
    stream = Stream(llm)
    stream.step_until(lambda: stream.num_tokens() > 3)
    os.kill(pids_of(llm, "target")[1], signal.SIGKILL)
    with pytest.raises(OutriderError, match="target rank"):
        stream.step_until(lambda: False)


def test_a_rank_that_cannot_load_says_why(tmp_path: Any) -> None:
    save_checkpoint(tmp_path, "llama")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(OutriderError, match="is damaged or incomplete"):
        LLM(str(tmp_path), workers="processes", log_level="error")


def test_more_ranks_than_heads_are_refused_with_the_models_number(pair: Any) -> None:
    with pytest.raises(OutriderError, match="attention heads; use at most"):
        LLM(str(pair.target), tensor_parallel_size=64, log_level="error")
