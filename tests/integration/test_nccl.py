"""NCCL for real: target TP 2 and draft TP 1 as three processes, on as many GPUs as there are. It
sums over ranks, and under rejection sampling it carries the distributions of draft tokens.

With `OUTRIDER_NCCL_JSON` set, what was seen is written there.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import pids_of, status_of
from same_text import all_temperatures, assert_same_texts, run, texts_of

from outrider import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

NUM_TOKENS = 48
LONG = 300
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "kv_cache_gb": 0.5,
    "max_model_len": 1024,
    "num_speculative_tokens": 3,
    "log_level": "warning",
}


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    seen: dict[str, Any] = {
        "command": "python -m pytest -m gpu tests/integration/test_nccl.py",
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    yield seen
    if path := os.environ.get("OUTRIDER_NCCL_JSON"):
        Path(path).write_text(json.dumps(seen, indent=2) + "\n")


@pytest.fixture(scope="module")
def three_ranks(pair: Any) -> Iterator[LLM]:
    with LLM(
        str(pair.target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        tensor_parallel_size=2,
        draft_tensor_parallel_size=1,
        **OPTIONS,
    ) as llm:
        yield llm


def test_three_ranks_write_what_one_process_writes(
    three_ranks: LLM, pair: Any, record: dict[str, Any]
) -> None:
    one = LLM(str(pair.target), draft_model=str(pair.draft), speculation_policy="fixed", **OPTIONS)
    requests = all_temperatures(max_tokens=NUM_TOKENS, ignore_eos=True)
    params = [asked for _, asked in requests]
    expected, outputs = run(one, requests), run(three_ranks, requests)
    assert_same_texts(
        zip(
            texts_of(one, pair.reference, expected, params),
            texts_of(one, pair.reference, outputs, params),
            strict=True,
        )
    )
    status = status_of(three_ranks)
    drafting_steps = max(output.outputs[0].speculation.rounds for output in outputs) - 1
    assert status.proposal_backend == "tcp"
    assert {rank.device for rank in status.ranks} == {"cuda"}
    assert len({rank.pid for rank in status.ranks}) == 3
    assert status.proposal_sends >= drafting_steps > 0
    record["one process and three ranks"] = {
        "texts": len(outputs),
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "equal texts": sum(
            a.outputs[0].token_ids == b.outputs[0].token_ids
            for a, b in zip(expected, outputs, strict=True)
        ),
        "backend": status.proposal_backend,
        "sends": status.proposal_sends,
        "accepted": sum(output.outputs[0].speculation.accepted for output in outputs),
        "drafted": sum(output.outputs[0].speculation.drafted for output in outputs),
        "ranks": [(rank.role, rank.rank, rank.device) for rank in status.ranks],
    }


def test_a_killed_draft_leaves_the_target_ranks_alone(
    three_ranks: LLM, record: dict[str, Any]
) -> None:
    llm = three_ranks
    undisturbed = _start(llm)
    _step(llm, lambda: False)
    target_pids, [draft_pid] = pids_of(llm, "target"), pids_of(llm, "draft")

    outputs = _start(llm)
    _step(llm, lambda: len(outputs[0].outputs[0].token_ids) > 30)
    os.kill(draft_pid, signal.SIGKILL)
    killed_at = len(outputs[0].outputs[0].token_ids)
    _step(llm, lambda: status_of(llm).draft_losses == 1)
    _step(llm, lambda: status_of(llm).proposal_sends > 0 and status_of(llm).proposal_backend != "")
    rejoined_at = len(outputs[0].outputs[0].token_ids)
    _step(llm, lambda: False)
    status = status_of(llm)
    same = [
        a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(undisturbed, outputs, strict=True)
    ]
    record["draft killed"] = {
        "at token": killed_at,
        "drafting again at token": rejoined_at,
        "of": LONG,
        "target pids unchanged": pids_of(llm, "target") == target_pids,
        "draft pid changed": pids_of(llm, "draft") != [draft_pid],
        "losses": status.draft_losses,
        "backend": status.proposal_backend,
        "sends since": status.proposal_sends,
        "equal texts": f"{sum(same)} of {len(same)}",
    }
    assert pids_of(llm, "target") == target_pids
    assert all(same)
    assert status.draft_losses == 1 and status.proposal_backend == "tcp"
    assert status.proposal_sends > 10


def test_nccl_carries_the_distributions_of_rejection_sampling(pair: Any) -> None:
    with LLM(
        str(pair.target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        verification="rejection",
        workers="processes",
        **OPTIONS,
    ) as llm:
        requests = all_temperatures(max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = run(llm, requests)
        status = status_of(llm)
    assert status.proposal_backend == "nccl" and status.proposal_sends > 0
    assert status.draft_losses == 0
    assert sum(output.outputs[0].speculation.accepted for output in outputs) > 0


def _start(llm: LLM) -> list[Any]:
    requests = all_temperatures(max_tokens=LONG, ignore_eos=True, speculation="draft")[:3]
    return [llm.engine.add(f"{time.monotonic()}", prompt, params) for prompt, params in requests]


def _step(llm: LLM, done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while llm.engine.has_work and not done():
        assert time.monotonic() < deadline_s, "it takes too long"
        llm.engine.step()
