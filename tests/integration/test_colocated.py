"""Both models on one GPU, or, without one, the same passes in Triton's interpreter.

Whatever runs as recorded, and whatever falls back to the host in between, the texts are those of
an engine that decodes plainly in plain torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE, damp, random_model, random_prompt, shorten
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA
from same_text import assert_same_texts, texts_of

from outrider import LLM, SamplingParams
from outrider.errors import ModelError
from outrider.kernels.gpu.ops import GpuOps
from outrider.kernels.ops import select_ops
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.text.outputs import RequestOutput
from outrider.workers import device
from outrider.workers.gpu import drafting, passes
from outrider.workers.gpu.step import DeviceStep

pytestmark = [pytest.mark.model, *GPU_MARKS]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
NUM_TOKENS = 6
SELECT_OPS = select_ops
DEPTH = 3
# A few tokens far above all others: how often each was output decides which is next.
CYCLE: dict[str, Any] = {"logit_bias": dict.fromkeys(range(5, 13), 30.0), "frequency_penalty": 2.0}


class Pair:
    def __init__(self, folder: Path) -> None:
        self.reference = random_model("llama", num_hidden_layers=3, **SIZES)
        damp(self.reference, 1, 0.3)
        self.target, self.draft = folder / "target", folder / "draft"
        self.reference.save_pretrained(self.target)
        shorten(self.reference, 1).save_pretrained(self.draft)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="module")
def expected(models: Pair) -> Callable[..., tuple[LLM, list[RequestOutput]]]:
    """The texts of an engine on the CPU that does not speculate."""
    llm = LLM(str(models.target), device="cpu", dtype="float32", **_COMMON)

    def run(prompts: list[list[int]], params: list[SamplingParams]) -> Any:
        return llm, llm.generate(prompts, params)

    return run


@pytest.fixture
def colocated(models: Pair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Engines whose passes are GPU kernels, wherever they run."""
    monkeypatch.setattr(device, "select_ops", lambda _, __, exact, *___: GpuOps(exact))

    def build(target: str = str(models.target), **options: Any) -> LLM:
        defaults = {
            "draft_model": str(models.draft),
            "num_speculative_tokens": DEPTH,
            "speculation_policy": "fixed",  # the interpreter's times say nothing
            "lag": 1,
            "dtype": "float32",
            "device": DEVICE.type,
        }
        llm = LLM(target, **(_COMMON | defaults | options))
        assert isinstance(llm.engine.built.loop._target, DeviceStep)
        return llm

    return build


_COMMON: dict[str, Any] = {
    "kv_cache_gb": 0.01,
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "log_level": "error",
}


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """More than run at once, of lengths that need chunks, greedy and not, with and without
    filters."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8},
        {"temperature": 0.9, "seed": 3, "top_k": 5, "min_p": 0.01},
        {"temperature": 0},
    ]
    lengths = [1, 7, 20, 60, 2]
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(lengths)]
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind) for kind in kinds]
    return prompts, params


def _adjusted_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Bias, penalties and bans beside a request that asks for none of them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.5, "seed": 1, "presence_penalty": 0.5, **CYCLE},
        {"temperature": 0.7, "seed": 2},
        {"temperature": 0, "logit_bias": {7: 100.0}, "frequency_penalty": 2.0, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "allowed_token_ids": [3, 5, 8], "top_k": 2},
    ]
    prompts = [random_prompt(5 + 6 * i, seed=20 + i) for i in range(len(kinds))]
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind) for kind in kinds]
    # Would end at once, if it were not for the least number of tokens.
    ends_soon: dict[str, Any] = {"logit_bias": {9: 100.0}, "stop_token_ids": [9], "min_tokens": 2}
    prompts.append(random_prompt(11, seed=30))
    params.append(SamplingParams(max_tokens=NUM_TOKENS, temperature=0, **ends_soon))
    return prompts, params


def _host_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans of all steps from now on that leave the device."""
    worker = llm.engine.built.loop._target
    assert isinstance(worker, DeviceStep)
    verify, plans = worker._target.verify, []

    def watched(plan: StepPlan, ticket: Ticket) -> Verdict:
        plans.append(plan)
        return verify(plan, ticket)

    monkeypatch.setattr(worker._target, "verify", watched)
    return plans


