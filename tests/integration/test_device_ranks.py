"""The device steps of a target rank and of a draft rank, linked in one process: on a GPU, or in
Triton's interpreter. The texts are those of plain decoding."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import damp, random_model, random_prompt, shorten
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA
from same_text import assert_same_texts, texts_of

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine import wiring
from outrider.kernels.gpu.ops import GpuOps
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.types import (
    Agreement,
    DraftEvent,
    PendingVerdict,
    RowInit,
    RowVerdict,
    StepPlan,
    Ticket,
    Verdict,
)
from outrider.workers import device
from outrider.workers.gpu.draft_step import DraftStep
from outrider.workers.gpu.link_rings import LinkRings
from outrider.workers.gpu.plan_buffers import StepSizes
from outrider.workers.gpu.step import DeviceStep
from outrider.workers.proposers.base import ProposerContext, Proposers
from outrider.workers.proposers.registry import entries
from outrider.workers.ranks.device_draft import DeviceDraft
from outrider.workers.ranks.device_target import DeviceTarget
from outrider.workers.ranks.mailbox import ReceivedRound
from outrider.workers.ranks.target import StartedStep
from outrider.workers.target import LocalTarget

pytestmark = [pytest.mark.model, *GPU_MARKS]

DEPTH, NUM_TOKENS = 3, 8
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_gb": 0.01,
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "log_level": "error",
}


class OnStream:
    """Calls a draft's methods on a stream of its own: the target's may wait for it."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self._stream = torch.cuda.Stream() if HAS_CUDA else None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._draft, name)

        if not callable(method):
            return method

        def call(*args: Any) -> Any:
            with torch.cuda.stream(self._stream):
                return method(*args)

        return call


class LinkedRanks:
    """Both ranks' workers, with what the links between them carry; `lose` drops rounds."""

    lag = 1
    num_captures = 0

    def __init__(self, step: DeviceStep, draft: DraftStep) -> None:
        self.step = step
        self.draft = OnStream(DeviceDraft(draft, is_alone=True))
        self.target = DeviceTarget(step, is_alone=True)
        self.exclusivity = step.exclusivity
        self.max_depth = step.max_depth
        self.num_rounds = self.num_lost = 0
        self.loses_rounds = False
        self._has_drafted = False
        self._unseen: deque[StartedStep] = deque()

    def share_memory(self) -> None:
        """What each device writes the other waits for; the messages only follow."""
        shape = self.target.ring_shape
        assert shape is not None and shape == self.draft.ring_shape
        memory = torch.zeros(shape.size, dtype=torch.int32, pin_memory=True)
        rings = LinkRings(memory, shape, is_shared=True)
        self.target.connect(rings)
        self.draft.connect(rings)

    def propose(self, plan: StepPlan) -> Ticket:
        return self.target.begin(plan)

    def verify(self, plan: StepPlan, ticket: Ticket) -> PendingVerdict:
        if plan.uses_draft:
            if len(self._unseen) == 1 and self._has_drafted:
                self.draft.prepare(plan, lambda: False)
            while self._unseen:
                step = self._unseen.popleft()
                self.draft.observe(step.outcome())
                step.verdict()
        self.draft.follow(plan)
        drafted, agreements = ReceivedRound(), tuple[Agreement, ...]()
        if plan.uses_draft:
            packed = self.draft.propose(plan)
            if plan.has_round:
                self.num_rounds += 1
                is_lost = self.loses_rounds and self.num_rounds % 2 == 0
                self.num_lost += is_lost
                drafted = ReceivedRound(None if is_lost else packed.message)
            _, agreements = self.draft.catch_up()
        self._has_drafted = plan.uses_draft
        step = self.target.verify(plan, ticket, drafted)
        self._unseen.append(step)

        def wait() -> Verdict:
            return dataclasses.replace(step.verdict(), agreements=agreements)

        return PendingVerdict(wait)

    def observe(self, verdict: Verdict) -> None: ...

    def events(self) -> Sequence[DraftEvent]:
        return ()

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        raise AssertionError("the draft is never lost")

    def measure_costs(self) -> StepCosts:
        return self.step.measure_costs()


def link(
    config: EngineConfig,
    context: ProposerContext,
    target: LocalTarget,
    proposers: Proposers,
    max_model_len: int,
) -> LinkedRanks:
    """In the place of a step with a draft model of its own."""
    draft = context.draft
    assert draft is not None
    sizes = StepSizes(
        config.scheduler.num_seats, config.scheduler.num_step_tokens, DEPTH, max_model_len
    )
    own = dataclasses.replace(context, draft=None)
    found = entries(has_draft_model=True)
    step = DeviceStep(own, target, Proposers({}), found, sizes)
    drafting = DraftStep(draft, context.ops, context.settings, context.verification, sizes)
    for each in (step, drafting):
        each.capture(lambda: None)
    return LinkedRanks(step, drafting)


