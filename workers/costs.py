"""What passes take, by their sizes: real ones, timed before any request is there.

They run over rows and blocks that nobody has yet. What they write into the cache nobody reads: a
block is given to a row before it is written, and offered to others only after that.
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
from outrider.workers.proposers.drafting import guess_at_once
from outrider.workers.runner import Chunk, Runner
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.rows import RowSampler, Span
from outrider.workers.sampling.verify import stand, verify

VERIFY_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512)
DRAFT_ROWS = (1, 2, 4, 8, 16)

_SPAN_TOKENS = 4  # of a row in a pass, if there are rows enough
_FIRST_DRAFT_TOKENS = 2  # what a draft that was right lacks
_PREFILL_TOKENS = 64
_CONTEXT = 32  # tokens of a row before those of the pass
# Up to here sizes are measured whatever they take: costs are not in proportion there.
_SURE_SIZE = 8
_MOST_S = 0.6  # for a table, but for those
_CACHE_BYTES = 48 * 2**20  # more than two cores' share of most
_SLOWEST_S = 0.25  # a size that takes longer is the last
_MOST_PASSES, _SHORT_S = 6, 0.02  # of a size at once: more than two if all are over so soon
_ALIKE = 1.25  # times as long at most; what a quiet machine measures twice is nearer by far


class DraftCosts(NamedTuple):
    """The draft's part of `StepCosts`."""

    first: CostTable
    next: CostTable
    prefill_s: float


def measure_step(
    target: Runner, draft: Runner | None, ops: Ops, head: HeadRunner | None = None
) -> StepCosts:
    """Of all models in one process."""
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
    """Passes as verification has them, choices included, by their tokens; and what a head that goes
    along makes of them. Of all sizes, or of so many of the smallest.

    Ranks of a group do this together; each gets the same table.
    """
    most = runner.num_rows * (runner.max_model_len - _context(runner))
    recorded = runner.recorded_sizes
    sizes = [size for size in recorded or VERIFY_SIZES if size <= most][:num_sizes]

    def run(size: int) -> None:
        _verify_once(runner, ops, _share(size, runner, _SPAN_TOKENS), is_read=head is not None)
        if head is not None and runner.passed is not None:
            head.extend(runner.passed.chunks, runner.passed.features)[-1, 0].item()

    return _table(runner, sizes, run, is_padded=bool(recorded))


def measure_draft(runner: Runner, ops: Ops) -> DraftCosts:
    first, following = measure_drafting(runner, ops)
    num_prefilled = min(_PREFILL_TOKENS, runner.max_model_len)
    prefill = _table(runner, [num_prefilled], lambda count: _prefill_once(runner, count))
    return DraftCosts(first, following, prefill.seconds[0] / num_prefilled)


def measure_drafting(
    runner: Runner, ops: Ops, num_sizes: int | None = None
) -> tuple[CostTable, CostTable]:
    """The first pass of a drafting round and those that follow, guesses included, by their rows, of
    all sizes or likewise."""
    rows = [count for count in DRAFT_ROWS if count <= runner.num_rows][:num_sizes]
    tokens = min(_FIRST_DRAFT_TOKENS, runner.max_model_len)
    # In this order: a round in one call takes both passes, and is possible once both were run.
    following = _table(runner, rows, lambda count: _draft_once(runner, ops, [1] * count))
    # After a pass of the target a CPU reads a draft's weights from memory again.
    before = _fill_caches() if runner.device.type == "cpu" else None
    first = _table(runner, rows, lambda count: _draft_once(runner, ops, [tokens] * count), before)
    return first, following