def _check(
    llm: LLM,
    models: Pair,
    expected: Callable[..., tuple[LLM, list[RequestOutput]]],
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params)
    plain, plain_outputs = expected(prompts, params)
    pairs = zip(
        texts_of(plain, models.reference, plain_outputs, params),
        texts_of(llm, models.reference, outputs, params),
        strict=True,
    )
    assert_same_texts(pairs)
    return outputs


def test_drafted_texts_are_the_plain_ones(
    colocated: Callable[..., LLM], models: Pair, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the host, also where a request whose end seemed near goes on to draft."""
    llm = colocated()
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, expected, *_requests())
    assert not on_host
    stats = llm.engine.built.loop.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    worker = llm.engine.built.loop._target
    assert isinstance(worker, DeviceStep)
    assert len(worker._pending) <= 2  # what was read is let go, the memory it came in as well
    assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)


def _select(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepPlan, Verdict]]:
    """From now on steps verify some of their drafts only: none, one, half of them, all but one, or
    as many as there are and more. What comes of each."""
    scheduler = llm.engine.built.loop.scheduler
    make_plan, apply = scheduler.plan, scheduler.apply
    plans: dict[int, StepPlan] = {}
    steps: list[tuple[StepPlan, Verdict]] = []

    def plan_selection(now_s: float) -> StepPlan | None:
        plan = make_plan(now_s)
        if plan is None:
            return None
        drafts = sum(row.num_verified for row in plan.rows)
        wanted = (drafts // 2, drafts - 1, 1, drafts + 3, 0)[len(plans) % 5]
        plans[plan.step] = dataclasses.replace(plan, num_selected=max(wanted, 0))
        return plans[plan.step]

    def watched(verdict: Verdict) -> None:
        steps.append((plans[verdict.step], verdict))
        apply(verdict)

    monkeypatch.setattr(scheduler, "plan", plan_selection)
    monkeypatch.setattr(scheduler, "apply", watched)
    return steps


@pytest.mark.parametrize(
    ("is_perfect", "most_recorded"),
    [(False, 48), (True, 6)],
    ids=["draft", "target as its own draft, larger passes not recorded"],
)
@pytest.mark.slow
def test_texts_are_the_plain_ones_when_drafts_are_selected(
    colocated: Callable[..., LLM],
    models: Pair,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_perfect: bool,
    most_recorded: int,
) -> None:
    """Exactly so many are verified as the plan says; a draft goes on from what was accepted, also
    behind guesses that nobody looked at."""
    monkeypatch.setattr(passes, "MAX_CAPTURED_TOKENS", most_recorded)
    llm = colocated(draft_model=str(models.target if is_perfect else models.draft))
    on_host = _host_steps(llm, monkeypatch)
    steps = _select(llm, monkeypatch)
    _check(llm, models, expected, *_requests())
    assert not on_host
    for plan, verdict in steps:
        drafts = sum(row.num_verified for row in plan.rows)
        assert sum(row.num_verified for row in verdict.rows) == min(plan.num_selected or 0, drafts)
        assert [row.num_drafted for row in verdict.rows] == [row.depth for row in plan.rows]
    found = [row for _, verdict in steps for row in verdict.rows]
    assert all(row.num_accepted <= row.num_verified <= row.num_drafted for row in found)
    assert any(0 < row.num_verified < row.num_drafted for row in found)
    if is_perfect:
        assert all(row.num_accepted == row.num_verified for row in found)


@pytest.mark.slow
def test_each_level_drafts_for_the_rows_that_want_it(
    colocated: Callable[..., LLM], models: Pair, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all depths in one step; who wants more than is recorded gets that, for itself. Few
    rows and tokens are many here: rounds would be recorded whole, and prompts cut up as in small
    passes."""
    monkeypatch.setattr(drafting, "_ROUND_ROWS", (1,))
    monkeypatch.setattr(passes, "_DECODE_TOKENS", 4)
    llm = colocated()
    worker = llm.engine.built.loop._target
    assert isinstance(worker, DeviceStep)
    proposer = worker._device_proposers["draft"]
    assert isinstance(proposer, drafting.DraftPasses)
    on_host = _host_steps(llm, monkeypatch)
    rounds: list[Sequence[int]] = []
    draft = proposer.draft

    def watched(counts: Sequence[int]) -> None:
        rounds.append(counts)
        draft(counts)

    monkeypatch.setattr(proposer, "draft", watched)
    depths = [1, 16, 2, 0]
    params = [
        SamplingParams(
            temperature=0.5 * (i % 2),
            seed=i,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            num_speculative_tokens=depth,
        )
        for i, depth in enumerate(depths)
    ]
    prompts = [random_prompt(length, seed=length) for length in (2, 3, 36, 4)]
    outputs = _check(llm, models, expected, prompts, params)
    assert not on_host
    assert [3, 2, 1] in rounds
    assert max(map(len, rounds)) == DEPTH
    for depth, output in zip(depths, outputs, strict=True):
        assert bool(depth) == bool(output.outputs[0].speculation.drafted)


def test_passes_before_the_first_plan_change_no_text(colocated: Callable[..., LLM]) -> None:
    """They run to be recorded; on a GPU they have been by now."""
    worker = colocated().engine.built.loop._target
    assert isinstance(worker, DeviceStep)
    worker._passes.run(1, 1, 1)
    worker._device_proposers["draft"].draft([1] * DEPTH)
    text = worker._state.text
    assert not any(bool(part.any()) for part in (text.lengths, text.tokens, text.draft_computed))


@pytest.mark.parametrize("is_on_host", [False, True], ids=["device", "host"])
def test_a_prompt_goes_through_the_draft_behind_its_first_token_and_is_counted(
    colocated: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, is_on_host: bool
) -> None:
    """Nobody who waits for a token waits for it, but it is in the figures."""
    llm = colocated()
    loop = llm.engine.built.loop
    worker = loop._target
    assert isinstance(worker, DeviceStep)
    captured = worker._with_kv.catch_up_pass
    assert captured is not None
    done: list[str] = []
    spent_s: list[float] = []
    catch_up = captured.run

    def timed(num_tokens: int) -> None:
        _synchronize()
        start_s = time.perf_counter()
        catch_up(num_tokens)
        _synchronize()
        spent_s.append(time.perf_counter() - start_s)
        done.append("draft")

    def noted(passes: Any, name: str) -> None:
        run = getattr(passes, name)

        def watched(*args: Any, **options: Any) -> Any:
            done.append("target")
            return run(*args, **options)

        monkeypatch.setattr(passes, name, watched)

    monkeypatch.setattr(captured, "run", timed)
    noted(worker._passes, "run")
    noted(worker._target.runner, "forward")
    options: dict[str, Any] = {"prompt_logprobs": 1} if is_on_host else {}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, **options)
    llm.generate([random_prompt(9)], [params])  # two tokens leave no room for drafts
    assert done == ["target", "draft", "target"]
    assert loop.draft_s >= sum(spent_s)


