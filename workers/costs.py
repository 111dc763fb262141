"""Cost tables: how long passes take by their size, timed before the first request.

Timed passes use unassigned rows and blocks. The KV they write is never read: a block is written
after it is allocated to a row, and enters the prefix cache only after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.ops import Ops
from outrider.scheduler.costs import CostTable, StepCosts
from outrider.scheduler.params import SamplingParams
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.base import NO_COST
from outrider.workers.proposers.drafting import draft_in_one_call
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import accept_matching, verify

VERIFY_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512)
DRAFT_ROWS = (1, 2, 4, 8, 16)

_SPAN_TOKENS = 4  # of a row in a pass, if there are enough rows
_FIRST_DRAFT_TOKENS = 2  # what a draft model lacks after full acceptance
_PREFILL_TOKENS = 64
_CONTEXT = 32  # tokens of a row before those of the pass
# Sizes up to this are always measured: costs are not proportional there.
_ALWAYS_MEASURED = 8
_MAX_TABLE_S = 0.6  # for a table, beyond those
_CACHE_BYTES = 48 * 2**20  # more than two cores' share of most CPU caches
_SLOWEST_S = 0.25  # a size that takes longer is the last
# Up to this many passes of a size in a row, beyond two only until they took this long.
_MAX_PASSES, _SHORT_S = 6, 0.02
_TOLERANCE = 1.25  # a quiet machine repeats itself far more closely


class DraftCosts(NamedTuple):
    """The draft's part of `StepCosts`."""

    first: CostTable
    next: CostTable
    prefill_s: float


def measure_step(
    target: Runner, draft: Runner | None, ops: Ops, head: HeadRunner | None = None
) -> StepCosts:
    """The costs of all models in one process."""
    table = measure_target(target, ops, head)
    if draft is not None:
        first, following, prefill_s = measure_draft(draft, ops)
    elif head is not None:
        first, following, prefill_s = measure_head(head, ops)
    else:
        return StepCosts(table, NO_COST, NO_COST)
    return StepCosts(table, first, following, prefill_s=prefill_s)


def measure_target(
    runner: Runner, ops: Ops, head: HeadRunner | None = None, num_sizes: int | None = None
) -> CostTable:
    """Verification passes by their number of tokens, with sampling and, if there is a `head`, its
    extension. All sizes, or the `num_sizes` smallest.

    Ranks of a group do this together; each gets the same table.
    """
    max_size = runner.num_rows * (runner.max_model_len - _context(runner))
    captured = runner.captured_sizes
    sizes = [size for size in captured or VERIFY_SIZES if size <= max_size][:num_sizes]

    def run(size: int) -> None:
        _verify_once(
            runner, ops, _share(size, runner, _SPAN_TOKENS), keep_features=head is not None
        )
        if head is not None and runner.last_pass is not None:
            head.extend(runner.last_pass.chunks, runner.last_pass.features)[-1, 0].item()

    return _table(runner, sizes, run, is_padded=bool(captured))


def measure_draft(runner: Runner, ops: Ops) -> DraftCosts:
    first, following = measure_drafting(runner, ops)
    num_prefilled = min(_PREFILL_TOKENS, runner.max_model_len)
    prefill = _table(runner, [num_prefilled], lambda count: _prefill_once(runner, count))
    return DraftCosts(first, following, prefill.seconds[0] / num_prefilled)


def measure_drafting(
    runner: Runner, ops: Ops, num_sizes: int | None = None
) -> tuple[CostTable, CostTable]:
    """The first pass of a drafting round and a later one, with sampling, by their number of rows.
    All sizes, or the `num_sizes` smallest."""
    rows = [count for count in DRAFT_ROWS if count <= runner.num_rows][:num_sizes]
    tokens = min(_FIRST_DRAFT_TOKENS, runner.max_model_len)
    # In this order: a round in one call needs both passes to have run before.
    following = _table(runner, rows, lambda count: _draft_once(runner, ops, [1] * count))
    # After a target pass a CPU reads the draft's weights from memory again.
    before = _fill_caches() if runner.device.type == "cpu" else None
    first = _table(runner, rows, lambda count: _draft_once(runner, ops, [tokens] * count), before)
    return first, following


def measure_head(head: HeadRunner, ops: Ops) -> DraftCosts:
    """Draft steps of a head, with sampling, by their number of rows; a head has no prefill."""
    runner = head.target
    rows = [count for count in DRAFT_ROWS if count <= runner.num_rows]
    states = torch.zeros(
        max(rows), head.head.spec.state_size, dtype=runner.decoder.dtype, device=runner.device
    )

    def guess(state: Tensor, level: int) -> None:
        chunks = _chunks(runner, [1] * len(state))
        samplers = _samplers(runner, len(chunks), head.vocab.held)
        spans = [
            LogitSpan(sampler, range(chunk.start + 1))
            for sampler, chunk in zip(samplers, chunks, strict=True)
        ]
        if level:
            state = head.step(state, chunks, level)
        draft_sample(head.logits(state, level), spans, ops, "shared", head.vocab).tokens.tolist()

    first = _table(runner, rows, lambda count: guess(states[:count], 0))
    following = first
    if head.head.spec.max_depth != 1:
        following = _table(runner, rows, lambda count: guess(states[:count], 1))
    return DraftCosts(first, following, 0.0)


