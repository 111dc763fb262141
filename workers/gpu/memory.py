"""Measures how much GPU memory passes need by running the costliest ones (memory profiling).

They run over a KV cache of a single block: every block table is zero, so keys and values of every
position go to block 0. The rest of the GPU's memory is for the real cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.catalog.proposers import DRAFT, NGRAM
from outrider.errors import CapacityError
from outrider.kernels.types import RaggedBatch
from outrider.scheduler.params import MAX_LOGPROBS, SamplingParams
from outrider.scheduler.types import (
    IN_PROCESS,
    NO_PROPOSER,
    Proposal,
    RowInit,
    RowPlan,
    SampleId,
    StepPlan,
    Ticket,
)
from outrider.workers.heads.base import Head
from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.kv import KVCache
from outrider.workers.proposers.base import Proposers
from outrider.workers.runner import Runner
from outrider.workers.target import LOGIT_ROWS, LocalTarget

if TYPE_CHECKING:  # Triton, which it needs, is not there on every machine
    from outrider.workers.gpu.step import DeviceStep

# Beyond what is measured: token id lists of requests, kernels loaded later, and fragmentation by
# tensors of other sizes.
MARGIN_BYTES = 512 * 2**20
# Large tensors, such as those of the cache, take whole multiples of this.
SEGMENT_BYTES = 2 * 2**20

# Penalties take memory for every token of every text. Beyond this many, the margin covers them.
_MAX_OCCURRENCES = 2**25

_GREEDY = SamplingParams(temperature=0)
_NOISY = SamplingParams(temperature=0.8)
_EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=MAX_LOGPROBS,
)
_ALL_LOGPROBS = SamplingParams(logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What a GPU holds besides KV, in bytes."""

    total: int
    loaded: int  # in use by all processes once the weights are loaded
    standing: int  # in use between steps: also CUDA graphs, buffers and code
    step: int  # additional use of the costliest step

    def kv_bytes(self, utilization: float, num_tensors: int) -> int:
        """The bytes left for a KV cache of `num_tensors` tensors."""
        rounding = num_tensors * SEGMENT_BYTES
        limit = int(self.total * utilization)
        return max(limit - self.standing - self.step - MARGIN_BYTES - rounding, 0)

    def shares(self, utilization: float) -> str:
        passes = self.standing - self.loaded + self.step + MARGIN_BYTES
        return (
            f"of {_gb(self.total)} GB on the GPU {_gb(self.total * utilization)} may be used "
            f"(gpu_memory_utilization {utilization:.3g}), {_gb(self.loaded)} are taken by weights "
            f"and other processes and {_gb(passes)} by passes"
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that any requests can cause."""

    rows: int
    tokens: int
    depth: int
    max_len: int
    has_draft: bool
    head: str | None = None  # the head that drafts instead of a draft model

    @property
    def prompt_len(self) -> int:
        """The length of the longest prompt."""
        return max(self.max_len - 1, 1)


@dataclass(frozen=True, slots=True)
class CostlyStep:
    """A step as costly as any of its kind."""

    plan: StepPlan
    guesses: Mapping[int, Proposal] = field(default_factory=dict)  # where no draft model runs


class FlatRunner(Runner):
    """Its logits are all equal, the worst case for sampling: all tokens tie, and every filter needs
    a full sort."""

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Sequence[int], num_ids: int | None = None) -> Tensor:
        return super().logits(hidden, indices, num_ids).zero_()


class FlatHead:
    """A head whose logits are all equal, like those of a `FlatRunner`."""

    def __init__(self, head: Head) -> None:
        self._head = head

    @property
    def spec(self) -> HeadSpec:
        return self._head.spec

    def tile_tokens(self, query_len: int) -> int:
        return self._head.tile_tokens(query_len)

    def extend(
        self, features: Tensor, next_ids: Tensor, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        return self._head.extend(features, next_ids, batch, kv)

    def step(
        self, state: Tensor, ids: Tensor, level: int, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        return self._head.step(state, ids, level, batch, kv)

    def logits(self, state: Tensor, level: int) -> Tensor:
        return self._head.logits(state, level).zero_()


Workers = tuple["Proposers | DeviceStep", "LocalTarget | DeviceStep"]


class ProfileRun(NamedTuple):
    """Workers whose memory is measured."""

    capture_largest: Callable[[], int]  # see `DeviceStep`
    run: Callable[[CostlyStep], None]


def profile_run(workers: Workers) -> ProfileRun:
    return ProfileRun(workers[1].capture_largest, partial(run_step, workers))


def measure(device: torch.device, build: Callable[[], ProfileRun], limits: StepLimits) -> GpuMemory:
    """`build` makes workers with one KV block. Only the largest of each kind of pass is captured,
    and the memory of all is extrapolated from that; they are captured over the real cache later.
    All memory is freed afterwards: otherwise the cache would be carved out of reserved segments."""
    _free_all()
    loaded, total = _used_and_total(device)
    try:
        workers = build()
        graph_bytes = workers.capture_largest()
        step = max(_growth(device, workers, each) for each in costliest_steps(limits))
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"of {_gb(total)} GB on the GPU {_gb(loaded)} are taken by weights and other "
            "processes, and the rest is too little for the largest steps; lower "
            "max_num_batched_tokens or max_num_seqs."
        ) from error
    torch.cuda.empty_cache()
    standing, _ = _used_and_total(device)
    del workers
    _free_all()
    return GpuMemory(total, loaded, standing + graph_bytes, step)


def hold(device: torch.device, num_bytes: int) -> None:
    """Make the allocator reserve `num_bytes` in one segment for the tensors of all steps. Otherwise
    it accumulates segments of many sizes."""
    torch.cuda.empty_cache()
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def costliest_steps(limits: StepLimits) -> list[CostlyStep]:
    """The steps with the most memory: for the models, for log-probabilities, for sampling. Run them
    in this order: a head drafts after tokens it has state for."""
    return [
        _prompt_step(1, limits, _GREEDY),
        _short_prompts_step(2, limits),
        _prompt_step(3, limits, _ALL_LOGPROBS),
        _drafting_step(4, limits),
        *([] if limits.head is None else _heading_steps(5, limits, limits.head)),
    ]


def run_step(workers: Workers, step: CostlyStep) -> None:
    proposers, target = workers
    ticket = proposers.propose(step.plan)
    if step.guesses:
        ticket = Ticket(step.plan.step, step.guesses)
    outcome = target.verify(step.plan, ticket)
    proposers.observe(outcome.wait())


# -- steps --------------------------------------------------------------------------------------


class _Rows:
    """Rows of a plan, each admitted with its text."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._inits: list[RowInit] = []
        self._plans: list[RowPlan] = []

    @property
    def count(self) -> int:
        return len(self._plans)

    def add(self, num_tokens: int, text_len: int, params: SamplingParams, depth: int = 0) -> None:
        """A row that computes the last `num_tokens` of its text, and `depth` draft tokens."""
        row, has_draft = self.count, self._limits.has_draft
        self._inits.append(
            RowInit(
                row=row,
                generation=0,
                sample_id=SampleId(IN_PROCESS, row),
                token_ids=(0,) * text_len,
                prompt_len=text_len,
                params=params,
                seed=row,
                target_cached=text_len - num_tokens,
                draft_cached=text_len - num_tokens,
                # Makes the step exclusive: a captured pass would take less memory.
                bad_word_ids=((0, 0),) if params is _EVERYTHING else (),
                proposer=self._limits.head or NO_PROPOSER,
            )
        )
        proposer = NO_PROPOSER
        if depth:
            proposer = DRAFT if has_draft else NGRAM
        self._plans.append(
            RowPlan(
                row=row,
                generation=0,
                num_tokens=num_tokens,
                depth=depth,
                num_verified=depth,
                samples=True,
                proposer=proposer,
                target_start=0,
                target_blocks=(),  # the tables stay zero
                draft_start=0,
                draft_blocks=(),
                draft_tokens=num_tokens if has_draft else 0,
            )
        )

    def plan(self, step: int) -> StepPlan:
        return StepPlan(0, step, tuple(self._plans), tuple(self._inits))


def _prompt_step(number: int, limits: StepLimits, params: SamplingParams) -> CostlyStep:
    """All tokens at the end of as few prompts as possible."""
    rows = _Rows(limits)
    num_left = limits.tokens
    while num_left and rows.count < limits.rows:
        chunk = min(num_left, limits.prompt_len)
        rows.add(chunk, limits.prompt_len, params)
        num_left -= chunk
    return CostlyStep(rows.plan(number))


def _short_prompts_step(number: int, limits: StepLimits) -> CostlyStep:
    rows = _Rows(limits)
    chunk = min(limits.tokens // limits.rows, limits.prompt_len)
    for _ in range(limits.rows):
        rows.add(chunk, chunk, _GREEDY)
    return CostlyStep(rows.plan(number))


def _drafting_step(number: int, limits: StepLimits) -> CostlyStep:
    """Rows that draft to the maximum depth."""
    rows, text_len, depth = _drafting_rows(limits)
    guess = Proposal(0, text_len, [0] * depth, [1.0] * depth)
    guesses = {} if limits.has_draft else dict.fromkeys(range(rows.count), guess)
    return CostlyStep(rows.plan(number), guesses)


def _heading_steps(number: int, limits: StepLimits, head: str) -> list[CostlyStep]:
    """The same rows decode one token each, and then draft with a head."""
    rows = _drafting_rows(limits)[0].plan(number)
    first = tuple(row._replace(depth=0, num_verified=0, proposer=NO_PROPOSER) for row in rows.rows)
    then = tuple(row._replace(proposer=head if row.depth else NO_PROPOSER) for row in rows.rows)
    return [
        CostlyStep(replace(rows, rows=first)),
        CostlyStep(StepPlan(rows.epoch, number + 1, then)),
    ]


def _drafting_rows(limits: StepLimits) -> tuple[_Rows, int, int]:
    """The rows, the length of their texts, and their depth. A greedy row and one without filters
    come first, because a mixed batch takes copies.

    Logits are processed in parts, which cost the same with all options set: two such parts are
    tried. The draft distributions are held for the whole step.
    """
    rows = _Rows(limits)
    depth = max(0, min(limits.depth, limits.tokens - 1, limits.prompt_len - 1))
    text_len = min(limits.prompt_len - depth, _MAX_OCCURRENCES // (2 * LOGIT_ROWS))
    text_len = max(text_len - (limits.head is not None), 1)  # it decodes one more token
    for params in (_GREEDY, _NOISY)[: min(limits.rows, limits.tokens) - 1]:
        rows.add(1, text_len, params)
    num_logits = rows.count
    # A part ends with the row that fills it: the first lacks one logit before its last row.
    size = (LOGIT_ROWS - 1 - num_logits) % (depth + 1) or depth + 1
    while num_logits < limits.tokens and rows.count < limits.rows:
        size = min(size, limits.tokens - num_logits)
        params = _EVERYTHING if num_logits < 2 * LOGIT_ROWS else _NOISY
        rows.add(1, text_len, params, size - 1)
        num_logits += size
        size = depth + 1
    return rows, text_len, depth


# -- readings -----------------------------------------------------------------------------------


def _growth(device: torch.device, workers: ProfileRun, step: CostlyStep) -> int:
    """Memory that an empty allocator reserves for a step, fragmentation included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    workers.run(step)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _used_and_total(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def _free_all() -> None:
    gc.collect()  # CUDA graphs and their owners form reference cycles
    torch.cuda.empty_cache()


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