class Models:
    def __init__(self, folder: Path) -> None:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        }
        self.reference = random_model("llama", num_hidden_layers=3, **sizes)
        damp(self.reference, 1, 0.3)
        self.target, self.draft = folder / "target", folder / "draft"
        self.reference.save_pretrained(self.target)
        shorten(self.reference, 1).save_pretrained(self.draft)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def build(models: Models, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """An engine with the steps of both ranks, or of one process."""

    def build(*, is_linked: bool = True, lag: int = 1) -> LLM:
        with monkeypatch.context() as patched:
            patched.setattr(device, "select_ops", lambda _, __, exact, *___: GpuOps(exact))
            if is_linked:
                patched.setattr(wiring, "_colocate", link)
            return LLM(
                str(models.target),
                draft_model=str(models.draft),
                num_speculative_tokens=DEPTH,
                speculation_policy="fixed",
                lag=lag,
                device=DEVICE.type,
                **COMMON,
            )

    return build


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """More than run at once; one needs the host for its prompt, one has adjusted logits."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.9, "seed": 3, "top_k": 5, "min_p": 0.01},
        {"temperature": 0, "frequency_penalty": 1.5, "logit_bias": {7: 3.0}},
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0.5, "seed": 4},
    ]
    lengths = [1, 7, 20, 60, 2, 31]
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(lengths)]
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            **kind,
        )
        for kind in kinds
    ]
    return prompts, params


def linked(llm: LLM) -> LinkedRanks:
    found: Any = llm.engine.built.loop._target
    assert isinstance(found, LinkedRanks)
    return found


on_gpu = pytest.mark.skipif(not HAS_CUDA, reason="memory is shared by GPUs only")


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=on_gpu)])
@pytest.mark.parametrize("loses_rounds", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_write_what_plain_decoding_writes(
    build: Callable[..., LLM], models: Models, loses_rounds: bool, shares: bool
) -> None:
    ranks = build()
    if shares:
        linked(ranks).share_memory()
    linked(ranks).loses_rounds = loses_rounds
    prompts, params = requests()
    plain = LLM(str(models.target), device="cpu", **COMMON)
    expected, outputs = plain.generate(prompts, params), ranks.generate(prompts, params)
    assert_same_texts(
        zip(
            texts_of(plain, models.reference, expected, params),
            texts_of(plain, models.reference, outputs, params),
            strict=True,
        )
    )
    found = [output.outputs[0].speculation for output in outputs]
    assert sum(each.accepted for each in found) > 0
    assert linked(ranks).num_rounds > 5
    assert (linked(ranks).num_lost > 0) == loses_rounds


@pytest.mark.slow
def test_a_lost_round_counts_no_drafts(build: Callable[..., LLM]) -> None:
    ranks = build()
    link = linked(ranks)
    link.loses_rounds = True
    link.num_rounds = 1  # every other round is lost, the first too
    rows: list[RowVerdict] = []
    apply = ranks.engine.built.loop.scheduler.apply

    def watched(verdict: Verdict) -> Any:
        rows.extend(verdict.rows)
        return apply(verdict)

    ranks.engine.built.loop.scheduler.apply = watched  # type: ignore[method-assign]
    ranks.generate(random_prompt(5, seed=1), SamplingParams(temperature=0, max_tokens=12))
    drafted = [row.num_drafted for row in rows if row.tokens]
    assert 0 in drafted[1:] and DEPTH in drafted
    assert all(row.num_accepted <= row.num_verified <= row.num_drafted for row in rows)


@pytest.mark.slow
def test_the_same_drafts_are_proposed_as_in_one_process(build: Callable[..., LLM]) -> None:
    prompts, params = requests()
    by_lookup = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, speculation="ngram"
    )
    prompts, params = [*prompts[:3], [3, 4, 5] * 6], [*params[:3], by_lookup]
    found, expected = (
        [each.outputs[0].speculation for each in llm.generate(prompts, params)]
        for llm in (build(lag=0), build(is_linked=False, lag=0))
    )
    assert found == expected


def test_requests_that_need_the_host_share_the_ranks(
    build: Callable[..., LLM], models: Models
) -> None:
    ranks = build()
    prompts = [random_prompt(9, seed=1), random_prompt(4, seed=2)]
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    ]
    plain = LLM(str(models.target), device="cpu", **COMMON)
    expected, outputs = plain.generate(prompts, params), ranks.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in outputs] == [
        each.outputs[0].token_ids for each in expected
    ]
    assert outputs[0].prompt_logprobs is not None