def are_alike(table: CostTable, other: CostTable) -> bool:
    """Whether `other` gives about the same costs for the sizes of `table`."""
    if not other.sizes:
        return False
    pairs = zip(table.seconds, map(other.at, table.sizes), strict=True)
    return all(own <= _TOLERANCE * its and its <= _TOLERANCE * own for own, its in pairs)


def _table(
    runner: Runner,
    sizes: Iterable[int],
    run: Callable[[int], None],
    before: Callable[[], object] | None = None,
    *,
    is_padded: bool = False,
) -> CostTable:
    """The fastest of several passes of each size: a disturbance only makes a pass slower."""
    measured: list[int] = []
    seconds: list[float] = []
    spent_s = 0.0
    for size in sizes:
        if measured and size > _ALWAYS_MEASURED:
            expected_s = 2 * seconds[-1] * size / measured[-1]
            if seconds[-1] > _SLOWEST_S or spent_s + expected_s > _MAX_TABLE_S:
                break
        # The first pass of a size may include warm-up work.
        taken: list[float] = []
        while len(taken) < 2 or (len(taken) < _MAX_PASSES and sum(taken) < _SHORT_S):
            taken.append(_timed(runner, run, size, before))
        spent_s += sum(taken)
        measured.append(size)
        seconds.append(min(taken))
    if spent_s < _MAX_TABLE_S:  # again later: a disturbance affects neighbouring passes as well
        seconds = [
            min(earlier, _timed(runner, run, size, before))
            for size, earlier in zip(measured, seconds, strict=True)
        ]
    if not is_padded:  # more tokens never take less time: measurements say so only when disturbed
        for at in range(len(seconds) - 1, 0, -1):
            seconds[at - 1] = min(seconds[at - 1], seconds[at])
    return CostTable(tuple(measured), tuple(seconds), is_padded)


def _timed(
    runner: Runner, run: Callable[[int], None], size: int, before: Callable[[], object] | None
) -> float:
    """Seconds on the slowest rank of the group, so that all ranks decide alike."""
    if before is not None:
        before()
    start_s = time.perf_counter()
    run(size)
    own = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=runner.device)
    return float(runner.vocab.group.all_gather(own).max())


def _fill_caches() -> Callable[[], object]:
    """A function that evicts everything from the CPU's caches."""
    return partial(torch.empty(_CACHE_BYTES, dtype=torch.uint8).fill_, 1)


def _verify_once(runner: Runner, ops: Ops, counts: Sequence[int], *, keep_features: bool) -> None:
    chunks = _chunks(runner, counts)
    spans = [
        LogitSpan(sampler, range(chunk.start + 1), chunk.tokens[1:])
        for sampler, chunk in zip(_samplers(runner, len(chunks)), chunks, strict=True)
    ]
    indices = range(sum(counts))
    best = None if keep_features else runner.best(chunks, indices)
    if best is not None:
        accept_matching(best, spans)
        return
    logits = runner.logits(runner.forward(chunks), indices)
    verify(logits, spans, ops, "shared", runner.vocab)


def _draft_once(runner: Runner, ops: Ops, counts: Sequence[int]) -> None:
    chunks = _chunks(runner, counts)
    spans = [
        LogitSpan(sampler, _any_text(runner, chunk.start + len(chunk.tokens)))
        for sampler, chunk in zip(_samplers(runner, len(counts)), chunks, strict=True)
    ]
    if len(chunks) == 1 and draft_in_one_call(runner, chunks[0], 1, spans[0]) is not None:
        return
    last = [sum(counts[: index + 1]) - 1 for index in range(len(counts))]
    logits = runner.scores(chunks, last)
    draft_sample(logits, spans, ops, "shared", runner.vocab).tokens.tolist()


def _any_text(runner: Runner, length: int) -> range:
    """Token ids spread over the vocabulary, so that drafts are chosen among all of it."""
    step = max(runner.vocab_size // max(length, 1), 1)
    return range(0, length * step, step)


def _prefill_once(runner: Runner, count: int) -> None:
    hidden = runner.forward([RowChunk(0, 0, _some_tokens(runner, count))])
    hidden[-1, 0].item()  # waits for the device


def _share(size: int, runner: Runner, per_row: int) -> list[int]:
    """Tokens of each row in a pass of `size` tokens."""
    room = runner.max_model_len - _context(runner)
    each = max(min(per_row, room), -(-size // runner.num_rows))
    return [min(each, size - first) for first in range(0, size, each)]


def _chunks(runner: Runner, counts: Sequence[int]) -> list[RowChunk]:
    start = min(_context(runner), runner.max_model_len - max(counts))
    return [RowChunk(row, start, _some_tokens(runner, count)) for row, count in enumerate(counts)]


def _context(runner: Runner) -> int:
    return min(_CONTEXT, runner.max_model_len // 2)


def _some_tokens(runner: Runner, count: int) -> list[int]:
    return [index % runner.vocab_size for index in range(count)]


def _samplers(runner: Runner, count: int, held: range | None = None) -> list[RowSampler]:
    """Samplers of requests with default parameters."""
    held = runner.vocab.held if held is None else held
    sampler = RowSampler(SamplingParams(), 0, 0, (), (), runner.vocab_size, runner.device, held)
    return [sampler] * count