def _synchronize() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"draft_model": None}, {"lag": 0}, {"max_num_batched_tokens": 9}],
    ids=["no draft", "no lag", "small passes"],
)
def test_other_ways_to_run(
    colocated: Callable[..., LLM], models: Pair, expected: Any, options: dict[str, Any]
) -> None:
    _check(colocated(**options), models, expected, *_requests())


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_model": None}],
    ids=["draft", "no draft"],
)
@pytest.mark.slow
def test_penalties_bias_and_bans_run_on_the_device(
    colocated: Callable[..., LLM],
    models: Pair,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    llm = colocated(**options)
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, expected, *_adjusted_requests())
    assert not on_host
    assert outputs[3].outputs[0].token_ids.count(7) == NUM_TOKENS
    assert set(outputs[4].outputs[0].token_ids) <= {3, 5, 8}
    assert len(outputs[5].outputs[0].token_ids) == 3, "two tokens, then the one it stops at"
    speculation = outputs[3].outputs[0].speculation
    assert speculation.accepted == speculation.drafted, "the draft's logits are adjusted alike"
    assert (speculation.drafted > 0) == ("draft_model" not in options)


def test_ids_that_only_the_target_has_are_written_on_the_device_too(
    colocated: Callable[..., LLM],
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target's vocabulary is padded further than the draft's. A neighbour has
    a bad word of several tokens, which is for the host."""
    target = random_model("llama", num_hidden_layers=2, vocab_size=VOCAB_SIZE + 64, **SIZES)
    folders = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    target.save_pretrained(folders["target"])
    random_model("llama", num_hidden_layers=1, **SIZES).save_pretrained(folders["draft"])
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    beyond: list[dict[str, Any]] = [
        {"allowed_token_ids": [330, 350, 383], "temperature": 0.8, "top_k": 2, "top_p": 0.9},
        {"allowed_token_ids": [5, 9, 350], "temperature": 0},
        {"logit_bias": {330: 30.0, 350: 30.0}, "frequency_penalty": 2.0, "temperature": 0},
        {"stop_token_ids": [350], "logit_bias": {350: 30.0}, "min_tokens": 3, "temperature": 0.5},
    ]
    params = [SamplingParams(seed=1, max_tokens=4, **each) for each in beyond]
    short = SamplingParams(temperature=0, max_tokens=2, bad_words=["ab"])
    prompts = [random_prompt(4 + i, seed=i) for i in range(len(beyond))]
    with monkeypatch.context() as patch:
        patch.setattr(device, "select_ops", SELECT_OPS)
        plain = LLM(str(folders["target"]), device="cpu", dtype="float32", **_COMMON)
    expected = plain.generate(prompts, params)
    llm = colocated(
        str(folders["target"]), draft_model=str(folders["draft"]), max_num_seqs=len(prompts) + 1
    )
    on_host = _host_steps(llm, monkeypatch)
    outputs = llm.generate([*prompts, random_prompt(3)], [*params, short])
    assert_same_texts(
        zip(
            texts_of(plain, target, expected, params),
            texts_of(llm, target, outputs[:-1], params),
            strict=True,
        )
    )
    assert 0 < len(on_host) < llm.engine.built.loop.scheduler.stats.steps
    assert all(len(plan.rows) == 1 for plan in on_host)
    assert set(outputs[0].outputs[0].token_ids) <= {330, 350, 383}


RARE: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 5, "logprobs": 50},
    {"temperature": 0, "logprobs": 2, "logit_bias": {7: 9.0}, "frequency_penalty": 2.0},
    {"temperature": 0.7, "seed": 6, "logprobs": 0, "speculation": "off"},
    {"temperature": 0, "logprobs": 1, "logit_bias": {7: 100.0}, "speculation": "ngram"},
]


def _rare_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests with rare options, and one as most are between them."""
    kinds = [*RARE[:2], {"temperature": 0}, *RARE[2:]]
    prompts = [random_prompt(4, seed=50 + i) * 2 for i in range(len(kinds))]
    params = [SamplingParams(**({"max_tokens": 5, "ignore_eos": True} | kind)) for kind in kinds]
    return prompts, params


def _assert_same_logprobs(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Where texts are the same; the interpreter adds up in another order than torch."""
    num_compared = 0
    for one, other in zip(found, expected, strict=True):
        own, plain = one.outputs[0], other.outputs[0]
        if own.token_ids != plain.token_ids:
            continue  # a near-tie; how near, `assert_same_texts` has looked at
        assert (own.logprobs is None) == (plain.logprobs is None)
        for here, there in zip(own.logprobs or (), plain.logprobs or (), strict=True):
            assert here.keys() == there.keys()
            for token in here:
                assert here[token].logprob == pytest.approx(there[token].logprob, abs=1e-3)
                assert here[token].rank == there[token].rank
                num_compared += 1
    assert num_compared > 100


@pytest.mark.slow
def test_log_probabilities_and_prompt_look_up_run_on_the_device(
    colocated: Callable[..., LLM], models: Pair, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = _rare_requests()
    llm = colocated()
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, expected, prompts, params)
    assert not on_host
    _assert_same_logprobs(outputs, expected(prompts, params)[1])
    look_up = outputs[-1].outputs[0].speculation
    assert look_up.accepted > 0, "a text of one token repeats itself"


@pytest.mark.slow
def test_logprobs_of_selected_drafts_are_those_of_their_tokens(
    colocated: Callable[..., LLM], models: Pair, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A selection moves rows of logits about, where nobody on the host sees it."""
    prompts, params = _rare_requests()
    llm = colocated()
    on_host, steps = _host_steps(llm, monkeypatch), _select(llm, monkeypatch)
    outputs = _check(llm, models, expected, prompts, params)
    assert not on_host
    found = [row for _, verdict in steps for row in verdict.rows]
    assert any(row.logprobs and row.num_verified < row.num_drafted for row in found)
    _assert_same_logprobs(outputs, expected(prompts, params)[1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"draft_model": None}, {"lag": 0}])
def test_prompt_look_up_runs_beside_the_draft_or_without_one(
    colocated: Callable[..., LLM],
    models: Pair,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    prompts = [random_prompt(6, seed=3) * 3, random_prompt(8, seed=4)]
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) for _ in prompts
    ]
    llm = colocated(method="ngram", **options)
    on_host = _host_steps(llm, monkeypatch)
    outputs = _check(llm, models, expected, prompts, params)
    assert not on_host
    assert all(output.outputs[0].speculation.drafted > 0 for output in outputs)


