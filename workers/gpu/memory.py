"""How much of a GPU's memory passes need, found out by running the costliest ones.

They run over a KV cache of a single block: every block table is zero, so whatever the position, its
keys and values go to block 0 and come from there. What then is left of the GPU is the real cache's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.errors import CapacityError
from outrider.kernels.types import RaggedBatch
from outrider.scheduler.params import MAX_LOGPROBS, SamplingParams
from outrider.scheduler.types import (
    IN_PROCESS,
    NOBODY,
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
from outrider.workers.proposers.base import DRAFT, NGRAM, Proposers
from outrider.workers.runner import Runner
from outrider.workers.target import LOGIT_ROWS, TargetWorker

if TYPE_CHECKING:  # Triton, which it needs, is not there on every machine
    from outrider.workers.gpu.colocated import ColocatedWorker

# Beside what was measured: lists of token ids that requests bring along, kernels loaded later, and
# the gaps that tensors of other sizes leave between them.
MARGIN_BYTES = 512 * 2**20
# Large tensors, as those of the cache are, take whole multiples of this.
SEGMENT_BYTES = 2 * 2**20

# Penalties take memory for every token of every text. Beyond so many, the margin is theirs.
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
    loaded: int  # in use once the weights are there, by whichever process
    standing: int  # in use between steps: recorded passes, buffers and code as well
    step: int  # what the costliest step takes in addition

    def kv_bytes(self, utilization: float, num_tensors: int) -> int:
        """What is left for a cache of so many tensors."""
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
    """The most one step holds, whatever requests ask for."""

    rows: int
    tokens: int
    depth: int
    max_len: int
    has_draft: bool
    head: str | None = None  # who drafts in the place of a draft

    @property
    def prompt_len(self) -> int:
        """Of the longest prompt."""
        return max(self.max_len - 1, 1)


@dataclass(frozen=True, slots=True)
class CostlyStep:
    """A step as costly as any of its kind."""

    plan: StepPlan
    guesses: Mapping[int, Proposal] = field(default_factory=dict)  # where no model drafts


class FlatRunner(Runner):
    """Its logits are all equal, which makes sampling take the longest way: best tokens tie, and no
    filter is settled but by sorting."""

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Sequence[int], num_ids: int | None = None) -> Tensor:
        return super().logits(hidden, indices, num_ids).zero_()


class FlatHead:
    """A head whose logits are all equal, as those of a `FlatRunner`."""

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


Workers = tuple["Proposers | ColocatedWorker", "TargetWorker | ColocatedWorker"]


def measure(device: torch.device, build: Callable[[], Workers], limits: StepLimits) -> GpuMemory:
    """`build` makes workers of one KV block. Of their passes only the largest of each kind are
    recorded, which tells what all of them take: the cache is another then, and they are recorded
    over that. All that was taken is given back: if it stayed reserved, the cache's tensors would be
    cut out of it."""
    _give_back()
    loaded, total = _used_and_total(device)
    try:
        workers = build()
        _, worker = workers
        recordings = 0 if isinstance(worker, TargetWorker) else worker.record_largest()
        step = max(_growth(device, workers, each) for each in costliest_steps(limits))
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"of {_gb(total)} GB on the GPU {_gb(loaded)} are taken by weights and other "
            "processes, and the rest is too little for the largest steps; lower "
            "max_num_batched_tokens or max_num_seqs."
        ) from error
    torch.cuda.empty_cache()
    standing, _ = _used_and_total(device)
    del workers, worker
    _give_back()
    return GpuMemory(total, loaded, standing + recordings, step)


def hold(device: torch.device, num_bytes: int) -> None:
    """Have the allocator keep so much in one piece, for every step to take its tensors from. Left
    to itself it would gather pieces of all the sizes it was ever asked for."""
    torch.cuda.empty_cache()
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def costliest_steps(limits: StepLimits) -> list[CostlyStep]:
    """Steps that take as much as any: of the models, of log-probabilities, of sampling. They are to
    be run in this order: a head drafts behind what it has seen."""
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
    """Rows of a plan; each comes with its text."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._inits: list[RowInit] = []
        self._plans: list[RowPlan] = []

    @property
    def count(self) -> int:
        return len(self._plans)

    def add(self, num_tokens: int, text_len: int, params: SamplingParams, depth: int = 0) -> None:
        """The last `num_tokens` of a text of that length are to be computed, and drafts."""
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
                # Keeps the step from running as recorded, which would take less.
                bad_word_ids=((0, 0),) if params is _EVERYTHING else (),
                proposer=self._limits.head or NOBODY,
            )
        )
        proposer = NOBODY
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
    """All tokens at the end of one prompt, or of as few as can have so many."""
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
    """Rows that draft, as deep as they may."""
    rows, text_len, depth = _drafting_rows(limits)
    guess = Proposal(0, text_len, [0] * depth, [1.0] * depth)
    guesses = {} if limits.has_draft else dict.fromkeys(range(rows.count), guess)
    return CostlyStep(rows.plan(number), guesses)


def _heading_steps(number: int, limits: StepLimits, head: str) -> list[CostlyStep]:
    """The same rows write a token each, and then draft with a head."""
    rows = _drafting_rows(limits)[0].plan(number)
    first = tuple(row._replace(depth=0, num_verified=0, proposer=NOBODY) for row in rows.rows)
    then = tuple(row._replace(proposer=head if row.depth else NOBODY) for row in rows.rows)
    return [
        CostlyStep(replace(rows, rows=first)),
        CostlyStep(StepPlan(rows.epoch, number + 1, then)),
    ]


def _drafting_rows(limits: StepLimits) -> tuple[_Rows, int, int]:
    """Behind a greedy one and one without filters, since a mixture takes copies; how long their
    texts are, and how deep they draft.

    Logits are looked at in parts, which cost the same if all is asked of them: two are tried. The
    distributions that drafts were sampled from are there for the whole step.
    """
    rows = _Rows(limits)
    depth = max(0, min(limits.depth, limits.tokens - 1, limits.prompt_len - 1))
    text_len = min(limits.prompt_len - depth, _MAX_OCCURRENCES // (2 * LOGIT_ROWS))
    text_len = max(text_len - (limits.head is not None), 1)  # it writes one more
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


def _growth(device: torch.device, workers: Workers, step: CostlyStep) -> int:
    """Memory reserved for a step, gaps included, by an allocator that begins with none."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run_step(workers, step)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _used_and_total(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def _give_back() -> None:
    gc.collect()  # recorded passes and those who run them know each other
    torch.cuda.empty_cache()


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
