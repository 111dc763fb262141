"""Another draft takes the place of the present one while texts are written: target and texts stay
what they are, and the KV of the new one is as large as its own sizes allow."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import shorten
from process_tools import pids_of, status_of

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.text.outputs import RequestOutput

pytestmark = [pytest.mark.model]

LENGTH = 400


@pytest.fixture(scope="module")
def deeper_draft(pair: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With half as many layers again, and so as much more KV for a token."""
    folder = tmp_path_factory.mktemp("deeper")
    shorten(pair.reference, 3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(pair: Any) -> Iterator[LLM]:
    with LLM(
        str(pair.target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        workers="processes",
        deterministic=True,
        kv_cache_gb=0.0025,
        max_num_seqs=4,
        max_model_len=512,
        num_threads=1,
        log_level="error",
    ) as llm:
        yield llm


def _begin(llm: LLM) -> list[RequestOutput]:
    """Two requests, of which one asks for much."""
    plain = {"max_tokens": LENGTH, "ignore_eos": True}
    rich = plain | {"temperature": 0.8, "seed": 3, "n": 2, "logprobs": 2}
    engine = llm.engine
    return [
        engine.add(f"{time.monotonic_ns()}", [5, 9, 11], _params(**plain)),
        engine.add(f"{time.monotonic_ns()}", [7, 8, 40, 41], _params(**rich)),
    ]


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | given))


def _step_until(llm: LLM, condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    while llm.engine.has_work and not condition():
        llm.engine.step()
        time.sleep(pause_s)


def _num_tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(each.token_ids) for output in outputs for each in output.outputs)


def _texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def _with_draft(llm: LLM, **changes: Any) -> EngineConfig:
    config = llm.engine.built.config
    return dataclasses.replace(config, draft=dataclasses.replace(config.draft, **changes))


def _swap(llm: LLM, config: EngineConfig) -> None:
    _await_draft(llm)
    [draft_pid] = pids_of(llm, "draft")
    llm.engine.built.change_draft(config)
    os.kill(draft_pid, signal.SIGKILL)  # whoever keeps ranks starts one anew


def _await_draft(llm: LLM) -> None:
    """Between two steps, or without any."""
    deadline_s = time.monotonic() + 60
    while status_of(llm).proposal_backend == "":
        assert time.monotonic() < deadline_s, "there is no draft"
        llm.engine.built.check()
        llm.engine.built.loop.follow_draft()
        time.sleep(0.05)


def _is_drafting(llm: LLM) -> bool:
    status = status_of(llm)
    return status.proposal_backend != "" and status.proposal_sends > 0


def test_another_draft_takes_over_under_way_and_no_token_differs(
    llm: LLM, pair: Any, deeper_draft: Path
) -> None:
    undisturbed = _begin(llm)
    _step_until(llm, lambda: False)
    scheduler, [target_pid] = llm.engine.built.loop.scheduler, pids_of(llm, "target")
    [first_pid], blocks = pids_of(llm, "draft"), scheduler.draft_pool.num_blocks

    outputs = _begin(llm)
    _step_until(llm, lambda: _num_tokens(outputs) > 60)
    _swap(llm, _with_draft(llm, model=str(deeper_draft)))
    _step_until(llm, lambda: pids_of(llm, "draft") != [first_pid] and _is_drafting(llm), 0.05)
    joined_at = _num_tokens(outputs)
    assert joined_at < _num_tokens(undisturbed) - 50, "it came too late to show anything"
    assert scheduler.draft_pool.num_blocks == pytest.approx(blocks * 2 / 3, abs=1)
    assert llm.engine.built.facts.settings["draft.model"] == str(deeper_draft)
    scheduler.check_integrity()
    _swap(llm, _with_draft(llm, model=str(pair.draft)))
    _step_until(llm, lambda: False)
    assert _texts(outputs) == _texts(undisturbed)
    assert pids_of(llm, "target") == [target_pid]
    scheduler.check_integrity()


def test_a_draft_that_does_not_load_is_told_and_the_one_before_may_come_back(
    llm: LLM, tmp_path: Path
) -> None:
    built = llm.engine.built
    present = built.facts.settings["draft.model"]
    _swap(llm, _with_draft(llm, model=str(tmp_path / "nowhere")))
    deadline_s = time.monotonic() + 60
    while "nowhere" not in built.draft_error():
        assert time.monotonic() < deadline_s
        built.check()
        built.loop.follow_draft()
        time.sleep(0.05)
    built.change_draft(_with_draft(llm, model=present))
    outputs = _begin(llm)
    _step_until(llm, lambda: _is_drafting(llm), 0.05)
    assert built.draft_error() == ""
    assert _is_drafting(llm) and _num_tokens(outputs) > 0
    assert built.facts.settings["draft.model"] == present


def test_a_draft_is_neither_left_out_nor_added_while_the_engine_runs(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="neither left out nor added"):
        llm.engine.built.change_draft(_with_draft(llm, model=None))


def test_an_engine_that_holds_its_models_refuses_another_draft(engine: Any) -> None:
    alone = engine()
    with pytest.raises(ConfigError, match="where the engine holds its models"):
        alone.engine.built.change_draft(_with_draft(alone, model="other"))