@pytest.mark.parametrize(
    ("options", "rare"),
    [
        ({}, {"temperature": 0.5, "seed": 8, "prompt_logprobs": 2, "logprobs": 1}),
        ({"verification": "rejection"}, {"temperature": 0.8, "seed": 9}),
    ],
    ids=["prompt logprobs", "rejection"],
)
@pytest.mark.slow
def test_what_cannot_run_as_recorded_has_steps_of_its_own(
    colocated: Callable[..., LLM],
    models: Pair,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    rare: dict[str, Any],
) -> None:
    """Its neighbours never leave the device, and all is as if it were theirs alone."""
    others = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **each)
        for each in (CYCLE, {"logprobs": 1})
    ]
    prompts = [random_prompt(7 + i, seed=70 + i) for i in range(3)]
    own = {"max_tokens": 3, "ignore_eos": True} | rare
    params = [others[0], SamplingParams(**own), others[1]]
    llm = colocated(**options)
    on_host = _host_steps(llm, monkeypatch)
    if "verification" in options:
        outputs = llm.generate(prompts, params)
        kept = [0, 2]
        plain, plain_outputs = expected([prompts[i] for i in kept], others)
        pairs = zip(
            texts_of(plain, models.reference, plain_outputs, others),
            texts_of(llm, models.reference, [outputs[i] for i in kept], others),
            strict=True,
        )
        assert_same_texts(pairs)
    else:
        outputs = _check(llm, models, expected, prompts, params)
    assert on_host and all(len(plan.rows) == 1 for plan in on_host)
    assert len({plan.rows[0].row for plan in on_host}) == 1
    assert len(on_host) < llm.engine.built.loop.scheduler.stats.steps
    if "prompt_logprobs" in rare:
        assert len(on_host) == 1, "from its first token on it is as any other"
        plain_output = expected(prompts, params)[1][1]
        assert len(outputs[1].prompt_logprobs or ()) == len(plain_output.prompt_logprobs or ())


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_only_samples_are_rejected_on_the_host(
    colocated: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    llm = colocated(verification="rejection")
    on_host = _host_steps(llm, monkeypatch)
    params = SamplingParams(
        temperature=temperature, presence_penalty=1.0, max_tokens=3, ignore_eos=True
    )
    llm.generate([random_prompt(4)], [params])
    assert bool(on_host) == (temperature > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.skipif(not HAS_CUDA, reason="the interpreter rounds like nobody else")
def test_deterministic_texts_are_the_same_bit_for_bit(
    colocated: Callable[..., LLM], temperature: float
) -> None:
    """In bfloat16, where anything else flips tokens: plain or drafted, in any batch, whatever the
    chunks a prompt is cut into, with its prefix cached, preempted and resumed."""
    prompts = [random_prompt(length, seed=length) for length in (1, 9, 17, 40, 70)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options: dict[str, Any] = {"deterministic": True, "dtype": "bfloat16"}
    plain = colocated(draft_model=None, **options)
    expected = [
        plain.generate([prompt], [own])[0].outputs[0].token_ids
        for prompt, own in zip(prompts, params, strict=True)
    ]
    block = 2 * 8 * SIZES["head_dim"] * SIZES["num_key_value_heads"] * 2  # bytes, of one layer
    for changes in (
        {},
        {"max_num_batched_tokens": 13},
        {"num_speculative_tokens": 1, "lag": 0},
        {"kv_cache_gb": 14 * block * (3 + 1) / 2**30},  # little more than the longest text
    ):
        llm = colocated(**(options | changes))
        for _ in range(2):  # the second time every prefix is in the cache
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow  # in the interpreter
def test_preempted_requests_resume(
    colocated: Callable[..., LLM], models: Pair, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for three prompts, but not for their texts: rows are given up and taken again, and
    what was output stays output."""
    kinds: list[dict[str, Any]] = [
        {},
        CYCLE,
        CYCLE | {"repetition_penalty": 1.1},
        CYCLE | {"presence_penalty": -0.5},
    ]
    prompts = [random_prompt(14, seed=i) for i in range(4)]
    params = [
        SamplingParams(temperature=0.5, seed=i, max_tokens=12, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    spec = transformers.AutoConfig.from_pretrained(models.target)
    block = 2 * 8 * spec.head_dim * spec.num_key_value_heads * 4
    llm = colocated(
        kv_cache_gb=8 * block * (3 + 1) / 2**30, max_model_len=32, enable_prefix_caching=False
    )
    on_host = _host_steps(llm, monkeypatch)
    _check(llm, models, expected, prompts, params)
    assert llm.engine.built.loop.scheduler._running_requests.num_preemptions > 0
    assert not on_host


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of NaN
def test_logits_that_are_no_numbers_end_their_request_alone(
    models: Pair, colocated: Callable[..., LLM], tmp_path: Path
) -> None:
    broken = type(models.reference)(models.reference.config)
    broken.load_state_dict(models.reference.state_dict())
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = float("nan")
    broken.save_pretrained(tmp_path)
    llm = colocated(str(tmp_path))
    prompt = [token for token in random_prompt(6) if token != 5]
    asked = SamplingParams(max_tokens=4, seed=1, top_k=5, logprobs=2, presence_penalty=0.5)
    with pytest.raises(ModelError, match="computed logits that are NaN or infinite"):
        llm.generate([[*prompt, 5, 7]], asked)
    sound = SamplingParams(max_tokens=2, seed=2, logit_bias={5: -100.0}, ignore_eos=True)
    [answer] = llm.generate([prompt], sound)
    assert len(answer.outputs[0].token_ids) == 2