def measure_head(head: HeadRunner, ops: Ops) -> DraftCosts:
    """Drafts of a head, guesses included, by their rows. Its prompts are the target's."""
    runner = head.target
    rows = [count for count in DRAFT_ROWS if count <= runner.num_rows]
    states = torch.zeros(
        max(rows), head.head.spec.state_size, dtype=runner.decoder.dtype, device=runner.device
    )

    def guess(state: Tensor, level: int) -> None:
        chunks = _chunks(runner, [1] * len(state))
        samplers = _samplers(runner, len(chunks), head.vocab.held)
        spans = [
            Span(sampler, range(chunk.start + 1))
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
    """Whether the sizes of the first take about as long by the other one."""
    if not other.sizes:
        return False
    told = zip(table.seconds, map(other.at, table.sizes), strict=True)
    return all(own <= _ALIKE * its and its <= _ALIKE * own for own, its in told)


def _table(
    runner: Runner,
    sizes: Iterable[int],
    run: Callable[[int], None],
    before: Callable[[], object] | None = None,
    *,
    is_padded: bool = False,
) -> CostTable:
    """The quickest of several passes of each size counts: whatever disturbs one makes it slower."""
    measured: list[int] = []
    seconds: list[float] = []
    spent_s = 0.0
    for size in sizes:
        if measured and size > _SURE_SIZE:
            expected_s = 2 * seconds[-1] * size / measured[-1]
            if seconds[-1] > _SLOWEST_S or spent_s + expected_s > _MOST_S:
                break
        # The first passes of a size may have more to do than those after them.
        taken: list[float] = []
        while len(taken) < 2 or (len(taken) < _MOST_PASSES and sum(taken) < _SHORT_S):
            taken.append(_timed(runner, run, size, before))
        spent_s += sum(taken)
        measured.append(size)
        seconds.append(min(taken))
    if spent_s < _MOST_S:  # later, since what disturbs a pass disturbs its neighbours as well
        seconds = [
            min(earlier, _timed(runner, run, size, before))
            for size, earlier in zip(measured, seconds, strict=True)
        ]
    if not is_padded:  # more tokens take no less time: what seems so was disturbed
        for at in range(len(seconds) - 1, 0, -1):
            seconds[at - 1] = min(seconds[at - 1], seconds[at])
    return CostTable(tuple(measured), tuple(seconds), is_padded)


def _timed(
    runner: Runner, run: Callable[[int], None], size: int, before: Callable[[], object] | None
) -> float:
    """Seconds as the slowest rank of the group has them: all decide by the same number."""
    if before is not None:
        before()
    start_s = time.perf_counter()
    run(size)
    own = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=runner.device)
    return float(runner.vocab.group.all_gather(own).max())


def _fill_caches() -> Callable[[], object]:
    """Makes a core's caches hold nothing else, each time it is called."""
    return partial(torch.empty(_CACHE_BYTES, dtype=torch.uint8).fill_, 1)


def _verify_once(runner: Runner, ops: Ops, counts: Sequence[int], *, is_read: bool) -> None:
    chunks = _chunks(runner, counts)
    spans = [
        Span(sampler, range(chunk.start + 1), chunk.tokens[1:])
        for sampler, chunk in zip(_samplers(runner, len(chunks)), chunks, strict=True)
    ]
    wanted = range(sum(counts))
    best = None if is_read else runner.best(chunks, wanted)
    if best is not None:
        stand(best, spans)
        return
    logits = runner.logits(runner.forward(chunks), wanted)
    verify(logits, spans, ops, "shared", runner.vocab)


def _draft_once(runner: Runner, ops: Ops, counts: Sequence[int]) -> None:
    chunks = _chunks(runner, counts)
    spans = [
        Span(sampler, _any_text(runner, chunk.start + len(chunk.tokens)))
        for sampler, chunk in zip(_samplers(runner, len(counts)), chunks, strict=True)
    ]
    if len(chunks) == 1 and guess_at_once(runner, chunks[0], 1, spans[0]) is not None:
        return
    last = [sum(counts[: index + 1]) - 1 for index in range(len(counts))]
    logits = runner.scores(chunks, last)
    draft_sample(logits, spans, ops, "shared", runner.vocab).tokens.tolist()


def _any_text(runner: Runner, length: int) -> range:
    """Of all kinds of tokens, so that drafts are guessed among all."""
    step = max(runner.vocab_size // max(length, 1), 1)
    return range(0, length * step, step)


def _prefill_once(runner: Runner, count: int) -> None:
    hidden = runner.forward([Chunk(0, 0, _some_tokens(runner, count))])
    hidden[-1, 0].item()  # waits for the device


def _share(size: int, runner: Runner, wanted: int) -> list[int]:
    """Tokens of each row in a pass of so many."""
    room = runner.max_model_len - _context(runner)
    each = max(min(wanted, room), -(-size // runner.num_rows))
    return [min(each, size - first) for first in range(0, size, each)]


def _chunks(runner: Runner, counts: Sequence[int]) -> list[Chunk]:
    start = min(_context(runner), runner.max_model_len - max(counts))
    return [Chunk(row, start, _some_tokens(runner, count)) for row, count in enumerate(counts)]


def _context(runner: Runner) -> int:
    return min(_CONTEXT, runner.max_model_len // 2)


def _some_tokens(runner: Runner, count: int) -> list[int]:
    return [index % runner.vocab_size for index in range(count)]


def _samplers(runner: Runner, count: int, held: range | None = None) -> list[RowSampler]:
    """Of requests as they come if nothing is asked for."""
    held = runner.vocab.held if held is None else held
    sampler = RowSampler(SamplingParams(), 0, 0, (), (), runner.vocab_size, runner.device, held)
    return [sampler] * count
