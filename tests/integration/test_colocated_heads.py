"""Heads beside the target on one GPU, or, without one, the same passes in Triton's interpreter.

Texts are those of an engine that decodes plainly in plain torch; what is drafted, accepted and
remembered is what the same head does on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_model
from gpu_tools import DEVICE, GPU_MARKS
from head_checkpoints import DEEP, save_head
from same_text import assert_same_texts, texts_of

from outrider import LLM, SamplingParams
from outrider.catalog.heads import HeadKind
from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.ops import select_ops
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.text.outputs import RequestOutput
from outrider.workers import device
from outrider.workers.gpu import drafting, passes
from outrider.workers.gpu.head_passes import HeadPasses
from outrider.workers.gpu.step import DeviceStep
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.head import HeadProposer
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.target import LocalTarget

pytestmark = [pytest.mark.model, *GPU_MARKS]

SELECT_OPS = select_ops
KINDS = (*HeadKind, DEEP)
VOCAB_SIZE = 8  # so few that a head without sense is right now and then
NUM_TOKENS = 6
SEEDS = {"target": 3, "head": 2}  # some of whose drafts are right, of each kind of request
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # another share than the head's, so other tiles
    "head_dim": 16,
}
COMMON: dict[str, Any] = {
    "kv_cache_gb": 0.005,
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "log_level": "error",
    "dtype": "float32",
    "speculation_policy": "fixed",  # the interpreter's times say nothing
    "num_speculative_tokens": 3,
}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.02,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0, 5: -2.0},
    "logprobs": 2,
}
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **own)
    for seed, own in enumerate([{"temperature": 0.0}, {"temperature": 1.0}, EVERYTHING])
]


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


PROMPTS = [_prompt(length, length) for length in (2, 9, 20)]


class Models:
    def __init__(self, folder: Path) -> None:
        self.reference = random_model("llama", SEEDS["target"], **SIZES)
        self.target = folder / "target"
        self.reference.save_pretrained(self.target)
        self.heads: dict[str, Path] = {
            kind: save_head(kind, folder / kind, self.reference, SEEDS["head"]) for kind in KINDS
        }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def plain(models: Models) -> LLM:
    """On the CPU, without speculation."""
    return LLM(str(models.target), device="cpu", **COMMON)


@pytest.fixture
def colocated(models: Models, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Engines whose passes are GPU kernels, wherever they run."""
    monkeypatch.setattr(device, "select_ops", lambda _, __, exact, *___: GpuOps(exact))

    def build(kind: str, **options: Any) -> LLM:
        defaults = {"head_model": str(models.heads[kind]), "lag": 1, "device": DEVICE.type}
        llm = LLM(str(models.target), **(COMMON | defaults | options))
        assert isinstance(llm.engine.built.loop._target, DeviceStep)
        return llm

    return build


def _worker(llm: LLM) -> DeviceStep:
    worker = llm.engine.built.loop._target
    assert isinstance(worker, DeviceStep)
    return worker


def _heading(llm: LLM) -> HeadPasses:
    [heading] = (
        each for each in _worker(llm)._device_proposers.values() if isinstance(each, HeadPasses)
    )
    return heading


def _host_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans of all steps from now on that leave the device."""
    target = _worker(llm)._target
    verify, plans = target.verify, []

    def watched(plan: StepPlan, ticket: Ticket) -> Verdict:
        plans.append(plan)
        return verify(plan, ticket)

    monkeypatch.setattr(target, "verify", watched)
    return plans


def _check(
    llm: LLM,
    models: Models,
    plain: LLM,
    prompts: Sequence[list[int]] = PROMPTS,
    params: Sequence[SamplingParams] = PARAMS,
) -> list[RequestOutput]:
    outputs = llm.generate([*prompts], [*params])
    expected = plain.generate([*prompts], [*params])
    pairs = zip(
        texts_of(plain, models.reference, expected, params),
        texts_of(llm, models.reference, outputs, params),
        strict=True,
    )
    assert_same_texts(pairs)
    return outputs


def _counts(outputs: Sequence[RequestOutput]) -> list[tuple[int, int]]:
    told = [output.outputs[0].speculation for output in outputs]
    return [(each.drafted, each.accepted) for each in told]


def _on_the_host(models: Models, kind: str) -> LLM:
    """The same head in plain torch, whatever kernels others have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "select_ops", SELECT_OPS)
        llm = LLM(str(models.target), device="cpu", head_model=str(models.heads[kind]), **COMMON)
    assert isinstance(llm.engine.built.loop._target, LocalTarget)
    return llm


