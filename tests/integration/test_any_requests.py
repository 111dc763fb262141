"""Requests drawn at random write the plain text, however they are run.

In this process, and over the recorded passes of a GPU (in Triton's interpreter where there is
none); `test_any_requests_processes.py` has ranks in processes of their own. Engines differ in lag,
in how prompts are cut up, and in whether memory is short; each is built once for all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from any_requests import (
    BATCH,
    BLOCK_SIZE,
    Batch,
    assert_drafts_came_to_use,
    draw_requests,
    plainly,
    seeds,
    settings,
)
from gpu_tools import DEVICE, GPU_MARKS
from head_checkpoints import save_head
from same_text import (
    assert_same_text,
    content,
    contents,
    run,
    texts_of,
)

from outrider import LLM
from outrider.catalog.heads import HeadKind
from outrider.kernels.gpu.ops import GpuOps
from outrider.workers import device
from outrider.workers.gpu.step import DeviceStep

pytestmark = pytest.mark.model

EngineFactory = Callable[..., LLM]

# The interpreter takes a thousand times as long as a GPU.
SMALL_BATCH = Batch(num_requests=3, longest_prompt=14, most_tokens=6, most_samples=2)


WAYS = ("in chunks", "tight", "tight, in chunks")


@pytest.fixture(scope="module")
def ways(pair: Any) -> Mapping[str, Mapping[str, Any]]:
    return settings(BATCH, pair.target, pair.draft)


@pytest.fixture(scope="module")
def plain(engine: EngineFactory) -> LLM:
    """No draft model, nothing cached, one request at a time."""
    return engine(draft_model=None, max_num_seqs=1, enable_prefix_caching=False, device="cpu")


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", seeds(usual=3, many=150))
def test_any_requests_write_the_plain_text_in_one_process(
    seed: int, way: str, lag: int, plain: LLM, engine: EngineFactory, ways: Mapping[str, Any]
) -> None:
    requests = draw_requests(BATCH, seed)
    llm = engine(block_size=BLOCK_SIZE, lag=lag, device="cpu", **ways[way])
    outputs = run(llm, requests)
    assert contents(outputs) == contents(run(plain, plainly(requests)))
    assert_drafts_came_to_use(outputs)
    llm.engine.built.loop.scheduler.check_integrity()


@pytest.fixture(scope="module")
def heads(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    return {kind: str(save_head(kind, folder / kind, pair.reference)) for kind in HeadKind}


@pytest.mark.parametrize("kind", HeadKind)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", seeds(usual=1, many=50))
def test_any_requests_write_the_plain_text_with_a_head(
    seed: int,
    way: str,
    kind: str,
    plain: LLM,
    engine: EngineFactory,
    ways: Mapping[str, Any],
    heads: Mapping[str, str],
) -> None:
    """Those that want the draft get the head."""
    requests = [
        (prompt, replace(params, speculation=kind) if params.speculation == "draft" else params)
        for prompt, params in draw_requests(BATCH, seed)
    ]
    options = {"draft_model": None, "head_model": heads[kind], "device": "cpu", "lag": seed % 2}
    llm = engine(block_size=BLOCK_SIZE, **options, **ways[way])
    outputs = run(llm, requests)
    assert contents(outputs) == contents(run(plain, plainly(requests)))
    assert sum(each.speculation.drafted for output in outputs for each in output.outputs) > 0
    llm.engine.built.loop.scheduler.check_integrity()


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("tight")])
def test_memory_is_short_enough_to_preempt(
    way: str, engine: EngineFactory, ways: Mapping[str, Any]
) -> None:
    """Else the tests here would show nothing about it."""
    llm = engine(block_size=BLOCK_SIZE, lag=0, device="cpu", **ways[way])
    scheduler = llm.engine.built.loop.scheduler
    before = scheduler.num_preemptions
    for seed in range(6):
        run(llm, draw_requests(BATCH, seed))
    assert scheduler.num_preemptions > before + 2


# -- over recorded passes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def colocated(pair: Any) -> EngineFactory:
    """Engines whose passes are GPU kernels, wherever they run; one for each set of options."""
    built: dict[str, LLM] = {}

    def get(**options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in built:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(device, "select_ops", lambda _, __, exact, *___: GpuOps(exact))
                built[key] = LLM(
                    str(pair.target),
                    draft_model=str(pair.draft),
                    speculation_policy="fixed",
                    device=DEVICE.type,
                    dtype="float32",
                    block_size=BLOCK_SIZE,
                    num_speculative_tokens=3,
                    log_level="error",
                    **{"kv_cache_gb": 0.01, "max_model_len": SMALL_BATCH.longest, **options},
                )
            assert isinstance(built[key].engine.built.loop._target, DeviceStep)
        return built[key]

    return get


@pytest.mark.parametrize(
    ("way", "lag"),
    [
        pytest.param("in chunks", 0, marks=[*GPU_MARKS, pytest.mark.slow]),
        pytest.param("tight", 1, marks=[*GPU_MARKS, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("seed", seeds(usual=1, many=12))
def test_any_requests_write_the_plain_text_over_recorded_passes(
    seed: int,
    way: str,
    lag: int,
    pair: Any,
    plain: LLM,
    colocated: EngineFactory,
) -> None:
    """These kernels add up in another order, so texts may part at near ties; nowhere else."""
    requests = draw_requests(SMALL_BATCH, seed)
    options = settings(SMALL_BATCH, pair.target, pair.draft)[way]
    outputs = run(colocated(lag=lag, **options), requests)
    expected = run(plain, plainly(requests))
    params = [asked for _, asked in plainly(requests)]
    mine, theirs = (texts_of(plain, pair.reference, each, params) for each in (outputs, expected))
    same = [assert_same_text(a, b, margin=1e-3) for a, b in zip(mine, theirs, strict=True)]
    assert same.count(False) <= 1
    samples = [sample for output in outputs for sample in output.outputs]
    plain_samples = [sample for output in expected for sample in output.outputs]
    for is_same, found, wanted in zip(same, samples, plain_samples, strict=True):
        if is_same:  # all but the log-probabilities, which are rounded otherwise
            assert content(found)[:4] == content(wanted)[:4]
            assert (found.logprobs is None) == (wanted.logprobs is None)
            assert found.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-2)