SLOW_KINDS = [
    kind if kind == HeadKind.EAGLE3 else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_plain_ones_and_drafts_those_of_the_head_on_the_host(
    colocated: Callable[..., LLM],
    models: Models,
    plain: LLM,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Greedy, sampled and with all parameters in one step."""
    expected = _on_the_host(models, kind).generate(PROMPTS, PARAMS)
    llm = colocated(kind, lag=0)
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, plain)
    assert not on_host
    assert _counts(outputs) == _counts(expected)
    assert sum(accepted for _, accepted in _counts(outputs)) > 0


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_what_the_device_remembers_is_what_a_fresh_pass_over_the_text_gives(
    colocated: Callable[..., LLM], kind: str
) -> None:
    """Slots that it fed itself while it drafted are written again from the target's pass, and a
    step on the host would go on from there."""
    llm = colocated(kind, lag=0, num_speculative_tokens=2)
    prompt = PROMPTS[1]
    output = llm.engine.add("one", prompt, PARAMS[0])
    while len(output.outputs[0].token_ids) < NUM_TOKENS - 2:
        llm.engine.step()
    text = [*prompt, *output.outputs[0].token_ids]
    assert _worker(llm)._state.text.lengths.tolist() == [len(text), 0, 0]
    _assert_remembers(_worker(llm), 0, text)


@pytest.mark.slow
def test_steps_in_which_nobody_drafts_with_a_head_go_without_it(
    colocated: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such requests leave in the cache is no use to one that has the head beside it."""
    llm = colocated("eagle3", lag=0, num_speculative_tokens=2)
    extend, num_passes = HeadPasses.extend, 0

    def counted(heading: HeadPasses, num_tokens: int, num_logits: int) -> None:
        nonlocal num_passes
        num_passes += 1
        extend(heading, num_tokens, num_logits)

    monkeypatch.setattr(HeadPasses, "extend", counted)
    engine, prompt = llm.engine, PROMPTS[1]
    plain = dataclasses.replace(PARAMS[0], speculation="off")
    llm.generate([prompt, PROMPTS[0]], [plain, dataclasses.replace(plain, speculation="ngram")])
    assert num_passes == 0
    output = engine.add("one", prompt, PARAMS[0])
    engine.add("other", prompt, plain)
    while len(output.outputs[0].token_ids) < NUM_TOKENS - 2:
        engine.step()
    assert num_passes > 0
    row = engine.built.loop.scheduler._running_requests.running[0].row
    _assert_remembers(_worker(llm), row, [*prompt, *output.outputs[0].token_ids])


def _assert_remembers(worker: DeviceStep, row: int, text: list[int]) -> None:
    proposer = worker._proposers.of(worker._rows[row].init.proposer)
    assert isinstance(proposer, HeadProposer)
    assert proposer._lengths[row] == len(text)
    used, fresh = proposer.runner, _fresh(proposer.runner)
    fresh.target.forward([RowChunk(0, 0, text[:-1])])
    passed = fresh.target.last_pass
    assert passed is not None
    states = fresh.extend([RowChunk(0, 0, text[1:])], passed.features)
    torch.testing.assert_close(used.states[row], states[-1], rtol=1e-4, atol=1e-4)
    if used.kv is None or fresh.kv is None:
        return
    block_size, num_slots = used.kv.block_size, len(text) - 1
    blocks = worker._state.target_tables[row, : -(-num_slots // block_size)].tolist()
    pairs = zip((*used.kv.keys, *used.kv.values), (*fresh.kv.keys, *fresh.kv.values), strict=True)
    for own, expected in pairs:
        found = own[blocks].transpose(1, 2).flatten(0, 1)[:num_slots]
        wanted = expected[: len(blocks)].transpose(1, 2).flatten(0, 1)[:num_slots]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def _fresh(used: HeadRunner) -> HeadRunner:
    target, kv = used.target, used.target.kv
    own = KVCache(target.decoder.spec, 8, kv.block_size, torch.float32, target.device)
    runner = Runner(target.decoder, own, 1, COMMON["max_model_len"], VOCAB_SIZE)
    runner.extend_table(0, 0, list(range(8)))
    return HeadRunner(used.head, runner)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HeadKind)
def test_ahead_of_verdicts_and_behind_cached_prefixes_texts_are_the_plain_ones(
    colocated: Callable[..., LLM],
    models: Models,
    plain: LLM,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """It is asked for more drafts than two of the heads can make, and others may."""
    llm = colocated(kind, num_speculative_tokens=5)
    assert _worker(llm).max_depth == 5
    on_host = _host_steps(llm, monkeypatch)
    for _ in range(2):
        outputs = _check(llm, models, plain)
        assert sum(accepted for _, accepted in _counts(outputs)) > 0
        deepest = max(len(output.outputs[0].speculation.verified_at) for output in outputs)
        assert deepest > 3 if kind == HeadKind.EAGLE3 else deepest == 3
    assert llm.engine.built.loop.scheduler._planner.num_cached_tokens > 0
    assert not on_host


@pytest.mark.slow
def test_large_rounds_and_passes_that_are_not_recorded_draft_the_same(
    colocated: Callable[..., LLM], models: Models, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are many here, and so are five tokens."""
    expected = _on_the_host(models, "eagle3").generate(PROMPTS, PARAMS)
    monkeypatch.setattr(drafting, "_ROUND_ROWS", (1,))
    monkeypatch.setattr(passes, "_DECODE_TOKENS", 4)
    monkeypatch.setattr(passes, "MAX_MIXED_TOKENS", 16)
    outputs = _check(colocated("eagle3", lag=0), models, plain)
    assert _counts(outputs) == _counts(expected)


@pytest.mark.slow
def test_a_head_remembers_the_same_behind_drafts_of_which_some_were_selected(
    colocated: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A selection moves tokens of the pass about, and nobody on the host sees it."""
    llm = colocated("eagle3", lag=0)
    _select_half(llm, monkeypatch)
    engine, scheduler = llm.engine, llm.engine.built.loop.scheduler
    outputs = [engine.add(str(i), PROMPTS[i], PARAMS[i]) for i in range(2)]
    while min(len(output.outputs[0].token_ids) for output in outputs) < NUM_TOKENS - 3:
        engine.step()
    assert scheduler.stats.drafted_tokens > 0
    for row, output in enumerate(outputs):
        _assert_remembers(_worker(llm), row, [*PROMPTS[row], *output.outputs[0].token_ids])


def _select_half(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps verify half of their drafts."""
    scheduler = llm.engine.built.loop.scheduler
    make_plan = scheduler.plan

    def plan_selection(now_s: float) -> StepPlan | None:
        plan = make_plan(now_s)
        if plan is None:
            return None
        drafts = sum(row.num_verified for row in plan.rows)
        return dataclasses.replace(plan, num_selected=(drafts + 1) // 2)

    monkeypatch.setattr(scheduler, "plan", plan_selection)


@pytest.mark.slow
def test_preempted_requests_resume(
    colocated: Callable[..., LLM], models: Models, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for three prompts, but not for their texts."""
    prompts = [_prompt(14, seed) for seed in range(3)]
    params = [
        SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=12, ignore_eos=True)
        for i in range(3)
    ]
    block = 2 * 8 * 16 * 4 * (SIZES["num_hidden_layers"] + 2)  # the head's has two KV heads
    llm = colocated(
        "eagle3", kv_cache_gb=8 * block / 2**30, max_model_len=32, enable_prefix_caching=False
    )
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, plain, prompts, params)
    assert llm.engine.built.loop.scheduler._running_requests.num_preemptions > 0
    assert sum(drafted for drafted, _ in _counts(outputs)) > 0
    assert not on_host


@pytest.mark.slow
def test_device_and_host_go_on_from_each_others_states(
    colocated: Callable[..., LLM], models: Models, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of which log-probabilities are wanted goes through the host, and what follows does
    not; its neighbour never leaves the device."""
    params = [PARAMS[0], SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1)]
    expected = _on_the_host(models, "eagle3").generate(PROMPTS[:2], params)
    llm = colocated("eagle3", lag=0)
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, plain, PROMPTS[:2], params)
    assert len(on_host) == 1
    told = [output.outputs[0].speculation.accepted for output in outputs]
    assert told == [output.outputs[0].speculation.accepted for output in expected]


@pytest.mark.slow
def test_samples_that_may_be_rejected_are_drafted_on_the_host(
    colocated: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = colocated("eagle3", verification="rejection")
    on_host = _host_steps(llm, monkeypatch)
    outputs = llm.generate(PROMPTS[:2], PARAMS[:2])
    assert {plan.rows[0].row for plan in on_host} == {1}
    assert all(output.outputs[0].speculation.drafted > 0 for output in outputs)


@pytest.mark.slow
def test_every_pass_has_a_cost_and_none_changes_what_is_remembered(
    colocated: Callable[..., LLM],
) -> None:
    llm = colocated("eagle3")
    heading, worker = _heading(llm), _worker(llm)
    assert heading.extension in worker._captured_passes()
    heading._runner.states.fill_(3.0)
    before = [each.clone() for each in heading._kv.keys] if heading._kv else []
    costs = worker.measure_costs()
    assert min((*costs.verify.seconds, *costs.first_draft.seconds)) > 0
    assert bool((heading._runner.states == 3.0).all())
    assert heading._kv is not None
    assert all(map(torch.equal, heading._kv.keys, before))
